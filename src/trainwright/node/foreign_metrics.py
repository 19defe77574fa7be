"""Metrics and results of a backend that logs for TensorBoard only, in the form in which our own backend writes them."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import Any, Iterator, Mapping

from . import events, foreign_end, growing, results
from .foreign_checkpoints import saved_checkpoints
from .foreign_end import End
from .foreign_log import TRAINING, BarLog, EventLog, Logged
from .foreign_versions import installed_versions
from .run_paths import RunPaths

# A line has all the keys of backends/native/step_report.py. What a framework does not tell is null.
_KEYS = (
    "train_loss", "val_loss", "lr", "grad_norm", "param_norm", "step_time_s", "delta_time_s", "tokens_per_s",
    "samples_per_s", "tflops_per_s", "mfu",
)  # fmt: skip
_GIT = re.compile(r"^git:\n  commit: (\S+)\n  is_dirty: (true|false)$", re.MULTILINE)
_EVENT_FILE = "events.out.tfevents."
_MOVED = re.compile(r"^run_\d+$")  # where NxDT and NeMo put the files of the process before
_WINDOW = 10  # steps over which NxDT averages its throughput: lightning_modules/model/base.py, Throughput(10)


@dataclass
class _Newest:
    """The last value of its kind, by the time at which it was logged."""

    value: Any = None
    time: float = 0.0

    def take(self, value: Any, time: float) -> None:
        if time >= self.time:
            self.value, self.time = value, time


@dataclass
class _Speed:
    """Which measurements of one process are of steady steps: the first ones pay for its start and for compiling.

    An average counts once its window has left the first step that was measured; a single step's time, from the second.
    """

    first_measured: int | None = None
    is_first_time_known: bool = False

    def steady(self, call: Logged, batch: int) -> float | None:
        """Return samples per second; None: of the start, or not measured."""
        if "samples_per_s" in call.values:
            self.first_measured = call.measured if self.first_measured is None else self.first_measured
            return call.values["samples_per_s"] if call.measured >= self.first_measured + _WINDOW else None
        step_time_s = call.values.get("step_time_s", 0.0)
        if step_time_s <= 0:
            return None
        was_known, self.is_first_time_known = self.is_first_time_known, True
        return batch / step_time_s if was_known else None


@dataclass
class _Process:
    log: EventLog
    path: Path
    speed: _Speed = field(default_factory=_Speed)


class ForeignMetrics:
    """Follows one attempt: `collect` while it runs, `finish` when it has ended. On node 0 only.

    `settings` holds `results` (backends.foreign.results_constants), and `python`, the framework's interpreter, or
    `versions`; `early_ends`, see `foreign_end.of`. A step is an optimizer step, its samples are
    step * global_batch_size, whatever the framework counts. What was logged before the attempt's stage ran is not its
    own: earlier attempts, a trial run of a compiler.
    """

    def __init__(self, paths: RunPaths, attempt: int, settings: Mapping[str, Any], stage: str = "train") -> None:
        self._paths, self._attempt, self._settings = paths, attempt, settings
        self._constants: Mapping[str, Any] = settings["results"]
        self._batch: int = self._constants["batch"]["global_batch_size"]
        self._every: int = self._constants["log_every_n_steps"]
        self._max_steps: int = self._constants["max_steps"]
        self._started = datetime.now(timezone.utc)
        self._since = _first_running(paths, attempt, stage)
        self._processes: dict[str, _Process] = {}  # by the name of the event file, which stays when it is moved
        self._rank_log = paths.rank_log(stage, attempt, 0)
        self._bar = BarLog(self._rank_log)
        self._bar_speed = _Speed()
        self._written, self._validated = _what_is_written(paths.metrics(attempt))
        self._steps, self._train_loss, self._validation = _Newest(0), _Newest(), _Newest()
        self._best: tuple[int, float] | None = None
        self._steady: deque[float] = deque(maxlen=1000)  # samples per second

    def collect(self) -> None:
        """Append what is new to the attempt's metrics; where nothing is, files are looked up and not opened."""
        self._append(self._take_new(is_over=False))

    def finish(self, reason: str | None) -> End:
        """Collect the rest, write results.json and return how the stage ended.

        `reason` is one of the native backend's stop reasons, or words that say why the run failed; None: it ended by
        itself. Then, if no log was due any more, it has taken all its steps.
        """
        self._append(self._take_new(is_over=True))
        checkpoints = saved_checkpoints(self._paths.run_dir, self._paths.checkpoints)
        steps = max([self._steps.value, *(saved["step"] for saved in checkpoints)])
        told = foreign_end.told_in(self._rank_log)
        if reason is None and told is None and steps and steps + self._every > self._max_steps:
            steps = max(steps, self._max_steps)
        end = foreign_end.of(
            reason,
            told,
            steps,
            self._max_steps,
            early_ends=self._settings.get("early_ends", {}),
            elapsed_s=time.time() - self._since if self._since else 0.0,
        )
        samples_per_s = median(self._steady) if self._steady else None
        measured = results.Measured(
            steps=steps,
            tokens_per_s=None if samples_per_s is None else samples_per_s * self._constants["seq_length"],
            train_loss=self._train_loss.value,
            val_loss=self._validation.value and self._validation.value[1],
            best_validation=self._best_of_all_attempts(),
        )
        content = results.content(
            self._constants,
            measured,
            run_id=self._paths.run_dir.name,
            attempt=self._attempt,
            started=self._started,
            ended=datetime.now(timezone.utc),
            stop_reason=end.reason,
            stop_message=end.message,
            versions=self._settings.get("versions") or installed_versions(self._settings.get("python", "python3")),
            git=_git(self._paths, self._attempt),
            checkpoints=checkpoints,
        )
        results.write(self._paths.results, content, by_rename=self._paths.scratch is None)
        return end

    def _take_new(self, *, is_over: bool) -> Iterator[tuple[Logged, _Speed]]:
        for path in _event_files(self._paths.run_dir):  # frameworks know nothing of scratch directories
            process = self._processes.get(path.name)
            if process is None:
                if path.stat().st_mtime < self._since:
                    continue
                process = self._processes[path.name] = _Process(EventLog(path, self._since, self._every), path)
            process.path = path
        for process in self._processes.values():
            for call in process.log.take_new(process.path, is_over=is_over):
                yield call, process.speed
            damage = process.log.new_damage()
            if damage is not None:
                print(f"warning: {damage}", file=sys.stderr, flush=True)
        if not any(_has_content(process.path) for process in self._processes.values()):
            for call in self._bar.take_new():
                yield call, self._bar_speed

    def _append(self, calls: Iterator[tuple[Logged, _Speed]]) -> None:
        """Write a line for each step that is new."""
        lines: dict[int, dict[str, Any]] = {}
        for call, speed in calls:
            self._take_over(call, speed)
            for step, values in self._by_step(call):
                if values or step not in self._written:
                    lines.setdefault(step, {}).update(values)
        text = "".join(self._line(step, values) for step, values in lines.items())
        if text:
            path = self._paths.metrics(self._attempt)
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a", encoding="utf-8") as file:
                file.write(text)

    def _take_over(self, call: Logged, speed: _Speed) -> None:
        """Remember what the results need of a call, written before or not."""
        call.completed = max(call.measured, min(call.completed, self._max_steps))
        steady = speed.steady(call, self._batch)
        if steady is not None:
            self._steady.append(steady)
        self._steps.take(call.completed, call.time)
        if "train_loss" in call.values:
            self._train_loss.take(call.values["train_loss"], call.time)
        loss = call.values.get("val_loss")
        if loss is not None and self._validation.value is not None and loss == self._validation.value[1]:
            del call.values["val_loss"]  # Lightning has logged the value before once more
        elif loss is not None:
            self._validation.take((call.completed, loss), call.time)
            if not math.isnan(loss) and (self._best is None or loss < self._best[1]):
                self._best = call.completed, loss

    def _by_step(self, call: Logged) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the values of a call with the step that each is of: one line where they agree, else two."""
        of_measured = {key: call.values[key] for key in TRAINING.values() if key in call.values}
        if of_measured:
            yield call.measured, of_measured
        rest = {key: value for key, value in call.values.items() if key not in of_measured}
        yield call.completed, rest

    def _line(self, step: int, values: dict[str, Any]) -> str:
        """Return the line of a step; of one that has a line, only a validation that came later, as our backend does."""
        if step in self._written:
            if "val_loss" not in values or step in self._validated:
                return ""
            values = {"step": step, "val_loss": values["val_loss"]}
        else:
            values = {"step": step, "consumed_samples": step * self._batch, **self._completed(values)}
        self._written.add(step)
        if "val_loss" in values and values["val_loss"] is not None:
            self._validated.add(step)
        return json.dumps(results.finite(values), allow_nan=False) + "\n"

    def _completed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        line = {**dict.fromkeys(_KEYS), **values}
        if line["samples_per_s"] is None and line["step_time_s"]:
            line["samples_per_s"] = self._batch / line["step_time_s"]
        if line["samples_per_s"] is not None:
            line["tokens_per_s"] = line["samples_per_s"] * self._constants["seq_length"]
            line["tflops_per_s"], line["mfu"] = results.speed(self._constants, line["tokens_per_s"])
        return line

    def _best_of_all_attempts(self) -> tuple[int, float] | None:
        """Return the least validation loss, of earlier attempts those steps that this one did not take again."""
        first = min(self._written, default=self._steps.value + 1)
        best = self._best
        for attempt in range(1, self._attempt):
            for line in _lines(RunPaths(self._paths.run_dir).metrics(attempt)):  # whatever node it ran on
                loss = line.get("val_loss")
                if loss is not None and line["step"] < first and (best is None or loss < best[1]):
                    best = line["step"], loss
        return best


def _event_files(log_dir: Path) -> Iterator[Path]:
    if not log_dir.is_dir():
        return
    folders = [log_dir, *sorted(log_dir / name for name in os.listdir(log_dir) if _MOVED.match(name))]
    for folder in folders:
        for name in sorted(os.listdir(folder)):
            if name.startswith(_EVENT_FILE):
                yield folder / name


def _has_content(path: Path) -> bool:
    """Return whether there is anything to be read; a bucket's mount shows a file as empty until it is closed."""
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:  # it is being moved
        return True


