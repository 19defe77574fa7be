"""Why a foreign framework stopped: it ends with exit code 0 whether all steps are taken or not."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping

REASONS = ("max_steps", "early_stopping", "preempted", "max_time_per_run", "max_time", "diverged", "failed")
TIME_OF_ATTEMPT = "max_time_per_run"
# Lightning's Timer and EarlyStopping, callbacks/{timer,early_stopping}.py, and NeMo's, which are made of these.
_SIGNAL = re.compile(rb"([^\r\n]*) Signaling Trainer to stop\.")
_TIME_IS_OVER = "Time limit reached."
_LOOK_BYTES = 1 << 18  # of the end of a log: what follows is the last validation and save


@dataclass(frozen=True)
class End:
    """How a stage ended, as results.json tells it."""

    reason: str | None  # of REASONS; None: nothing tells
    message: str | None  # None: the reason says it all


def told_in(log: Path) -> str | None:
    """Return what Lightning said when it was to end a training early; None: nothing."""
    try:
        with open(log, "rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _LOOK_BYTES, 0))
            found = _SIGNAL.findall(file.read())
    except FileNotFoundError:
        return None
    return found[-1].decode("utf-8", errors="replace").strip() if found else None


def of(
    reason: str | None,
    told: str | None,
    steps: int,
    max_steps: int,
    *,
    early_ends: Mapping[str, float | None],
    elapsed_s: float,
) -> End:
    """Return how a stage ended that has taken `steps` in `elapsed_s`.

    `reason` is one of REASONS, or words that say why it failed; None: it ended by itself. Then `told` is what Lightning
    said (`told_in`), and `early_ends` are those of REASONS for which its config makes it end before `max_steps`, of
    limits of time with their seconds.
    """
    if reason is not None:
        return End(reason, None) if reason in REASONS else End("failed", reason)
    if steps >= max_steps:
        return End("max_steps", None)
    message = f"it ended by itself after step {steps} of {max_steps}"
    if told is not None:
        is_time = _TIME_IS_OVER in told
        possible = [early for early, limit_s in early_ends.items() if (limit_s is not None) == is_time]
        return End(possible[0] if possible else None, f"{message}: {told}")
    # Nobody said so, but time was over. A script that logs no steps may have taken all of them.
    over = [early for early, limit_s in early_ends.items() if limit_s is not None and elapsed_s >= limit_s]
    return End(over[0] if over and steps else None, message)
