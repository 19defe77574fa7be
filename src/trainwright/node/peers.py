"""Notice that another node of the job has ended badly, whose ranks ours would wait for without end."""

from __future__ import annotations

import time

from . import events
from .events import Event
from .run_paths import RunPaths

LOOK_EVERY_S = 2.0  # one listing of a directory on a shared file system
_ENDED_BADLY = frozenset({events.FAILED, events.TIMEOUT, events.CANCELLED, events.PREEMPTED})


class Peers:
    """The other nodes of a stage, as their events tell. Works wherever the run directory is shared."""

    def __init__(self, paths: RunPaths, stage: str, attempt: int, node: int, num_nodes: int) -> None:
        self._paths, self._stage, self._attempt = paths, stage, attempt
        self._others = {events.node_who(attempt, other) for other in range(num_nodes) if other != node}
        self._next_look = 0.0

    def first_bad_end(self) -> Event | None:
        """Return the first event of a peer that will not go on; None as long as there is none. Cheap to ask often."""
        if not self._others or time.monotonic() < self._next_look:
            return None
        self._next_look = time.monotonic() + LOOK_EVERY_S
        told = events.find(self._paths, self._others, _ENDED_BADLY)
        return next((event for event in told if event.stage == self._stage), None)
