"""Vertex AI on this machine: its service, nodes that are processes, buckets that are folders, and our command line."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Result
from tests.fakes import VertexServer
from tests.slurm.runs import processes
from trainwright import cli
from trainwright.dataset.indexed import IndexedWriter
from trainwright.node.run_paths import RunPaths

START_S = 240  # until a job has started and saved, 12 processes that import torch at once; a loaded machine is slow


@dataclass
class Cloud:
    """The cloud as one run sees it, which goes through several attempts."""

    folder: Path
    server: VertexServer
    train: Callable[..., Result]
    capfd: pytest.CaptureFixture[str]
    name: str  # of the run's folder: run_name
    run_id: str

    @property
    def bucket(self) -> Path:
        return self.folder / "gcs" / "b"

    @property
    def exp_dir(self) -> Path:
        return self.bucket / "nemo-experiments"

    @property
    def paths(self) -> RunPaths:
        return RunPaths(self.exp_dir / self.name / self.run_id)

    def submit(self, *overrides: str) -> Result:
        return self.train(
            *overrides,
            "launcher.image=here/image:1",
            f"launcher.python={sys.executable}",
            f"launcher.bucket_mount={self.folder}/gcs",
            f"launcher.bucket_url={self.folder}/gcs",
            f"launcher.scratch_dir={self.folder}/disk",
            f"+launcher.env.MARK={self.run_id}",
            "+launcher.env.TRAINWRIGHT_COPY_EVERY_S='0.5'",
            f"launcher.api_endpoint={self.server.endpoint}",
            "site.vertex.project=p",
            "site.vertex.bucket=b",
            f"run_id={self.run_id}",
        )

    def __call__(self, name: str, *arguments: str) -> Result:
        """Run `trainwright NAME ...`."""
        self.capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--exp-dir", str(self.exp_dir), *arguments])
        return Result(int(ended.value.code or 0), *self.capfd.readouterr())

    def status(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self("status", self.run_id, "--json").out)["run"]
        return told

    def end_of_job(self) -> str:
        """Return how the newest job ends, once it does and no process of it is left."""
        state = self.server.wait_for_end(list(self.server.jobs)[-1])
        assert processes(self.run_id) == []
        return state

    def num_steps(self, attempt: int) -> int:
        """Return how many steps of an attempt can be seen in the bucket, where files that grow come in one piece."""
        metrics = self.paths.metrics(attempt)
        return metrics.read_bytes().count(b"\n") if metrics.exists() else 0

    def trainer(self, rank: int) -> int:
        """Return the process that trains as a rank: not torchrun, nor the wrapper that watches it."""
        for pid in processes(self.run_id):
            environ, command = (
                Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0") for name in ("environ", "cmdline")
            )
            if f"RANK={rank}".encode() in environ and not any(word.endswith(b"worker.pyz") for word in command):
                return pid
        raise AssertionError(f"rank {rank} does not run")


def write_data(prefix: Path) -> None:
    """Make a Megatron data set of 100 sequences that count upwards."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for start in range(100):
            writer.add_sequence((start + np.arange(60)) % 100)
            writer.end_document()
