"""What happens between two optimizer steps, in one place and one order on all ranks: reduce, validate, log, save, stop.

Lightning's own validation loop and ModelCheckpoint are not used: the loop cannot validate at a last step off its
interval and leaves out a validation that was due when a run was interrupted, and ModelCheckpoint knows no commits.
"""

import math
import time
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import lightning.pytorch as pl
import torch

from trainwright.backends.native.checkpoint import restore_random_state, start_random_state
from trainwright.backends.native.data import Batch, BatchLoader
from trainwright.backends.native.early_stopping import EarlyStopping
from trainwright.backends.native.measures import param_norm, sum_over_ranks, validation_loss
from trainwright.backends.native.module import Pretraining
from trainwright.backends.native.retention import SavedCheckpoint
from trainwright.backends.native.run_log import RunLog, is_logged_step
from trainwright.backends.native.saver import CheckpointSaver
from trainwright.backends.native.signals import StopRequest
from trainwright.backends.native.step_report import StepReport
from trainwright.config import RunConfig
from trainwright.errors import EXIT_PREEMPTED, RunFailedError
from trainwright.plan import padded_vocab_size, train_flops_per_token


class PreemptedError(RunFailedError):
    """The run is to be started again: it was told to stop, or its time is over. Its last step is saved, if it saves."""

    def __init__(self, step: int, reason: Literal["preempted", "max_time_per_run"]) -> None:
        why = "as asked" if reason == "preempted" else "since exp_manager.max_time_per_run is over,"
        super().__init__(f"stopped {why} after step {step}", EXIT_PREEMPTED)
        self.reason = reason


class DivergedError(RunFailedError):
    """The loss is no number any more."""


@dataclass(frozen=True, kw_only=True)
class _Agreement:
    """What all ranks know after a step."""

    train_loss: float  # mean over the global batch
    is_told_to_stop: bool
    is_time_over: bool  # exp_manager.max_time_per_run
    is_save_overdue: bool  # checkpoint_callback_params.train_time_interval
    has_failed_save: bool  # in the background, on any rank

    @property
    def stop(self) -> bool:
        return self.is_told_to_stop or self.is_time_over


@dataclass(frozen=True, kw_only=True)
class _Times:
    step_s: float  # validation and saving left out
    delta_s: float | None  # from the end of the step before; None: there was none


