"""What a foreign framework logged, as it comes: from TensorBoard's event files, or from its progress bar in a log.

NxDT and NeMo log through Lightning, whose conventions decide what a value belongs to
(lightning/pytorch/trainer/connectors/logger_connector/logger_connector.py, tried with 2.6):
- The x-axis is `_batches_that_stepped`, which counts a step after it was logged: x = completed steps - 1. A process
  that was resumed may be one off, by where in a step its checkpoint was saved; `global_step` never is.
- One call logs all values of a step, `epoch` last, and every call adds `epoch`.
- Training values are logged every log_every_n_steps, whether they are new or not. NeMo's are new. NxDT logs its own
  while global_step % log_every_n_steps == 0 (lightning_modules/model/base.py), which is the first step of each
  interval, and Lightning writes them at the last one: at 100 steps its counter says (90 + 1) * 8 = 728 samples. The
  logged `global_step` counts the steps before the one that was measured, so it tells which one that was.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterator

from .tfevents import Point, ScalarReader

_END = "epoch"  # the last tag of each call of the logger
_GLOBAL_STEP = "global_step"
# Our names of what is logged of a training step. NxDT's gradient norm is that of the step before.
TRAINING = {
    "reduced_train_loss": "train_loss",
    "lr": "lr",
    "gradient_norm": "grad_norm",
    "grad_norm": "grad_norm",
    "parameter_norm": "param_norm",
    "param_norm": "param_norm",
    "throughput": "samples_per_s",
}
TIMING = {"train_step_timing in s": "step_time_s"}  # new whenever it is logged
VALIDATION = {"val_loss": "val_loss"}
_TAGS = {**TRAINING, **TIMING, **VALIDATION}
_KNOWN = frozenset({*_TAGS, _GLOBAL_STEP, _END})

_BAR = re.compile(r"Epoch (\d+):.*?(\d+)/(\d+) \[(.*)\]")
_EXACT_BELOW = 1000  # the bar shows three digits
_CHUNK_BYTES = 1 << 18


@dataclass
class Logged:
    """The values of one call of the logger, under our names."""

    x: int  # where it stands on the axis
    time: float  # seconds since 1970
    completed: int = 0  # optimizer steps
    measured: int = 0  # the step that training values but times are of; 0: not known yet
    values: dict[str, float] = field(default_factory=dict)


class EventLog:
    """One event file: what one process of the framework logged since `since` (seconds since 1970)."""

    def __init__(self, path: Path, since: float, every: int) -> None:
        self._reader = ScalarReader(path)
        self._since = since
        self._every = every  # log_every_n_steps
        self._ahead = 0  # by how many steps the axis is
        self._open: Logged | None = None  # a call that may not be whole yet
        self._told: str | None = None

    def take_new(self, path: Path, *, is_over: bool = False) -> Iterator[Logged]:
        """Yield what has become whole; `path` is where the file lies now. `is_over`: nothing more will come."""
        self._reader.path = path
        points = self._reader.read_new()
        while points:
            for point in points:
                yield from self._take(point)
            points = self._reader.read_new() if is_over else []
        if is_over:
            yield from self._close()

    def new_damage(self) -> str | None:
        """Return what is damaged in the file, once; None: nothing, or it was told."""
        told, self._told = self._told, self._reader.damage
        return None if told else self._told

    def _take(self, point: Point) -> Iterator[Logged]:
        if point.wall_time < self._since or point.tag not in _KNOWN:
            return
        if self._open is not None and self._open.x != point.step:
            yield from self._close()
        if self._open is None:
            self._open = Logged(point.step, point.wall_time)
        if point.tag == _END:
            yield from self._close()
        else:
            _add(self._open, point.tag, point.value)

    def _close(self) -> Iterator[Logged]:
        call, self._open = self._open, None
        if call is None or not call.values:
            return
        if call.measured:
            lag = call.x + 1 - call.measured
            # NxDT's values, of the first step of an interval, are every - 1 steps old wherever the axis is. Of new
            # ones, whatever lag there is comes from the axis.
            self._ahead = lag if lag < self._every - 1 or self._every == 1 else 0
        call.completed = call.x + 1 - self._ahead
        call.measured = call.measured or call.completed
        yield call


class BarLog:
    """The lines of Lightning's progress bar in a log, where the framework writes no events. Its numbers are rounded."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._offset = 0

    def take_new(self) -> Iterator[Logged]:
        """Yield what whole lines of the bar tell of steps that ended."""
        try:
            status = os.stat(self._log)
        except FileNotFoundError:
            return
        if status.st_size == self._offset:
            return
        if status.st_size < self._offset:
            self._offset = 0  # started anew
        with open(self._log, "rb") as file:
            file.seek(self._offset)
            while True:
                chunk = file.read(_CHUNK_BYTES)
                whole = max(chunk.rfind(b"\r"), chunk.rfind(b"\n")) + 1
                if not whole:
                    return
                for line in re.split("[\r\n]", chunk[:whole].decode("utf-8", errors="replace")):
                    yield from _from_bar(line, status.st_mtime)
                self._offset = file.seek(self._offset + whole)


def _from_bar(line: str, time: float) -> Iterator[Logged]:
    bar = _BAR.search(line)
    if bar is None or bar.group(2) == "0":
        return
    epoch, batch, batches = (int(number) for number in bar.groups()[:3])
    completed = epoch * batches + batch
    call = Logged(completed - 1, time, completed)
    for entry in bar.group(4).split(", "):
        tag, _, number = entry.partition("=")
        try:
            value = float(number)
        except ValueError:
            continue
        if tag in _TAGS or (tag == _GLOBAL_STEP and value < _EXACT_BELOW):
            _add(call, tag, value)
    call.measured = call.measured or completed
    if call.values and call.measured <= completed:
        yield call


def _add(call: Logged, tag: str, value: float) -> None:
    if tag != _GLOBAL_STEP:
        call.values[_TAGS[tag]] = value
    elif math.isfinite(value):  # it counts the steps before
        call.measured = int(value) + 1
