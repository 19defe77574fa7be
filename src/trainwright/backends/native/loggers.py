"""Where the numbers of a run go besides its own files: TensorBoard, Weights & Biases, MLflow."""

from collections.abc import Mapping
from typing import Protocol

from trainwright.config import RunConfig
from trainwright.node.run_paths import RunPaths


class Logger(Protocol):
    """Takes the numbers of a run on rank 0. A resumed run goes on in the same place, no step twice and none missing."""

    def scalars(self, values: Mapping[str, float], step: int) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def open_loggers(config: RunConfig, paths: RunPaths, first_step: int) -> list[Logger]:
    """Return the loggers that the run asks for; each package is imported only where its logger is asked for."""
    manager = config.exp_manager
    loggers: list[Logger] = []
    if manager.create_tensorboard_logger:
        from trainwright.backends.native.event_files import TensorBoardLogger

        loggers.append(TensorBoardLogger(config, paths, first_step))
    if manager.create_wandb_logger:
        from trainwright.backends.native.wandb_logger import WandbLogger

        loggers.append(WandbLogger(config, paths))
    if manager.create_mlflow_logger:
        from trainwright.backends.native.mlflow_logger import MlflowLogger

        loggers.append(MlflowLogger(config, paths.run_dir))
    return loggers