class StepBoundary(pl.Callback):
    """Acts after each optimizer step. Its state, what validations showed so far, travels with the checkpoints."""

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
        self._began = self._step_began = self._saved_at = 0.0
        self._step_ended: float | None = None  # None: no step so far
        self._tokens_per_s: deque[float] = deque(maxlen=1000)
        self.train_loss: float | None = None if resumed is None else resumed.metrics.get("train_loss")
        self.last_validation: tuple[int, float] | None = None  # step and loss
        self.best_validation: tuple[int, float] | None = None
        manager = config.exp_manager
        self.early_stopping = (
            EarlyStopping(manager.early_stopping_callback_params) if manager.create_early_stopping_callback else None
        )

    @property
    def median_tokens_per_s(self) -> float | None:
        """Median of this attempt's steps but the first, which pays for warming up; None if there is none."""
        steady = list(self._tokens_per_s)[1:]
        return median(steady) if steady else None

    def state_dict(self) -> dict[str, Any]:
        return {
            "last_validation": self.last_validation,
            "best_validation": self.best_validation,
            "early_stopping": self.early_stopping and self.early_stopping.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.last_validation = state_dict["last_validation"]
        self.best_validation = state_dict["best_validation"]
        if self.early_stopping is not None and state_dict["early_stopping"] is not None:
            self.early_stopping.load_state_dict(state_dict["early_stopping"])

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
        self._end_early(trainer)
        self._began = self._step_began = self._saved_at = time.perf_counter()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        if (batch_idx + 1) % trainer.accumulate_grad_batches:
            return
        assert isinstance(pl_module, Pretraining)
        step, times = trainer.global_step, self._take_times(pl_module.device)
        if pl_module.average is not None:
            pl_module.average.update(step)
        agreed = self._agree(trainer, pl_module)
        self.train_loss = agreed.train_loss
        if self._saver is not None and agreed.has_failed_save:
            self._saver.settle(trainer)
        val_loss = None
        if math.isfinite(self.train_loss) and not agreed.stop and self._is_validation_due(step):
            val_loss = self._validate(trainer, pl_module, step)
        is_over = self._end_early(trainer)
        self._report(pl_module, step, val_loss, times)
        self._refuse_divergence(step)
        if self._saver is not None and (self._is_save_due(step) or is_over or self._is_urgent(agreed)):
            self._save(trainer, self._saver, step, val_loss)
        if agreed.stop and not is_over:
            self._stop.received = True  # on this rank too, if the signal reached another one
            raise PreemptedError(step, "preempted" if agreed.is_told_to_stop else "max_time_per_run")
        self._step_began = time.perf_counter()

    def _take_times(self, device: torch.device) -> _Times:
        if self._config.exp_manager.step_timing_kwargs.sync_cuda and device.type == "cuda":
            torch.cuda.synchronize(device)
        now, before = time.perf_counter(), self._step_ended
        self._step_ended = now
        return _Times(step_s=now - self._step_began, delta_s=None if before is None else now - before)

    def _agree(self, trainer: pl.Trainer, module: Pretraining) -> _Agreement:
        """Return what the ranks know together: one all-reduce a step. Of clocks, that of rank 0 counts."""
        now, manager = time.perf_counter(), self._config.exp_manager
        limit, interval = manager.max_time_per_run, manager.checkpoint_callback_params.train_time_interval
        loss = module.take_step_loss() / trainer.world_size
        flags = [
            self._stop.received,
            trainer.is_global_zero and limit is not None and now - self._began >= limit,
            trainer.is_global_zero and interval is not None and now - self._saved_at >= interval,
            self._saver is not None and self._saver.has_failed,
        ]
        mine = torch.cat([loss.reshape(1), torch.tensor(flags, dtype=torch.float64, device=loss.device)])
        total_loss, *counts = sum_over_ranks(trainer, mine).tolist()
        told_to_stop, time_over, save_overdue, failed_saves = (count > 0 for count in counts)
        is_last = trainer.global_step == self._config.trainer.max_steps  # then the run is as good as done
        return _Agreement(
            train_loss=total_loss,
            is_told_to_stop=told_to_stop and not is_last,
            is_time_over=time_over and not is_last,
            is_save_overdue=save_overdue,
            has_failed_save=failed_saves,
        )

    def _is_urgent(self, agreed: _Agreement) -> bool:
        """Return whether to save off the interval; a user may want a signal to end a run without that."""
        saves_on_signal = self._config.exp_manager.create_preemption_callback
        return agreed.is_save_overdue or agreed.is_time_over or (agreed.is_told_to_stop and saves_on_signal)

    def _end_early(self, trainer: pl.Trainer) -> bool:
        """Let the loop end if validation no longer improves, which on all ranks shows the same; return whether so."""
        is_over = self.early_stopping is not None and self.early_stopping.reason is not None
        trainer.should_stop = trainer.should_stop or is_over
        return is_over

    def _is_validation_due(self, step: int) -> bool:
        trainer = self._config.trainer
        return self._validation is not None and (step % trainer.val_check_interval == 0 or step == trainer.max_steps)

    def _is_save_due(self, step: int) -> bool:
        every = self._config.exp_manager.checkpoint_callback_params.every_n_train_steps
        at_interval = self._is_validation_due(step) if every is None else step % every == 0
        return at_interval or step == self._config.trainer.max_steps

    def _validate(self, trainer: pl.Trainer, module: Pretraining, step: int) -> float:
        assert self._validation is not None
        with nullcontext() if module.average is None else module.average.for_validation():
            loss = validation_loss(trainer, module, self._validation)
        self.last_validation = (step, loss)
        if self.best_validation is None or loss < self.best_validation[1]:
            self.best_validation = (step, loss)
        if self.early_stopping is not None and self.train_loss is not None:
            self.early_stopping.look({"val_loss": loss, "train_loss": self.train_loss})
        return loss

    def _validate_late(self, trainer: pl.Trainer, module: pl.LightningModule, resumed: SavedCheckpoint) -> None:
        """Make up for a validation that was due when the run was interrupted."""
        if "val_loss" in resumed.metrics or not self._is_validation_due(resumed.step):
            return
        assert isinstance(module, Pretraining)
        loss = self._validate(trainer, module, resumed.step)
        if self._log is not None:
            self._log.late_validation(resumed.step, loss)

    def _report(self, module: Pretraining, step: int, val_loss: float | None, times: _Times) -> None:
        assert self.train_loss is not None
        config, data, trainer = self._config, self._config.data, self._config.trainer
        samples_per_s = data.global_batch_size / times.step_s
        tokens_per_s = samples_per_s * data.seq_length
        self._tokens_per_s.append(tokens_per_s)
        is_logged = is_logged_step(step, trainer.log_every_n_steps, trainer.max_steps)
        norm = param_norm(module) if is_logged else None  # on all ranks, which may hold a share each
        if self._log is not None:
            flops = train_flops_per_token(config.model, data.seq_length, padded_vocab_size(config))
            tflops_per_s = tokens_per_s * flops / module.trainer.world_size / 1e12
            peak = config.hardware.peak_tflops
            report = StepReport(
                step=step,
                consumed_samples=step * data.global_batch_size,
                train_loss=self.train_loss,
                val_loss=val_loss,
                lr=module.lr,
                grad_norm=float(module.grad_norm),
                param_norm=norm,
                step_time_s=times.step_s,
                delta_time_s=times.delta_s,
                tokens_per_s=tokens_per_s,
                samples_per_s=samples_per_s,
                tflops_per_s=tflops_per_s,
                mfu=None if peak is None else tflops_per_s / peak,
            )
            self._log.step(report)

    def _refuse_divergence(self, step: int) -> None:
        assert self.train_loss is not None
        if not math.isfinite(self.train_loss):
            raise DivergedError(
                f"train_loss is {self.train_loss} at step {step}: training diverged. "
                f"Lower optim.lr={self._config.optim.lr} or raise optim.sched.warmup_steps="
                f"{self._config.optim.sched.warmup_steps}; run_id resumes from the newest checkpoint"
            )

    def _save(self, trainer: pl.Trainer, saver: CheckpointSaver, step: int, val_loss: float | None) -> None:
        assert self.train_loss is not None
        metrics = {"train_loss": self.train_loss} | ({} if val_loss is None else {"val_loss": val_loss})
        consumed_samples = step * self._config.data.global_batch_size
        if self._log is not None:
            self._log.secure()
        self._saved_at = time.perf_counter()
        saver.save(trainer, step=step, consumed_samples=consumed_samples, metrics=metrics)
