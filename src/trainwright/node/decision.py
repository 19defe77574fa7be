"""One node decides what all nodes of a stage do, since only one may put their shared directory in order."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

from . import events
from .drive import FAILED, DriverError
from .peers import Peers
from .signals import STOP_SIGNALS, SignalQueue

SKIP, FRESH, RESUME = "skip", "fresh", "resume"
WAIT_S = 1800.0  # node 0 may have to remove a checkpoint of 100 GB first


@dataclass(frozen=True)
class Decision:
    """What all nodes of a stage do."""

    what: str  # skip, fresh or resume
    reason: str


def publish(file: Path, decision: Decision, num_nodes: int) -> None:
    """Write what all nodes do, once for an attempt.

    A start of this attempt that was cut short may have left one. A single node replaces it. Several must not: some may
    have read it. Raises DriverError then, unless it says the same.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    if num_nodes == 1:
        file.unlink(missing_ok=True)
    content = json.dumps({"schema_version": 1, "what": decision.what, "reason": decision.reason}, indent=1) + "\n"
    try:
        events.publish(file, content)
    except FileExistsError:
        before = read(file)
        if before.what != decision.what:
            raise DriverError(
                f"{file} of an earlier start of this attempt says {before.what}, now it would be {decision.what}; "
                "`trainwright resume` begins a new attempt"
            ) from None


def read(file: Path) -> Decision:
    """Return what stands in a file that `publish` wrote."""
    told = json.loads(file.read_text(encoding="utf-8"))
    return Decision(told["what"], told["reason"])


def wait_for(file: Path, peers: Peers, signals: SignalQueue, *, limit_s: float = WAIT_S) -> Decision | None:
    """Return node 0's decision once it is there; None when we are told to stop.

    Raises DriverError when a node has ended badly, and after `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    while not file.exists():
        ended = peers.first_bad_end()
        if ended is not None:
            raise DriverError(f"node {ended.node} was {ended.state}: {ended.extra.get('reason')}", FAILED)
        if time.monotonic() > deadline:
            raise DriverError(
                f"node 0 has not decided within {limit_s:.0f} s; see its log, and that {file.parent} is shared", FAILED
            )
        if any(number in STOP_SIGNALS for number in signals.wait(0.5)):
            return None
    return read(file)
