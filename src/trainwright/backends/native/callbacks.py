"""What happens between two optimizer steps, in one place and one order on all ranks: reduce, validate, log, save, stop.

Lightning's own validation loop and ModelCheckpoint are not used: the loop cannot validate at a last step off its
interval and leaves out a validation that was due when a run was interrupted, and ModelCheckpoint knows no commits.
"""

import math
import time
from collections import deque
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from trainwright.backends.native.checkpoint import restore_random_state, start_random_state
from trainwright.backends.native.data import Batch, BatchLoader
from trainwright.backends.native.module import Pretraining
from trainwright.backends.native.retention import SavedCheckpoint
from trainwright.backends.native.run_log import RunLog
from trainwright.backends.native.saver import CheckpointSaver
from trainwright.backends.native.signals import StopRequest
from trainwright.backends.native.step_report import StepReport
from trainwright.config import RunConfig
from trainwright.errors import EXIT_PREEMPTED, RunFailedError


class PreemptedError(RunFailedError):
    """The run was asked to stop; unless it saves nothing at all, its last step is in a committed checkpoint."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped as asked after step {step}", EXIT_PREEMPTED)


class StepBoundary(pl.Callback):
    """Acts after each optimizer step. Its state, the validations so far, travels with the checkpoints."""

    def __init__(
        self,
        *,
        config: RunConfig,
        validation: BatchLoader | None,  # None: the run never validates
        saver: CheckpointSaver | None,  # None: the run saves nothing
        log: RunLog | None,  # None: not rank 0
        stop: StopRequest,
        resumed: SavedCheckpoint | None,  # None: from the start
    ) -> None:
        self._config = config
        self._validation = validation
        self._saver = saver
        self._log = log
        self._stop = stop
        self._resumed = resumed
        self._step_began = 0.0
        self._tokens_per_s: deque[float] = deque(maxlen=1000)
        self.train_loss: float | None = None if resumed is None else resumed.metrics.get("train_loss")
        self.last_validation: tuple[int, float] | None = None  # step and loss
        self.best_validation: tuple[int, float] | None = None

    @property
    def median_tokens_per_s(self) -> float | None:
        """Median of this attempt's steps but the first, which pays for warming up; None if there is none."""
        steady = list(self._tokens_per_s)[1:]
        return median(steady) if steady else None

    def state_dict(self) -> dict[str, Any]:
        return {"last_validation": self.last_validation, "best_validation": self.best_validation}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_validation = state_dict["last_validation"]
        self.best_validation = state_dict["best_validation"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        resumed, rank = self._resumed, trainer.global_rank
        if resumed is None:
            start_random_state(seed=self._config.seed, step=0, rank=rank)
        else:
            restore_random_state(
                resumed.path,
                trainer.strategy.root_device,
                seed=self._config.seed,
                step=resumed.step,
                rank=rank,
                same_world=resumed.world_size == trainer.world_size,
            )
            self._validate_late(trainer, pl_module, resumed)
        self._step_began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        assert isinstance(pl_module, Pretraining)
        step_time_s = time.perf_counter() - self._step_began
        step = trainer.global_step
        self.train_loss, stop = self._agree(trainer, pl_module)
        val_loss = None
        if math.isfinite(self.train_loss) and not stop and self._is_validation_due(step):
            val_loss = self._validate(trainer, pl_module, step)
        self._report(pl_module, step, val_loss, step_time_s)
        self._refuse_divergence(step)
        if self._saver is not None and (stop or self._is_save_due(step)):
            self._save(trainer, self._saver, step, val_loss)
        if stop:
            self._stop.received = True  # on this rank too, if the signal reached another one
            raise PreemptedError(step)
        self._step_began = time.perf_counter()

    def _agree(self, trainer: pl.Trainer, module: Pretraining) -> tuple[float, bool]:
        """Return the mean loss over the global batch, and whether any rank was asked to stop: one all-reduce a step."""
        loss = module.take_step_loss() / trainer.world_size
        stop = torch.tensor(float(self._stop.received), dtype=torch.float64, device=loss.device)
        total_loss, stops = _sum_over_ranks(trainer, torch.stack([loss, stop])).tolist()
        is_last = trainer.global_step == self._config.trainer.max_steps  # then the run is as good as done
        return total_loss, stops > 0 and not is_last

    def _is_validation_due(self, step: int) -> bool:
        trainer = self._config.trainer
        return self._validation is not None and (step % trainer.val_check_interval == 0 or step == trainer.max_steps)

    def _is_save_due(self, step: int) -> bool:
        every = self._config.exp_manager.checkpoint_callback_params.every_n_train_steps
        at_interval = self._is_validation_due(step) if every is None else step % every == 0
        return at_interval or step == self._config.trainer.max_steps

    def _validate(self, trainer: pl.Trainer, module: Pretraining, step: int) -> float:
        assert self._validation is not None
        loss = validation_loss(trainer, module, self._validation)
        self.last_validation = (step, loss)
        if self.best_validation is None or loss < self.best_validation[1]:
            self.best_validation = (step, loss)
        return loss

    def _validate_late(self, trainer: pl.Trainer, module: pl.LightningModule, resumed: SavedCheckpoint) -> None:
        """Make up for a validation that was due when the run was interrupted."""
        if "val_loss" in resumed.metrics or not self._is_validation_due(resumed.step):
            return
        assert isinstance(module, Pretraining)
        loss = self._validate(trainer, module, resumed.step)
        if self._log is not None:
            self._log.late_validation(resumed.step, loss)

    def _report(self, module: Pretraining, step: int, val_loss: float | None, step_time_s: float) -> None:
        assert self.train_loss is not None
        data = self._config.data
        tokens_per_s = data.global_batch_size * data.seq_length / step_time_s
        self._tokens_per_s.append(tokens_per_s)
        if self._log is not None:
            report = StepReport(
                step=step,
                consumed_samples=step * data.global_batch_size,
                train_loss=self.train_loss,
                val_loss=val_loss,
                lr=module.lr,
                grad_norm=float(module.grad_norm),
                step_time_s=step_time_s,
                tokens_per_s=tokens_per_s,
            )
            self._log.step(report)

    def _refuse_divergence(self, step: int) -> None:
        assert self.train_loss is not None
        if not math.isfinite(self.train_loss):
            raise RunFailedError(
                f"train_loss is {self.train_loss} at step {step}: training diverged. "
                f"Lower optim.lr={self._config.optim.lr} or raise optim.sched.warmup_steps="
                f"{self._config.optim.sched.warmup_steps}; run_id resumes from the newest checkpoint"
            )

    def _save(self, trainer: pl.Trainer, saver: CheckpointSaver, step: int, val_loss: float | None) -> None:
        assert self.train_loss is not None
        metrics = {"train_loss": self.train_loss} | ({} if val_loss is None else {"val_loss": val_loss})
        consumed_samples = step * self._config.data.global_batch_size
        saver.save(trainer, step=step, consumed_samples=consumed_samples, metrics=metrics)


def validation_loss(trainer: pl.Trainer, module: Pretraining, batches: BatchLoader) -> float:
    """Return the mean loss over all tokens of `batches` on all ranks, from sums of losses and of tokens."""
    sums = torch.zeros(2, dtype=torch.float64, device=module.device)  # loss and tokens
    module.net.eval()
    with torch.no_grad(), trainer.precision_plugin.val_step_context():
        for batch in batches:
            tokens, labels = trainer.strategy.batch_to_device(batch)
            count = labels.numel()
            sums += torch.stack([module.net(tokens, labels).double() * count, sums.new_tensor(count)])
    module.net.train()
    total_loss, total_tokens = _sum_over_ranks(trainer, sums).tolist()
    return float(total_loss / total_tokens)


def _sum_over_ranks(trainer: pl.Trainer, values: Tensor) -> Tensor:
    summed = trainer.strategy.reduce(values, reduce_op="sum")
    assert isinstance(summed, Tensor)
    return summed
