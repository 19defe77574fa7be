"""Saving and loading a checkpoint against copying the same bytes: `python benchmarks/checkpoint.py [--directory D]`.

Under `torchrun --standalone --nproc-per-node 2` the state is sharded over the ranks (parallelism.strategy=fsdp). Each
row is the fastest of some rounds, in which all kinds take turns: neighbours only add time. What counts is the last
column, taken in one run. "Stall" is how long training waits, "rest" what is left of it until the commit if nothing
else runs; "load" reads what was just written, from memory that is.

Measured 2026-11-30 on 2 cores shared with others (load 3.7), a local SSD, torch 2.13, 615 MB:

                     1 rank            2 ranks
sync save, stall     0.558 s   1.57    0.742 s   2.37
async save, stall    0.184 s   0.52    0.324 s   1.04
async save, rest     0.611 s   1.72    0.503 s   1.61
load                 0.296 s   0.83    0.218 s   0.70
cp and sync          0.356 s   1.00    0.313 s   1.00

A save writes what cp writes and then reads it once more for the checksums, so it cannot be as fast.
"""

import argparse
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from hydra import compose, initialize_config_dir
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from trainwright.backends.native.checkpoint import OneDevice, Sharded
from trainwright.backends.native.data import BatchLoader, MicroBatchSampler, plan_batches
from trainwright.backends.native.module import Pretraining
from trainwright.backends.native.ranks import Ranks, decide_together, process_group, ranks_from_environment
from trainwright.backends.native.retention import saved_checkpoints
from trainwright.backends.native.saver import CheckpointSaver
from trainwright.config import RunConfig
from trainwright.places import CONF

# 51 million parameters, of which weights and Adam's moments are 0.6 GB.
_MODEL = ("model=gpt_small", "model.num_layers=8", "model.hidden_size=512", "model.ffn_hidden_size=2048")
_DATA = ("data.seq_length=32", "data.micro_batch_size=1", "exp_manager.checkpoint_callback_params.save_top_k=-1")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the disk")
    parser.add_argument("--rounds", type=int, default=8)
    arguments = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    ranks = ranks_from_environment()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks.local_world_size))
    with process_group(ranks, "cpu"):
        scratch = decide_together(ranks, lambda: Path(tempfile.mkdtemp(dir=arguments.directory)))
        try:
            _train_one_step(ranks, _Measurement(ranks, scratch, arguments.rounds))
        finally:
            if ranks.is_first:
                shutil.rmtree(scratch)


def _train_one_step(ranks: Ranks, measurement: pl.Callback) -> None:
    """Train until the optimizer has a state, and then measure."""
    is_one = ranks.world_size == 1
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks.local_world_size,
        strategy=OneDevice("cpu") if is_one else Sharded(data_parallel_size=ranks.world_size, tensor_parallel_size=1),
        plugins=[LightningEnvironment() if is_one else TorchElasticEnvironment()],
        max_steps=1,
        callbacks=[measurement],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    samples: Any = np.zeros((ranks.world_size, 33), dtype=np.int64)
    sampler = MicroBatchSampler(plan_batches(1, ranks.world_size, ranks.world_size), ranks.rank, 1)
    loader = BatchLoader(samples, sampler, num_workers=0, pin_memory=False)
    trainer.fit(Pretraining(_config(is_async=False)), loader)


def _config(is_async: bool) -> RunConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        saves = f"exp_manager.checkpoint_callback_params.async_save={str(is_async).lower()}"
        return RunConfig.from_hydra(compose("config", [*_MODEL, *_DATA, saves, "~local"]))


class _Measurement(pl.Callback):
    """Saves, loads and copies in turns."""

    def __init__(self, ranks: Ranks, scratch: Path, rounds: int) -> None:
        self._ranks = ranks
        self._scratch = scratch
        self._rounds = rounds
        self._seconds: dict[str, list[float]] = {}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        savers = {
            kind: CheckpointSaver(
                config=_config(is_async=kind == "async"),
                checkpoints=self._scratch / kind,
                resumed=None,
                metadata={"world_size": self._ranks.world_size, "sample_requests": []},
            )
            for kind in ("sync", "async")
        }
        for step in range(1, self._rounds + 1):
            for kind, saver in savers.items():
                self._time(trainer, f"{kind} save, stall", lambda s=saver, n=step: _save(trainer, s, n))
                self._time(trainer, f"{kind} save, rest", lambda s=saver: s.settle(trainer))
            saved = saved_checkpoints(self._scratch / "sync")[0].path
            self._time(trainer, "load", lambda path=saved: trainer.strategy.load_checkpoint(path))
            self._time(trainer, "cp and sync", lambda path=saved: self._copy(path))
            trainer.strategy.barrier()
            if self._ranks.is_first:
                for folder in self._scratch.iterdir():
                    shutil.rmtree(folder)
        if self._ranks.is_first:
            self._print()

    def _time(self, trainer: pl.Trainer, name: str, work: Callable[[], object]) -> None:
        trainer.strategy.barrier()
        began = time.perf_counter()
        work()
        trainer.strategy.barrier()
        self._seconds.setdefault(name, []).append(time.perf_counter() - began)

    def _copy(self, checkpoint: Path) -> None:
        if self._ranks.is_first:
            copy = self._scratch / "copy"
            subprocess.run(["cp", "-r", checkpoint, copy], check=True)
            subprocess.run(["sync", *copy.iterdir(), copy], check=True)
            self.num_bytes = sum(path.stat().st_size for path in copy.iterdir())

    def _print(self) -> None:
        copy = min(self._seconds["cp and sync"])
        print(f"{self._ranks.world_size} ranks, {self.num_bytes / 1e6:.0f} MB, {self._rounds} rounds")
        for name, seconds in self._seconds.items():
            print(f"{name:18} {min(seconds):7.3f} s  {min(seconds) / copy:5.2f} of cp and sync")


def _save(trainer: pl.Trainer, saver: CheckpointSaver, step: int) -> None:
    saver.save(trainer, step=step, consumed_samples=step, metrics={})


if __name__ == "__main__":
    main()
