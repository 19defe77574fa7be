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

    def checkpoint(self, filename: str) -> Path:
        """Return the directory of one checkpoint."""
        return self.checkpoints / filename

    def record(self, attempt: int) -> Path:
        """Return the frozen config of an attempt; the first one has the plain name."""
        return self.own / ("run.yaml" if attempt == 1 else f"run-a{attempt}.yaml")

    def job(self, attempt: int, stage: str) -> Path:
        """Return the JobSpec that the worker of a stage reads."""
        return self.jobs / f"a{attempt}-{stage}.json"

    def node_log(self, stage: str, attempt: int, node: int) -> Path:
        """Return what the worker of a node, and torchrun below it, printed."""
        return self.logs / f"{stage}-a{attempt}-node{node}.log"

    def rank_log(self, stage: str, attempt: int, rank: int) -> Path:
        """Return what a global rank printed, stdout and stderr, byte for byte."""
        return self.logs / f"{stage}-a{attempt}-rank{rank}.log"

    def rank_record(self, stage: str, attempt: int, rank: int) -> Path:
        """Return the process id and, at the end, the exit code of a global rank."""
        return self.ranks / f"{stage}-a{attempt}-rank{rank}.json"


class SweepPaths:
    """Where a sweep keeps what concerns all its runs."""

    def __init__(self, exp_dir: str | os.PathLike[str], name: str, sweep_id: str) -> None:
        self.sweep_dir = Path(os.path.abspath(exp_dir)) / name / "sweeps" / sweep_id
        self.jobs = self.sweep_dir / "jobs.json"
