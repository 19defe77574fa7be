"""Weights & Biases as a logger: one W&B run for all attempts of a run."""

from collections.abc import Mapping
from typing import Any

import wandb

from trainwright.config import RunConfig
from trainwright.exp_manager import run_name
from trainwright.node.run_paths import RunPaths


class WandbLogger:
    """Writes scalars to the W&B run whose id is the run id. `wandb_logger_kwargs` go to wandb.init."""

    def __init__(self, config: RunConfig, paths: RunPaths) -> None:
        options: dict[str, Any] = {
            key: value for key, value in (config.exp_manager.wandb_logger_kwargs or {}).items() if value is not None
        }
        # The names that Lightning's logger, which NeMo uses, has for arguments of wandb.init.
        for theirs, ours in (("version", "id"), ("save_dir", "dir")):
            if theirs in options:
                options[ours] = options.pop(theirs)
        if options.pop("offline", False):
            options["mode"] = "offline"
        own: dict[str, Any] = {
            "project": run_name(config),
            "name": paths.run_dir.name,
            "id": paths.run_dir.name,
            "dir": str(paths.own_growing),
            "config": config.to_dict(),
            "resume": "allow",
        }
        self._run = wandb.init(**{**own, **options})

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        # W&B itself drops a step that it has, which a killed attempt logged and this one computes again.
        self._run.log(dict(values), step=step)

    def flush(self) -> None:
        """Do nothing: W&B's own process sends what it has."""

    def close(self) -> None:
        self._run.finish()