def _first_running(paths: RunPaths, attempt: int, stage: str) -> float:
    """Return when the attempt's stage first ran on node 0, in seconds since 1970; 0: nothing tells."""
    own = [
        event
        for event in events.find(paths, [events.node_who(attempt, 0)], [events.RUNNING])
        if event.stage == stage and event.attempt == attempt
    ]
    if not own:
        return 0.0
    return datetime.strptime(own[0].time, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=timezone.utc).timestamp()


def _what_is_written(path: Path) -> tuple[set[int], set[int]]:
    """Return the steps that have a line and those whose validation has one, and cut off a line that is not whole."""
    try:
        with open(path, "r+b") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)
    except FileNotFoundError:
        return set(), set()
    lines = _lines(path)
    return {line["step"] for line in lines}, {line["step"] for line in lines if line.get("val_loss") is not None}


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        content = growing.read_bytes(path)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in content.split(b"\n")[:-1]]


def _git(paths: RunPaths, attempt: int) -> dict[str, Any] | None:
    """Return commit and dirtiness at submit time, as the record of the attempt has them; None: of no repository.

    The record is YAML as PyYAML writes it, and a node has the standard library only.
    """
    try:
        record = paths.record(attempt).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    found = _GIT.search(record)
    if found is None:
        return None
    commit = found.group(1).strip("'")
    return {"commit": None if commit == "null" else commit, "is_dirty": found.group(2) == "true"}
