"""Processes that a test starts: which of them live, what they are waited for, and their end whatever the test does."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol


class Started(Protocol):
    """A run whose workers a test started."""

    workers: list[subprocess.Popen[bytes]]

    def processes(self) -> list[int]: ...


def marked(mark: str) -> list[int]:
    """Return all living processes that carry a mark, NAME=VALUE, in their environment."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _has_mark(pid, mark.encode())]


def wait_for(condition: Callable[[], object], deadline_s: float) -> None:
    """Return once `condition` holds; fails when it does not in time."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.02)


def end(runs: Iterable[Started]) -> None:
    """Kill what is left of runs."""
    for run in runs:
        for worker in run.workers:
            worker.kill()
            worker.wait()
        for pid in run.processes():
            os.kill(pid, signal.SIGKILL)


def _has_mark(pid: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
