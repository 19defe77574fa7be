"""How a run stands, read from its own files: state, progress, last metrics. Light: 2,000 of them make a list."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright import storage
from trainwright.node import events, growing
from trainwright.node.events import Event, History
from trainwright.node.run_paths import RunPaths
from trainwright.node.run_state import RunState, fold

_TAIL_BYTES = 1 << 14  # of the metrics: enough for some dozen steps


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The newest values that the trainer wrote. Losses are nats a token; None: it wrote none."""

    step: int | None = None
    max_steps: int | None = None
    train_loss: float | None = None
    val_loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class Overview:
    """One run as lists and `status` show it."""

    run_dir: Path
    state: RunState
    metrics: Metrics
    launcher: str | None  # None: recorded by an earlier version
    overrides: tuple[str, ...]  # of the newest attempt
    created: str | None  # of the first attempt, UTC
    job_ids: Mapping[str, str]  # stage -> the scheduler's newest id
    unreadable: tuple[str, ...]  # files among the events that hold none

    @property
    def run_id(self) -> str:
        return self.run_dir.name

    @property
    def is_over(self) -> bool:
        return self.state.state in events.ENDED

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` prints of a run; keys are only ever added."""
        stages = [
            {
                "stage": stage.stage,
                "state": stage.state,
                "attempt": stage.attempt,
                "exit_code": stage.exit_code,
                "reason": stage.reason,
                "nodes": {str(node): state for node, state in stage.nodes.items()},
                "job_id": self.job_ids.get(str(stage.stage)),
                "submitted": stage.submitted,
                "started": stage.started,
                "ended": stage.ended,
            }
            for stage in self.state.stages
        ]
        return {
            "run_id": self.run_id,
            "run_dir": str(self.run_dir),
            "state": self.state.state,
            "reason": self.state.reason,
            "exit_code": self.state.exit_code,
            "first_failing_rank": self.state.first_failing_rank,
            "last_lines": list(self.state.last_lines),
            "attempt": self.state.attempt,
            "launcher": self.launcher,
            "overrides": list(self.overrides),
            "step": self.metrics.step,
            "max_steps": self.metrics.max_steps,
            "train_loss": self.metrics.train_loss,
            "val_loss": self.metrics.val_loss,
            "created": self.created,
            "started": self.state.started,
            "ended": self.state.ended,
            "stages": stages,
        }


def look(run_dir: Path, seen: Sequence[Event] = ()) -> Overview:
    """Return how a run stands; `seen` are events that nobody wrote down: what a scheduler says at this moment."""
    with storage.reached(run_dir, run_dir.name):
        paths = RunPaths(run_dir)
        return stand(paths, events.read_events(paths), _results(paths), seen)


def stand(paths: RunPaths, history: History, results: Mapping[str, Any], seen: Sequence[Event] = ()) -> Overview:
    """Return how a run stands whose events and results.json have been read."""
    state = fold((*history.events, *seen))
    planned = [event for event in history.events if event.state == events.PLANNED]
    newest: Mapping[str, Any] = planned[-1].extra if planned else {}
    submitted = [event for event in history.events if event.state == events.SUBMITTED and "job_id" in event.extra]
    return Overview(
        run_dir=paths.run_dir,
        state=state,
        metrics=_metrics(paths, state, newest.get("max_steps"), results),
        launcher=newest.get("launcher"),
        overrides=tuple(newest.get("overrides", ())),
        created=planned[0].time if planned else None,
        job_ids={str(event.stage): str(event.extra["job_id"]) for event in submitted},
        unreadable=history.unreadable,
    )


def _metrics(paths: RunPaths, state: RunState, max_steps: int | None, results: Mapping[str, Any]) -> Metrics:
    """Return the metrics of the newest attempt that wrote any."""
    for attempt in range(state.attempt, 0, -1):
        if results.get("attempt") == attempt:
            return Metrics(
                step=results.get("steps"),
                max_steps=results.get("max_steps", max_steps),
                train_loss=_number(results.get("train_loss")),
                val_loss=_number(results.get("val_loss")),
            )
        points = _last_points(paths.metrics(attempt))
        if points:
            newest: dict[str, Any] = {}
            for point in points:
                newest.update({key: value for key, value in point.items() if value is not None})
            return Metrics(
                step=newest.get("step"),
                max_steps=max_steps,
                train_loss=_number(newest.get("train_loss")),
                val_loss=_number(newest.get("val_loss")),
            )
    return Metrics(max_steps=max_steps)


def _results(paths: RunPaths) -> Mapping[str, Any]:
    try:
        results: dict[str, Any] = json.loads(b"".join(storage.read_from(paths.results, 0)))
    except FileNotFoundError:
        return {}
    return results


def _last_points(path: Path) -> list[dict[str, Any]]:
    """Return the last whole lines of a metrics file; none where there is no file."""
    tail, is_whole = b"", True
    for piece in reversed(growing.parts(path)):
        left = piece.stat().st_size - (_TAIL_BYTES - len(tail))
        tail = b"".join(storage.read_from(piece, max(0, left))) + tail
        if left > 0:
            is_whole = False
            break
    lines = tail.split(b"\n")
    return [json.loads(line) for line in (lines[:-1] if is_whole else lines[1:-1])]  # the ends may be cut


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
