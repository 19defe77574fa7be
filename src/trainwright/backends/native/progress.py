"""What a person sees of a run: a bar that stays in place on a terminal, plain lines everywhere else."""

import os
import sys
from datetime import timedelta
from typing import Protocol

from tqdm import tqdm  # type: ignore[import-untyped]

from trainwright.backends.native.step_report import StepReport


class Progress(Protocol):
    def show(self, report: StepReport, seconds_left: float) -> None: ...

    def close(self) -> None: ...


class Bar:
    """A bar on stdout, which is followed onto the caller's terminal; its width is the caller's COLUMNS."""

    def __init__(self, max_steps: int, first_step: int) -> None:
        width = int(os.environ.get("COLUMNS", "80"))
        self._bar = tqdm(total=max_steps, initial=first_step, file=sys.stdout, ncols=width, unit="step", leave=True)
        self._val_loss = ""

    def show(self, report: StepReport, seconds_left: float) -> None:
        if report.val_loss is not None:
            self._val_loss = f", val_loss {report.val_loss:.3f}"
        self._bar.set_postfix_str(f"loss {report.train_loss:.3f}{self._val_loss}", refresh=False)
        self._bar.update(report.step - self._bar.n)

    def close(self) -> None:
        self._bar.close()


class Lines:
    """A line each `every` steps and at each validation."""

    def __init__(self, max_steps: int, every: int) -> None:
        self._max_steps = max_steps
        self._every = every

    def show(self, report: StepReport, seconds_left: float) -> None:
        if report.step % self._every and report.val_loss is None and report.step != self._max_steps:
            return
        val_loss = "" if report.val_loss is None else f" val_loss {report.val_loss:.4f}"
        print(
            f"step {report.step}/{self._max_steps} train_loss {report.train_loss:.4f}{val_loss} lr {report.lr:.3e} "
            f"{report.tokens_per_s:,.0f} tokens/s ETA {timedelta(seconds=round(seconds_left))}",
            flush=True,
        )

    def close(self) -> None:
        pass


def choose_progress(*, max_steps: int, first_step: int, every: int, enable_bar: bool) -> Progress:
    """Return a bar where the caller has a terminal (TRAINWRIGHT_TTY=1); the stdout of a rank is always a file."""
    if enable_bar and os.environ.get("TRAINWRIGHT_TTY") == "1":
        return Bar(max_steps, first_step)
    return Lines(max_steps, every)
