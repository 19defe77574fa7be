"""Turns what a framework logs for TensorBoard into metrics and results, while the worker watches its ranks."""

from __future__ import annotations

import json
import sys
import time
import traceback
from dataclasses import replace
from typing import Callable

from . import events
from .foreign_end import TIME_OF_ATTEMPT, End
from .foreign_metrics import ForeignMetrics
from .rank import PREEMPTED_CODE
from .run_paths import RunPaths
from .verdict import Verdict

EVERY_S = 5.0


class Collector:
    """Collects for one stage, on node 0. A mistake in there must not end a training of hours: it is printed, once."""

    def __init__(self, paths: RunPaths, settings: str, attempt: int, stage: str) -> None:
        """`settings`: path below run/ of what was rendered for the framework. Raises OSError and ValueError."""
        told = json.loads((paths.own / settings).read_text(encoding="utf-8"))
        self._metrics = ForeignMetrics(paths, attempt, told, stage)
        self._end: End | None = None  # None: it has not, or its end could not be looked at
        self._next = 0.0
        self._has_failed = False

    def beat(self) -> None:
        """Collect if it is time to. To be called often."""
        if time.monotonic() >= self._next and not self._has_failed:
            self._guarded(self._metrics.collect)
            self._next = time.monotonic() + EVERY_S

    def finish(self, verdict: Verdict) -> Verdict:
        """Collect the rest, write the results of a stage that has ended so, and return the last word on it.

        A framework that ends since an attempt's time is over ends with 0: it wants to go on, as our backend's 75 says.
        """
        self._guarded(lambda: self._finish(verdict))
        end = self._end
        if verdict.state != events.SUCCEEDED or end is None or end.message is None:
            return verdict
        if end.reason == TIME_OF_ATTEMPT:
            return Verdict(events.PREEMPTED, PREEMPTED_CODE, f"exp_manager.{end.reason} is over: {end.message}", None)
        return replace(verdict, reason=verdict.reason or end.message)

    def _finish(self, verdict: Verdict) -> None:
        self._end = self._metrics.finish(_reason(verdict))

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            self._has_failed = True
            print(f"worker: metrics are not collected any more:\n{traceback.format_exc()}", file=sys.stderr, flush=True)


def _reason(verdict: Verdict) -> str | None:
    """Return the end of a stage as results.json tells it; a run that was cancelled was told to stop, as others are."""
    if verdict.state == events.SUCCEEDED:
        return None
    if verdict.state == events.FAILED:
        own_word = verdict.first.reason if verdict.first is not None else None
        return own_word or verdict.reason or "failed"
    return "preempted"
