"""What rank 0 writes down of each step: run/metrics-aN.jsonl, TensorBoard, and the progress on stdout."""

import json
import math
from collections import deque
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from trainwright.backends.native.progress import choose_progress
from trainwright.backends.native.step_report import StepReport
from trainwright.config import RunConfig
from trainwright.node.run_paths import RunPaths


class RunLog:
    """Writes every step to the metrics file, and each `trainer.log_every_n_steps` to TensorBoard."""

    def __init__(self, *, config: RunConfig, paths: RunPaths, attempt: int, first_step: int) -> None:
        trainer = config.trainer
        self._max_steps = trainer.max_steps
        self._every = trainer.log_every_n_steps
        self._log_step_timing = config.exp_manager.log_step_timing
        self._recent_step_times_s: deque[float] = deque(maxlen=100)
        paths.own.mkdir(parents=True, exist_ok=True)
        # Line-buffered: a killed run leaves whole lines, up to its last step.
        self._metrics = metrics_path(paths, attempt).open("w", buffering=1, encoding="utf-8")
        self._tensorboard = (
            _open_tensorboard(config, paths, first_step) if config.exp_manager.create_tensorboard_logger else None
        )
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
        if self._tensorboard is None:
            return
        if report.val_loss is not None:
            self._tensorboard.add_scalar("val_loss", report.val_loss, report.step)
        if report.step % self._every == 0 or report.step == self._max_steps:
            self._add_scalars(self._tensorboard, report)

    def late_validation(self, step: int, val_loss: float) -> None:
        """Write down a validation that an interrupted attempt owed."""
        self._metrics.write(json.dumps(finite({"step": step, "val_loss": val_loss}), allow_nan=False) + "\n")
        if self._tensorboard is not None:
            self._tensorboard.add_scalar("val_loss", val_loss, step)

    def close(self) -> None:
        self._progress.close()
        self._metrics.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _add_scalars(self, writer: SummaryWriter, report: StepReport) -> None:
        timing = ("step_time_s",) if self._log_step_timing else ()
        for tag in ("train_loss", "lr", "grad_norm", "consumed_samples", "tokens_per_s", *timing):
            writer.add_scalar(tag, getattr(report, tag), report.step)
        writer.flush()


def metrics_path(paths: RunPaths, attempt: int) -> Path:
    """Return where an attempt's steps are written, one JSON object a line."""
    return paths.own / f"metrics-a{attempt}.jsonl"


def finite(value: Any) -> Any:
    """Return `value` with NaN and infinities as None, which JSON has no numbers for."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _open_tensorboard(config: RunConfig, paths: RunPaths, first_step: int) -> SummaryWriter:
    """Open an event file in the run directory; what an interrupted attempt wrote after `first_step` is dropped."""
    writer = SummaryWriter(str(paths.run_dir), purge_step=first_step + 1 if first_step else None)
    # add_hparams would start a run of its own in a directory below; this puts the entry into this run's file.
    for summary in hparams(_hyperparameters(config), {"val_loss": None}):  # type: ignore[no-untyped-call]
        writer._get_file_writer().add_summary(summary)  # type: ignore[no-untyped-call]
    return writer


def _hyperparameters(config: RunConfig) -> dict[str, Any]:
    sections = ("model", "data", "optim", "trainer", "parallelism", "hardware")
    tree = config.to_dict()
    return {"seed": config.seed, **dict(_flat({section: tree[section] for section in sections}, ""))}


def _flat(tree: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            pairs += _flat(value, f"{prefix}{key}.")
        else:
            pairs.append((prefix + key, value if isinstance(value, (bool, int, float, str)) else str(value)))
    return pairs
