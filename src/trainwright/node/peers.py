"""Notice that another node of the job has ended badly, or begun anew, whose ranks ours would wait for without end.

Only a hint that comes early: bucket mounts show a new file up to a minute late, or never where metadata is cached
without end. The scheduler ends the nodes of a failed job in any case, and its word decides.
"""

from __future__ import annotations

import time
from dataclasses import replace

from . import events
from .events import Event
from .rank import PREEMPTED_CODE
from .run_paths import RunPaths

LOOK_EVERY_S = 2.0  # one listing of a directory on a shared file system
_ENDED_BADLY = frozenset({events.FAILED, events.TIMEOUT, events.CANCELLED, events.PREEMPTED})
_ANEW = {"reason": "it was started again", "exit_code": PREEMPTED_CODE}


class Peers:
    """The other nodes of a stage, as their events tell. Works wherever the run directory is shared."""

    def __init__(self, paths: RunPaths, stage: str, attempt: int, node: int, num_nodes: int) -> None:
        self._paths, self._stage, self._attempt = paths, stage, attempt
        others = [other for other in range(num_nodes) if other != node]
        self._others = {events.node_who(attempt, other) for other in others}
        self._others_anew = {events.node_who(attempt + 1, other) for other in others}
        self._next_look = 0.0

    def first_bad_end(self) -> Event | None:
        """Return the first event of a peer that will not go on; None as long as there is none. Cheap to ask often."""
        if not self._others or time.monotonic() < self._next_look:
            return None
        self._next_look = time.monotonic() + LOOK_EVERY_S
        told = events.find(self._paths, self._others, _ENDED_BADLY)
        anew = events.find(self._paths, self._others_anew, [events.RUNNING])
        told += [replace(event, state=events.PREEMPTED, extra=_ANEW) for event in anew]
        return next((event for event in told if event.stage == self._stage), None)
