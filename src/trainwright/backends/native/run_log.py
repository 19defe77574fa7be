"""What rank 0 writes down of each step: run/metrics-aN.jsonl, the loggers, and the progress on stdout."""

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from statistics import median

from trainwright.backends.native.loggers import open_loggers
from trainwright.backends.native.progress import choose_progress
from trainwright.backends.native.step_report import StepReport
from trainwright.backends.native.step_timing import StepTimes
from trainwright.config import RunConfig
from trainwright.node.growing import Mirror
from trainwright.node.results import finite
from trainwright.node.run_paths import RunPaths

_SCALARS = (
    "train_loss",
    "lr",
    "grad_norm",
    "param_norm",
    "consumed_samples",
    "tokens_per_s",
    "samples_per_s",
    "mfu",
)


class RunLog:
    """Writes every step to the metrics file, and each `trainer.log_every_n_steps` to the loggers."""

    def __init__(self, *, config: RunConfig, paths: RunPaths, attempt: int, first_step: int) -> None:
        trainer, self._manager = config.trainer, config.exp_manager
        self._max_steps = trainer.max_steps
        self._every = trainer.log_every_n_steps
        self._recent_step_times_s: deque[float] = deque(maxlen=100)
        self._step_times = StepTimes(self._manager.step_timing_kwargs)
        self._delta_times = StepTimes(self._manager.step_timing_kwargs)
        paths.own_growing.mkdir(parents=True, exist_ok=True)
        # Line-buffered: a killed run leaves whole lines, up to its last step.
        self._metrics = paths.metrics(attempt).open("w", buffering=1, encoding="utf-8")
        self._loggers = open_loggers(config, paths, first_step)
        self._mirror = None if paths.scratch is None else Mirror(paths.scratch, paths.run_dir)
        self._progress = choose_progress(
            max_steps=trainer.max_steps,
            first_step=first_step,
            every=self._every,
            enable_bar=trainer.enable_progress_bar,
        )

    def step(self, report: StepReport) -> None:
        self._metrics.write(json.dumps(finite(asdict(report)), allow_nan=False) + "\n")
        self._recent_step_times_s.append(report.step_time_s)
        self._progress.show(report, (self._max_steps - report.step) * median(self._recent_step_times_s))
        times = dict(self._times(report))
        is_logged = is_logged_step(report.step, self._every, self._max_steps)
        scalars = {tag: getattr(report, tag) for tag in _SCALARS} | times if is_logged else {}
        self._log({**scalars, "val_loss": report.val_loss}, report.step)
        if is_logged:
            self.flush()

    def late_validation(self, step: int, val_loss: float) -> None:
        """Write down a validation that an interrupted attempt owed."""
        self._metrics.write(json.dumps(finite({"step": step, "val_loss": val_loss}), allow_nan=False) + "\n")
        self._log({"val_loss": val_loss}, step)

    def flush(self) -> None:
        """Hand over what was logged."""
        for logger in self._loggers:
            logger.flush()

    def secure(self) -> None:
        """Have all that was logged in the run directory, before a checkpoint counts: a resumed run starts behind it."""
        self.flush()
        if self._mirror is not None:
            self._mirror.finish()

    def close(self) -> None:
        self._progress.close()
        self._metrics.close()
        for logger in self._loggers:
            logger.close()

    def _log(self, values: dict[str, float | None], step: int) -> None:
        known = {tag: value for tag, value in values.items() if value is not None}
        if known:
            for logger in self._loggers:
                logger.scalars(known, step)

    def _times(self, report: StepReport) -> Iterator[tuple[str, float]]:
        """Yield what is logged of a step's time. As in NeMo, the time between steps takes the place of the step's."""
        step_time_s = self._step_times.add(report.step_time_s)
        delta_time_s = None if report.delta_time_s is None else self._delta_times.add(report.delta_time_s)
        if self._manager.log_delta_step_timing:
            if delta_time_s is not None:
                yield "delta_time_s", delta_time_s
        elif self._manager.log_step_timing:
            yield "step_time_s", step_time_s
        if self._manager.log_tflops_per_sec_per_gpu:
            yield "tflops_per_s", report.tflops_per_s


def is_logged_step(step: int, every: int, max_steps: int) -> bool:
    """Return whether the loggers get the scalars of a step."""
    return step % every == 0 or step == max_steps
