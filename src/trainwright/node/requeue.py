"""A job that Slurm starts again is the next attempt at its run: its number, what its ranks read, when it is enough."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
from pathlib import Path
from typing import Mapping

from . import events
from .rank import PREEMPTED_CODE
from .run_paths import RunPaths
from .verdict import Verdict


def num_restarts(environ: Mapping[str, str]) -> int:
    """Return how often the scheduler has started this job again."""
    return int(environ.get("SLURM_RESTART_COUNT") or 0)


def adopt(paths: RunPaths, stage: str, submitted: int, restarts: int) -> int:
    """Return the number of this attempt, with its record and job in place: those of the submitted one, renumbered.

    All nodes do this, since none may wait for another: each writes the same bytes. Attempts that ended before their
    worker began are numbered too, so that the next resume finds a number that is free.
    """
    for attempt in range(submitted + 1, submitted + restarts + 1):
        record = paths.record(submitted).read_text(encoding="utf-8")
        _write_once(paths.record(attempt), re.sub(r"(?m)^attempt: \d+$", f"attempt: {attempt}", record, count=1))
        job = json.loads(paths.job(submitted, stage).read_text(encoding="utf-8"))
        _write_once(paths.job(attempt, stage), json.dumps({**job, "attempt": attempt}, indent=1, ensure_ascii=False))
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


def _write_once(path: Path, text: str) -> None:
    if path.exists():
        return
    draft = path.with_name(f".{path.name}-{secrets.token_hex(8)}.tmp")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)
