"""Names inside a run directory and a sweep directory; no other module knows them."""

from __future__ import annotations

import os
from pathlib import Path


class RunPaths:
    """Where a run keeps its files. All that is ours lies below `run/`; the rest belongs to the training framework.

    With `scratch`, a directory of the node's own, what grows is kept below that, under the same names: see `growing`.
    """

    def __init__(self, run_dir: str | os.PathLike[str], scratch: Path | None = None) -> None:
        self.run_dir = _absolute(run_dir)
        self.scratch = scratch  # None: the run directory takes appends
        self.growing = scratch or self.run_dir  # where TensorBoard's event files are written, and all that grows
        self.checkpoints = self.run_dir / "checkpoints"
        self.exports = self.run_dir / "export"
        self.own = self.run_dir / "run"
        self.worker = self.own / "worker.pyz"
        self.results = self.own / "results.json"
        self.damaged = self.own / "damaged"  # checkpoints that a framework shall not see any more
        self.events = self.own / "events"
        self.jobs = self.own / "jobs"
        self.own_growing = self.growing / "run"
        self.logs = self.own_growing / "logs"
        self.ranks = self.own_growing / "ranks"
        self.devices = self.own_growing / "devices"

    @classmethod
    def of_event(cls, file: Path) -> RunPaths:
        """Return the paths of the run that a file among its events belongs to."""
        return cls(file.parent.parent.parent)

    def checkpoint(self, filename: str) -> Path:
        """Return the directory of one checkpoint."""
        return self.checkpoints / filename

    def export(self, step: int) -> Path:
        """Return the directory of the model that was exported from a step's checkpoint."""
        return self.exports / f"step={step}"

    def verification(self, step: int) -> Path:
        """Return what was found out about that model."""
        return self.own / f"verify-step={step}.json"

    def record(self, attempt: int) -> Path:
        """Return the frozen config of an attempt; the first one has the plain name."""
        return self.own / ("run.yaml" if attempt == 1 else f"run-a{attempt}.yaml")

    def metrics(self, attempt: int) -> Path:
        """Return where an attempt's steps are written, one JSON object a line."""
        return self.own_growing / f"metrics-a{attempt}.jsonl"

    def code(self, attempt: int) -> Path:
        """Return what the code was that an attempt was submitted from; the first one has the plain name."""
        return self.own / ("code" if attempt == 1 else f"code-a{attempt}")

    def code_snapshot(self, attempt: int) -> Path:
        """Return the copy of the code that an attempt runs, where one was asked for."""
        return self.code(attempt) / "snapshot"

    def copied_files(self, attempt: int) -> Path:
        """Return where an attempt keeps the files that the user wanted beside it; the first one has the plain name."""
        return self.own / ("files" if attempt == 1 else f"files-a{attempt}")

    def nxdt(self, attempt: int) -> Path:
        """Return what NxDT reads for an attempt that was submitted; the first one has the plain name."""
        return self.own / ("nxdt" if attempt == 1 else f"nxdt-a{attempt}")

    def nemo(self, attempt: int) -> Path:
        """Return what NeMo reads for an attempt that was submitted; the first one has the plain name."""
        return self.own / ("nemo" if attempt == 1 else f"nemo-a{attempt}")

    def job(self, attempt: int, stage: str) -> Path:
        """Return the JobSpec that the worker of a stage reads."""
        return self.jobs / f"a{attempt}-{stage}.json"

    def job_script(self, attempt: int, stage: str) -> Path:
        """Return the script that a scheduler was given for a stage."""
        return self.jobs / f"a{attempt}-{stage}.sh"

    def job_log(self, stage: str, attempt: int) -> Path:
        """Return what that script and the scheduler printed, all its restarts in a row."""
        return self.logs / f"{stage}-a{attempt}-job.log"

    def device_samples(self, stage: str, attempt: int, node: int, suffix: str) -> Path:
        """Return what a node's monitor said of its devices, once a minute."""
        return self.devices / f"{stage}-a{attempt}-node{node}.{suffix}"

    def node_log(self, stage: str, attempt: int, node: int) -> Path:
        """Return what the worker of a node, and torchrun below it, printed."""
        return self.logs / f"{stage}-a{attempt}-node{node}.log"

    def rank_log(self, stage: str, attempt: int, rank: int) -> Path:
        """Return what a global rank printed, stdout and stderr, byte for byte."""
        return self.logs / f"{stage}-a{attempt}-rank{rank}.log"

    def rank_logs(self, stage: str, attempt: int) -> list[Path]:
        """Return the logs of all ranks that this machine sees."""
        return sorted(self.logs.glob(f"{stage}-a{attempt}-rank*.log"))

    def rank_reason(self, stage: str, attempt: int, rank: int) -> Path:
        """Return where a rank may say in one line why it ends as it does."""
        return self.ranks / f"{stage}-a{attempt}-rank{rank}.reason"

    def prepare_reason(self, stage: str, attempt: int, node: int) -> Path:
        """Return where what a node runs before its ranks may say in one line why they cannot start."""
        return self.ranks / f"{stage}-a{attempt}-node{node}.reason"

    def nemo_decision(self, stage: str, attempt: int) -> Path:
        """Return what node 0 has decided for all nodes of a stage before it starts NeMo."""
        return self.nemo(1) / f"{stage}-a{attempt}-decision.json"

    def nxdt_decision(self, stage: str, attempt: int) -> Path:
        """Return what node 0 has decided for all nodes of a stage before it starts NxDT."""
        return self.nxdt(1) / f"{stage}-a{attempt}-decision.json"

    def nxdt_findings(self, stage: str, attempt: int, node: int) -> Path:
        """Return what a node lacks that NxDT's own scripts would set up as root."""
        return self.nxdt(1) / f"{stage}-a{attempt}-node{node}-findings.json"

    def rank_record(self, stage: str, attempt: int, rank: int) -> Path:
        """Return the process id and, at the end, the exit code of a global rank."""
        return self.ranks / f"{stage}-a{attempt}-rank{rank}.json"


class SweepPaths:
    """Where a sweep keeps what concerns all its runs."""

    def __init__(self, exp_dir: str | os.PathLike[str], name: str, sweep_id: str) -> None:
        self.sweep_dir = self.all_below(exp_dir, name) / sweep_id
        self.jobs = self.sweep_dir / "jobs.json"

    @classmethod
    def at(cls, sweep_dir: str | os.PathLike[str]) -> SweepPaths:
        """Return the paths of the sweep in a directory."""
        path = _absolute(sweep_dir)
        return cls(path.parents[2], path.parents[1].name, path.name)

    @staticmethod
    def all_below(exp_dir: str | os.PathLike[str], name: str) -> Path:
        """Return the directory of all sweeps of a name."""
        return _absolute(exp_dir) / name / "sweeps"


def _absolute(path: str | os.PathLike[str]) -> Path:
    """Return `path` as one of pathlib's; one of fsspec's, which no function of `os` takes, is absolute already.

    One below a fact of the site that is unset, in a dry run, stays recognisable.
    """
    if not isinstance(path, (str, os.PathLike)):
        return path
    return Path(path if os.fspath(path).startswith("<site.") else os.path.abspath(path))
