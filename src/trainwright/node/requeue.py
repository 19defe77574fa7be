"""A job that is started again is the next attempt at its run: its number, what its ranks read, when it is enough.

Slurm says how often it did so. Vertex AI starts a container anew where it was, or on another machine, and says nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
from pathlib import Path
from typing import Collection, Iterable, Mapping

from . import events
from .rank import PREEMPTED_CODE
from .run_paths import RunPaths
from .verdict import Verdict


def num_restarts(environ: Mapping[str, str]) -> int:
    """Return how often the scheduler has started this job again."""
    return int(environ.get("SLURM_RESTART_COUNT") or 0)


def restarts_in_place(paths: RunPaths, stages: Collection[str], submitted: int, node: int, num_nodes: int) -> int:
    """Return how often this node, or another that it is to meet, has been started again, as their events tell.

    A node that has begun an attempt before is a restarted one, and takes the next. One that was left behind by another
    joins that one's newest attempt, so that all of them meet again however often each of them was started.
    """
    attempt = submitted
    while _has_begun(paths, stages, attempt, [node]) or _has_begun(paths, stages, attempt + 1, range(num_nodes)):
        attempt += 1
    return attempt - submitted


def _has_begun(paths: RunPaths, stages: Collection[str], attempt: int, nodes: Iterable[int]) -> bool:
    begun = events.find(paths, [events.node_who(attempt, node) for node in nodes], [events.RUNNING])
    return any(event.stage in stages for event in begun)


def adopt(paths: RunPaths, stage: str, submitted: int, restarts: int) -> int:
    """Return the number of this attempt, with its record and job in place: those of the submitted one, renumbered.

    All nodes do this, since none may wait for another: each writes the same bytes. Attempts that ended before their
    worker began are numbered too, so that the next resume finds a number that is free.
    """
    for attempt in range(submitted + 1, submitted + restarts + 1):
        record = paths.record(submitted).read_text(encoding="utf-8")
        _write_once(paths, paths.record(attempt), re.sub(r"(?m)^attempt: \d+$", f"attempt: {attempt}", record, count=1))
        job = json.loads(paths.job(submitted, stage).read_text(encoding="utf-8"))
        renumbered = json.dumps({**job, "attempt": attempt}, indent=1, ensure_ascii=False)
        _write_once(paths, paths.job(attempt, stage), renumbered)
    return submitted + restarts


def announce(paths: RunPaths, stage: str, attempt: int) -> None:
    """Tell, before a job is given back to the scheduler, that it will run again."""
    events.append(paths, events.REQUEUED, who=events.node_who(attempt, 0), stage=stage, attempt=attempt + 1)


def refuse(restarts: int, max_requeues: int | None) -> Verdict | None:
    """Return the last word on a job that a failing node has brought back too often; None for any other."""
    if max_requeues is None or restarts <= max_requeues:
        return None
    reason = f"it was started again {restarts} times, launcher.max_requeues={max_requeues} are allowed"
    return Verdict(events.TIMEOUT, 1, reason, None)


def final(verdict: Verdict, stopped_by: int | None, restarts: int, max_requeues: int | None) -> Verdict:
    """Return `verdict`, or TIMEOUT where a run that would go on has been started again as often as it may.

    A run that was told to end (SIGTERM: cancelled, or preempted by others) keeps its word: the scheduler knows why.
    """
    if max_requeues is None or verdict.state != events.PREEMPTED or stopped_by in (signal.SIGTERM, signal.SIGINT):
        return verdict
    if restarts < max_requeues:
        return Verdict(verdict.state, verdict.exit_code, f"{verdict.reason}; Slurm starts it again", verdict.first)
    reason = f"{verdict.reason} after {restarts} of launcher.max_requeues={max_requeues} restarts; its state is saved"
    return Verdict(events.TIMEOUT, PREEMPTED_CODE, reason, None)


def _write_once(paths: RunPaths, path: Path, text: str) -> None:
    if path.exists():
        return
    if paths.scratch is not None:
        with contextlib.suppress(FileExistsError):  # another node's, of the same bytes, was there first
            events.publish(path, text, has_links=False)
        return
    draft = path.with_name(f".{path.name}-{secrets.token_hex(8)}.tmp")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)
