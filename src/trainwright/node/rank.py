"""One rank: a thin wrapper that runs the user's command, passes signals on and records how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Mapping, Sequence

from . import processes
from .events import timestamp
from .run_paths import RunPaths
from .signals import STOP_SIGNALS, SignalQueue, signal_name

ATTEMPT_WORD = "{attempt}"  # stands for the attempt's number wherever it is in a command
PREEMPTED_CODE = 75  # a rank says: stopped on request, state saved, start me again


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended."""

    rank: int
    exit_code: int  # as a shell shows it: 128 + n for the signal n
    signal: int | None  # None: it ended by itself
    ended: str  # UTC, ISO 8601
    error: str | None = None  # why it could not start; None: it did
    reason: str | None = None  # its own word on why it ended so; None: it left none

    def __str__(self) -> str:
        if self.error is not None:
            return f"rank {self.rank} could not start: {self.error}"
        how = f"was killed by {signal_name(self.signal)}" if self.signal else f"ended with exit code {self.exit_code}"
        return f"rank {self.rank} {how}" + (f": {self.reason}" if self.reason else "")


def run(paths: RunPaths, job: Mapping[str, Any], stage: str, attempt: int, rank: int) -> int:
    """Run the command of one rank to its end and return its exit code."""
    signals = SignalQueue((*STOP_SIGNALS, signal.SIGCHLD))
    processes.die_with_parent(os.getppid())
    record = paths.rank_record(stage, attempt, rank)
    write_record(record, os.getpid())
    reason = paths.rank_reason(stage, attempt, rank)
    reason.unlink(missing_ok=True)  # of a start of this attempt that was cut short
    end = _run_command(_command(job, attempt), paths.rank_log(stage, attempt, rank), rank, signals)
    end = replace(end, reason=read_if_there(reason))
    write_record(record, os.getpid(), end)
    if job["launch"] == "torchrun" and end.exit_code == PREEMPTED_CODE:
        return 0  # to torchrun any other code is a failure, and it would kill the ranks that are still saving
    return end.exit_code


def write_record(path: Path, pid: int, end: RankEnd | None = None) -> None:
    """Write the record of a rank, whole at first sight; without `end` it runs."""
    record: dict[str, Any] = {"pid": pid}
    if end is not None:
        record.update(exit_code=end.exit_code, signal=end.signal, ended=end.ended, error=end.error, reason=end.reason)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(record) + "\n", encoding="utf-8")
    os.replace(draft, path)


def read_record(path: Path, rank: int) -> tuple[int, RankEnd | None] | None:
    """Return the process id of a rank and how it ended (None: it has not); None when it has not started."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    pid = record.pop("pid")
    return pid, RankEnd(rank, **record) if record else None


def numbered(command: Sequence[str], attempt: int) -> list[str]:
    """Return a command of a job with the attempt's number, which is known on the node only: a restart is the next."""
    return [word.replace(ATTEMPT_WORD, str(attempt)) for word in command]


def _command(job: Mapping[str, Any], attempt: int) -> list[str]:
    command = numbered(job["command"], attempt)
    return [job["python"], *command] if job["launch"] == "torchrun" else command


def _run_command(command: Sequence[str], log: Path, rank: int, signals: SignalQueue) -> RankEnd:
    parent = os.getpid()
    try:
        # The log is the child's own descriptor: whatever it writes, nobody has to read for it to go on.
        with open(log, "ab", buffering=0) as file:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={"PYTHONUNBUFFERED": "1", **os.environ},  # lines reach the log when they are printed
                start_new_session=True,  # torchrun signals our group; what the rank gets, it gets from us
                preexec_fn=lambda: processes.die_with_parent(parent),
            )
    except OSError as error:
        return RankEnd(rank, 1, None, timestamp(), str(error))
    code = _wait(child, signals)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)  # what the rank forked and left behind
    return RankEnd(rank, code if code >= 0 else 128 - code, -code if code < 0 else None, timestamp())


def read_if_there(path: Path) -> str | None:
    """Return the text of a file that says why something ended; None: it says nothing."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip() or None
    except FileNotFoundError:
        return None


def _wait(child: subprocess.Popen[bytes], signals: SignalQueue) -> int:
    """Wait for the child and pass each kind of signal on once: the worker's may be repeated by torchrun."""
    passed = {int(signal.SIGCHLD)}
    while child.poll() is None:
        for number in signals.wait(timeout_s=60):
            if number not in passed:
                passed.add(number)
                child.send_signal(number)
    return child.returncode
