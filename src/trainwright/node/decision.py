"""One node decides what all nodes of a stage do, since only one may put their shared directory in order.

It decides by what was rendered for a framework, by the record of the attempt and by what was decided before.
"""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping

from . import events
from .drive import FAILED, DriverError
from .peers import Peers
from .run_paths import RunPaths
from .signals import STOP_SIGNALS, SignalQueue

SKIP, FRESH, RESUME = "skip", "fresh", "resume"
_IGNORE_DAMAGED = re.compile(r"(?m)^ +resume_ignore_damaged: true$")
WAIT_S = 1800.0  # node 0 may have to remove a checkpoint of 100 GB first


@dataclass(frozen=True)
class Decision:
    """What all nodes of a stage do."""

    what: str  # skip, fresh or resume
    reason: str


def read_settings(
    folder_of: Callable[[int], Path], attempt: int, schema_version: int
) -> tuple[Path, Mapping[str, Any]]:
    """Return the folder of a framework's files and the settings in it: of the submitted attempt that this one repeats.

    Raises DriverError when there are none.
    """
    for submitted in range(attempt, 0, -1):  # a job that its scheduler starts again has no files of its own
        file = folder_of(submitted) / "settings.json"
        if not file.exists():
            continue
        settings: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if settings["schema_version"] != schema_version:
            raise DriverError(f"{file} is of another version of trainwright than this worker")
        return file.parent, settings
    raise DriverError(f"{folder_of(attempt)}/settings.json is not there")


def may_ignore_damaged(paths: RunPaths, attempt: int) -> bool:
    """Return what the attempt's record says; it is YAML as PyYAML writes it, and here is no parser for that."""
    record = paths.record(attempt)
    return record.exists() and _IGNORE_DAMAGED.search(record.read_text(encoding="utf-8")) is not None


def has_resumed(earlier: Iterable[Path]) -> bool:
    """Return whether an earlier attempt, by its decision, has found a whole checkpoint."""
    return any(path.exists() and read(path).what == RESUME for path in earlier)


def publish(file: Path, decision: Decision, num_nodes: int, *, has_links: bool = True) -> None:
    """Write what all nodes do, once for an attempt. `has_links` as in `events.publish`.

    A start of this attempt that was cut short may have left one. A single node replaces it. Several must not: some may
    have read it. Raises DriverError then, unless it says the same.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    if num_nodes == 1:
        file.unlink(missing_ok=True)
    content = json.dumps({"schema_version": 1, "what": decision.what, "reason": decision.reason}, indent=1) + "\n"
    try:
        events.publish(file, content, has_links=has_links)
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
    # A listing: a mounted bucket remembers that a file which was asked for is not there.
    while not (file.parent.is_dir() and file.name in os.listdir(file.parent)):
        ended = peers.first_bad_end()
        if ended is not None:
            code = int(ended.extra.get("exit_code") or FAILED)  # as a worker follows another
            raise DriverError(f"node {ended.node} was {ended.state}: {ended.extra.get('reason')}", code)
        if time.monotonic() > deadline:
            raise DriverError(
                f"node 0 has not decided within {limit_s:.0f} s; see its log, and that {file.parent} is shared", FAILED
            )
        if any(number in STOP_SIGNALS for number in signals.wait(0.5)):
            return None
    return read(file)
