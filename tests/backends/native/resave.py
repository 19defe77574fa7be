"""A rank that loads a checkpoint and saves what it then holds, without a step in between."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from trainwright.backends.native.checkpoint import OneDevice, Replicated, Sharded
from trainwright.backends.native.data import BatchLoader, MicroBatchSampler, plan_batches
from trainwright.backends.native.module import Pretraining
from trainwright.backends.native.ranks import process_group, ranks_from_environment
from trainwright.backends.native.retention import saved_checkpoints
from trainwright.config import RunConfig
from trainwright.node.run_paths import RunPaths


class _SaveAtOnce(pl.Callback):
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.save_checkpoint(self._directory)
        trainer.should_stop = True


def resave(run_dir: Path, attempt: int, *, config: RunConfig, target: Path) -> int:
    """Load the newest checkpoint of `run_dir` as this rank of the strategy of `config`, and save it to `target`."""
    ranks = ranks_from_environment()
    if ranks.world_size == 1:
        strategy: Any = OneDevice("cpu")
    elif config.parallelism.strategy == "fsdp":
        strategy = Sharded(data_parallel_size=ranks.world_size, tensor_parallel_size=1)
    else:
        strategy = Replicated()
    with process_group(ranks, "cpu"):
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=ranks.local_world_size,
            strategy=strategy,
            plugins=[LightningEnvironment() if ranks.world_size == 1 else TorchElasticEnvironment()],
            max_epochs=-1,
            callbacks=[_SaveAtOnce(target)],
            default_root_dir=run_dir,
            use_distributed_sampler=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        plan = plan_batches(config.data.micro_batch_size, config.data.global_batch_size, ranks.world_size)
        samples: Any = np.zeros((100, config.data.seq_length + 1), dtype=np.int64)
        loader = BatchLoader(samples, MicroBatchSampler(plan, ranks.rank, 10), num_workers=0, pin_memory=False)
        newest = saved_checkpoints(RunPaths(run_dir).checkpoints)[-1]
        trainer.fit(Pretraining(config), loader, ckpt_path=newest.path)
    return 0


def tensors(checkpoint: Path, scratch: Path) -> dict[str, bytes]:
    """Return all tensors of a checkpoint by name, whole, as their bytes."""
    dcp_to_torch_save(checkpoint, scratch)
    found: dict[str, bytes] = {}

    def collect(prefix: str, node: Any) -> None:
        if isinstance(node, torch.Tensor):
            found[prefix] = node.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        else:
            for key, value in node.items():
                collect(f"{prefix}/{key}", value)

    collect("", torch.load(scratch, weights_only=True))
    return found
