"""Saves a checkpoint from all ranks, commits it and deletes those it supersedes, while training goes on if asked to."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch.distributed.checkpoint.api import CheckpointException

from trainwright.backends.native import retention
from trainwright.backends.native.checkpoint import BackgroundWriter, first_failure
from trainwright.backends.native.retention import SavedCheckpoint
from trainwright.config import RunConfig
from trainwright.errors import RunFailedError
from trainwright.exp_manager import run_name
from trainwright.node import commit


class CheckpointSaver:
    """Writes the checkpoints of one attempt. All ranks build one and call `save` and `settle` together."""

    def __init__(
        self,
        *,
        config: RunConfig,
        checkpoints: Path,
        resumed: SavedCheckpoint | None,  # None: from the start
        metadata: dict[str, Any],  # the same in all commits of the attempt
    ) -> None:
        self._name = run_name(config)
        self._params = config.exp_manager.checkpoint_callback_params
        self._checkpoints = checkpoints
        self._metadata = metadata
        self._background = BackgroundWriter() if self._params.async_save else None
        self._committer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="commit")
        self._under_way: tuple[Path, Future[Any]] | None = None
        # What a resume passed over as damaged must not count as the newest: the one resumed from would go for it.
        self._passed_over = {
            saved.path
            for saved in retention.saved_checkpoints(checkpoints)
            if resumed is None or (saved.step >= resumed.step and saved.path != resumed.path)
        }

    @property
    def has_failed(self) -> bool:
        """Whether a save in the background is known to have failed on this rank; `settle` then raises."""
        return self._under_way is not None and self._under_way[1].done() and self._under_way[1].exception() is not None

    def save(self, trainer: pl.Trainer, *, step: int, consumed_samples: int, metrics: dict[str, float]) -> None:
        """Save the state after `step`, unless a complete checkpoint of it exists.

        Returns when it is committed or, with async_save, when the state is copied; at most one save is under way.
        """
        self.settle(trainer)
        directory = self._free_directory(step, consumed_samples, metrics) if trainer.is_global_zero else None
        directory = trainer.strategy.broadcast(directory)
        if directory is None:
            return
        try:
            trainer.save_checkpoint(directory, storage_options=self._background)  # the same outcome on all ranks
        except (OSError, CheckpointException) as error:
            raise _not_written(directory, _reason(error)) from error
        metadata = {**self._metadata, "step": step, "consumed_samples": consumed_samples, "metrics": metrics}
        self._under_way = directory, self._finish(trainer, directory, metadata)
        if self._background is None:
            self.settle(trainer)

    def settle(self, trainer: pl.Trainer) -> None:
        """Wait until no save is under way. Raises RunFailedError on all ranks when the last one failed."""
        if self._under_way is None:
            return
        directory, finished = self._under_way
        self._under_way = None
        error = finished.exception()
        reason = trainer.strategy.broadcast(None if error is None else _reason(error))
        if reason is not None:
            raise _not_written(directory, reason) from error

    def close(self) -> None:
        """Wait for what this rank has under way, whatever comes of it."""
        self._committer.shutdown()

    def _finish(self, trainer: pl.Trainer, directory: Path, metadata: dict[str, Any]) -> Future[Any]:
        """Return what is done when this rank's share is written and, on rank 0, the whole is committed."""
        written = self._background.written if self._background is not None else None
        if not trainer.is_global_zero:
            return written or _at_once(lambda: None)

        def commit_all() -> None:
            if written is not None:
                written.result()  # it ends with an agreement of all ranks
            commit.write_commit(directory, metadata)
            for old in retention.superseded(self._own_checkpoints(), self._params):
                retention.delete(old)

        return _at_once(commit_all) if written is None else self._committer.submit(commit_all)

    def _own_checkpoints(self) -> list[SavedCheckpoint]:
        return [
            saved for saved in retention.saved_checkpoints(self._checkpoints) if saved.path not in self._passed_over
        ]

    def _free_directory(self, step: int, consumed_samples: int, metrics: dict[str, float]) -> Path | None:
        if any(saved.step == step for saved in self._own_checkpoints()):
            return None
        values = {"name": self._name, "step": step, "consumed_samples": consumed_samples, "epoch": 0, **metrics}
        return retention.unused_path(self._checkpoints / retention.checkpoint_name(self._params.name_template, values))


def _at_once(work: Callable[[], None]) -> Future[Any]:
    done: Future[Any] = Future()
    try:
        work()
    except OSError as error:
        done.set_exception(error)
    else:
        done.set_result(None)
    return done


def _reason(error: BaseException) -> str:
    return str(first_failure(error) if isinstance(error, CheckpointException) else error)


def _not_written(directory: Path, reason: str) -> RunFailedError:
    return RunFailedError(
        f"{directory} could not be written: {reason}; make room there, or start a new run with exp_manager.exp_dir on "
        "another disk. Checkpoints saved before are intact"
    )
