"""Names inside a run directory and a sweep directory; no other module knows them."""

from __future__ import annotations

import os
from pathlib import Path


class RunPaths:
    """Where a run keeps its files. All that is ours lies below `run/`; the rest belongs to the training framework."""

    def __init__(self, run_dir: str | os.PathLike[str]) -> None:
        self.run_dir = Path(os.path.abspath(run_dir))
        self.checkpoints = self.run_dir / "checkpoints"
        self.own = self.run_dir / "run"
        self.worker = self.own / "worker.pyz"
        self.results = self.own / "results.json"
        self.events = self.own / "events"
        self.jobs = self.own / "jobs"
        self.logs = self.own / "logs"
        self.ranks = self.own / "ranks"
        self.devices = self.own / "devices"

    def checkpoint(self, filename: str) -> Path:
        """Return the directory of one checkpoint."""
        return self.checkpoints / filename

    def record(self, attempt: int) -> Path:
        """Return the frozen config of an attempt; the first one has the plain name."""
        return self.own / ("run.yaml" if attempt == 1 else f"run-a{attempt}.yaml")

    def metrics(self, attempt: int) -> Path:
        """Return where an attempt's steps are written, one JSON object a line."""
        return self.own / f"metrics-a{attempt}.jsonl"

    def code(self, attempt: int) -> Path:
        """Return what the code was that an attempt was submitted from; the first one has the plain name."""
        return self.own / ("code" if attempt == 1 else f"code-a{attempt}")

    def code_snapshot(self, attempt: int) -> Path:
        """Return the copy of the code that an attempt runs, where one was asked for."""
        return self.code(attempt) / "snapshot"

    def copied_files(self, attempt: int) -> Path:
        """Return where an attempt keeps the files that the user wanted beside it; the first one has the plain name."""
        return self.own / ("files" if attempt == 1 else f"files-a{attempt}")

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
        path = Path(os.path.abspath(sweep_dir))
        return cls(path.parents[2], path.parents[1].name, path.name)

    @staticmethod
    def all_below(exp_dir: str | os.PathLike[str], name: str) -> Path:
        """Return the directory of all sweeps of a name."""
        return Path(os.path.abspath(exp_dir)) / name / "sweeps"
