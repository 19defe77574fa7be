"""Saves a checkpoint from all ranks, commits it and deletes those it supersedes."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch.distributed.checkpoint.api import CheckpointException

from trainwright.backends.native import retention
from trainwright.backends.native.checkpoint import first_failure
from trainwright.config import RunConfig
from trainwright.errors import RunFailedError
from trainwright.node import commit


class CheckpointSaver:
    """Writes the checkpoints of one attempt. All ranks call `save` together."""

    def __init__(self, *, config: RunConfig, checkpoints: Path, attempt: int, versions: dict[str, str]) -> None:
        self._name = config.name
        self._params = config.exp_manager.checkpoint_callback_params
        self._checkpoints = checkpoints
        self._attempt = attempt
        self._versions = versions

    def save(self, trainer: pl.Trainer, *, step: int, consumed_samples: int, metrics: dict[str, float]) -> None:
        """Save the state after `step`, unless a complete checkpoint of it exists, and return when it is committed."""
        directory = self._free_directory(step, consumed_samples, metrics) if trainer.is_global_zero else None
        directory = trainer.strategy.broadcast(directory)
        if directory is None:
            return
        try:
            trainer.save_checkpoint(directory)  # ends with a barrier
            if trainer.is_global_zero:
                commit.write_commit(directory, self._metadata(trainer, step, consumed_samples, metrics))
        except (OSError, CheckpointException) as error:
            reason = first_failure(error) if isinstance(error, CheckpointException) else error
            raise RunFailedError(
                f"{directory} could not be written: {reason}; make room there, or start a new run with "
                "exp_manager.exp_dir on another disk. Checkpoints saved before are intact"
            ) from error
        if trainer.is_global_zero:
            for old in retention.superseded(retention.saved_checkpoints(self._checkpoints), self._params):
                retention.delete(old)
        trainer.strategy.barrier("checkpoint committed")

    def _metadata(
        self, trainer: pl.Trainer, step: int, consumed_samples: int, metrics: dict[str, float]
    ) -> dict[str, Any]:
        return {
            "step": step,
            "consumed_samples": consumed_samples,
            "metrics": metrics,
            "world_size": trainer.world_size,
            "versions": self._versions,
            "attempt": self._attempt,
        }

    def _free_directory(self, step: int, consumed_samples: int, metrics: dict[str, float]) -> Path | None:
        if any(saved.step == step for saved in retention.saved_checkpoints(self._checkpoints)):
            return None
        values = {"name": self._name, "step": step, "consumed_samples": consumed_samples, "epoch": 0, **metrics}
        return retention.unused_path(self._checkpoints / retention.checkpoint_name(self._params.filename, values))
