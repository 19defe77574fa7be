"""The stages that one job runs one after the other in the same place, and how its nodes wait for each other between."""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Callable, Iterable, Iterator, Mapping

from . import events
from .events import Event
from .peers import LOOK_EVERY_S
from .rank import PREEMPTED_CODE
from .run_paths import RunPaths
from .signals import STOP_SIGNALS, SignalQueue, signal_name

JOB_SCHEMA_VERSION = 1


def read_jobs(paths: RunPaths, attempt: int, first: str, *, only_first: bool = False) -> dict[str, dict[str, Any]]:
    """Return, by stage and in order, the JobSpecs of what a job runs that was submitted with stage `first`.

    Raises OSError, or ValueError for one of another version.
    """
    jobs: dict[str, dict[str, Any]] = {}
    stage: str | None = first
    while stage is not None:
        jobs[stage] = json.loads(paths.job(attempt, stage).read_text(encoding="utf-8"))
        if jobs[stage]["schema_version"] != JOB_SCHEMA_VERSION:
            raise ValueError(f"schema_version={jobs[stage]['schema_version']}, this worker reads {JOB_SCHEMA_VERSION}")
        stage = None if only_first else jobs[stage].get("next_stage")
    return jobs


class Chain:
    """One job's stages as the node `node` of it sees them, by the events of all."""

    def __init__(self, paths: RunPaths, jobs: Mapping[str, Mapping[str, Any]], submitted: int, node: int) -> None:
        self._paths, self._jobs, self._node = paths, jobs, node
        self._submitted = self._attempt = submitted

    def begin(self, attempt: int) -> Iterator[str]:
        """Yield the stages that this node has to look at, one by one: all that are not done, up to its last part."""
        self._attempt = attempt
        for number, stage in enumerate(self._jobs):
            if not any(self.takes_part(later) for later in list(self._jobs)[number:]):
                return
            if not self._is_skipped(stage) and self._missing(stage):
                yield stage

    def takes_part(self, stage: str) -> bool:
        """Return whether this node runs the stage; one that uses fewer nodes than the job takes the first ones."""
        return self._node < int(self._jobs[stage]["num_nodes"])

    def is_last(self, stage: str) -> bool:
        return stage == list(self._jobs)[-1]

    def wait_for(self, stage: str, signals: SignalQueue, beat: Callable[[], None], limit_s: float | None) -> int:
        """Wait until the other nodes have succeeded at a stage; return 0, or the exit code to end with.

        `limit_s` is for how long they are waited for, None without end.
        """
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while True:
            missing = [node for node in self._missing(stage) if node != self._node]
            if not missing:
                return 0
            bad = self._bad_end(stage, missing)
            if bad is not None:
                reason = bad.extra.get("reason")
                return _end(
                    int(bad.extra.get("exit_code") or 1), f"node {bad.node} was {bad.state} at {stage}: {reason}"
                )
            if self._find(missing, [events.RUNNING], [self._attempt + 1]):
                return _end(PREEMPTED_CODE, f"a node was started again; all begin anew at {stage}")
            if deadline is not None and time.monotonic() > deadline:
                return _end(0, f"nodes {missing} have not told how {stage} ended; not waiting any longer")
            beat()
            stops = [number for number in signals.wait(LOOK_EVERY_S) if number in STOP_SIGNALS]
            if stops:
                return _end(128 + stops[0], f"stopped by {signal_name(stops[0])} while waiting for {stage}")

    def _is_skipped(self, stage: str) -> bool:
        """Return whether the submitting side has found that the stage is done."""
        words = events.find(self._paths, [events.SUBMIT], [events.SUCCEEDED])
        return any(word.stage == stage and word.attempt == self._submitted for word in words)

    def _missing(self, stage: str) -> list[int]:
        """Return the nodes of a stage that have not succeeded at it, in this attempt or an earlier start of the job."""
        nodes = range(int(self._jobs[stage]["num_nodes"]))
        told = self._find(nodes, [events.SUCCEEDED], range(self._submitted, self._attempt + 1))
        succeeded = {event.node for event in told if event.stage == stage}
        return [node for node in nodes if node not in succeeded]

    def _bad_end(self, stage: str, nodes: Iterable[int]) -> Event | None:
        told = self._find(nodes, events.ENDED - {events.SUCCEEDED}, [self._attempt])
        return next((event for event in told if event.stage == stage), None)

    def _find(self, nodes: Iterable[int], states: Iterable[str], attempts: Iterable[int]) -> list[Event]:
        pairs = [(attempt, node) for attempt in attempts for node in nodes]
        return events.find(self._paths, [events.node_who(attempt, node) for attempt, node in pairs], list(states))


def _end(code: int, message: str) -> int:
    print(f"worker: {message}", file=sys.stderr, flush=True)
    return code
