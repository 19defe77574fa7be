"""Runs another system's launcher as a rank's only child: passes its output on, stops it on request, leaves nothing."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Mapping, Sequence

from . import processes
from .signals import STOP_SIGNALS, SignalQueue

USER_ERROR, FAILED = 2, 1
TICK_S = 5.0
_POLL_S = 1.0
_KILL_WAIT_S = 5.0
_CHUNK_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 1 << 20  # of one that has not ended yet, such as a compiler's row of dots
_STDOUT = 1


class DriverError(Exception):
    """A stage that cannot go on. The message is the reason that the run's status shows."""

    def __init__(self, message: str, code: int = USER_ERROR) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class ChildEnd:
    """How the child ended. No process of it is left."""

    code: int  # as a shell shows it: 128 + n for the signal n
    stopped_by: int | None  # the signal that we were told to stop by; None: we were not


def queue_signals() -> SignalQueue:
    """Return the queue of this process, for requests to stop and for the ends of children."""
    return SignalQueue((*STOP_SIGNALS, signal.SIGCHLD))


def say(text: str) -> None:
    """Print our own word among the child's output, each line marked."""
    for line in text.splitlines():
        os.write(_STDOUT, f"trainwright: {line}\n".encode())


def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    signals: SignalQueue,
    grace_s: float,
    on_line: Callable[[str], None],
    on_tick: Callable[[], None],
    on_stop: Callable[[int], None],
) -> ChildEnd:
    """Run `argv` to its end. Raises OSError when it cannot be started.

    Its output goes to our stdout byte for byte; `on_line` gets it line by line, carriage returns ending lines too, and
    `on_tick` is called every few seconds. A signal to stop is told once to `on_stop` and reaches the child as SIGTERM,
    whichever it was: torchrun knows that one, of SIGUSR1 it would die and orphan its ranks. After `grace_s` all is
    killed.
    """
    processes.adopt_orphans()  # ranks of torchrun have sessions of their own: no group reaches them all
    child = _start(argv, env, cwd)
    assert child.stdout is not None
    output = _Output(child.stdout.fileno(), on_line)
    code: int | None = None
    stopped_by: int | None = None
    deadline, next_tick = float("inf"), time.monotonic() + TICK_S
    try:
        while code is None and time.monotonic() < deadline:
            output.copy(_POLL_S, signals)
            for number in signals.wait(0):
                if number in STOP_SIGNALS and stopped_by is None:
                    stopped_by, deadline = number, time.monotonic() + grace_s
                    on_stop(number)
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(child.pid, signal.SIGTERM)
            code = processes.reap().get(child.pid)
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_S
                on_tick()
    finally:
        code = _kill_all(child, code, signals)
        output.finish()
        child.stdout.close()
    return ChildEnd(code if code >= 0 else 128 - code, stopped_by)


def _start(argv: Sequence[str], env: Mapping[str, str], cwd: Path) -> subprocess.Popen[bytes]:
    parent = os.getpid()

    def before_exec() -> None:
        processes.die_with_parent(parent)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm may signal all processes of a step; we decide

    return subprocess.Popen(
        argv,
        env=dict(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        start_new_session=True,
        preexec_fn=before_exec,
    )


def _kill_all(child: subprocess.Popen[bytes], code: int | None, signals: SignalQueue) -> int:
    """Kill what is left of the child and return its exit code, -n for the signal n."""
    deadline = time.monotonic() + _KILL_WAIT_S
    while True:
        code = processes.reap().get(child.pid, code)
        left = processes.descendants()
        if not left or time.monotonic() > deadline:  # what the kernel does not let go, our worker reports
            break
        processes.kill(left)
        signals.wait(0.1)
    child.returncode = -signal.SIGKILL if code is None else code
    return child.returncode


class _Output:
    """The child's output: copied as it comes, and cut into lines."""

    def __init__(self, source: int, on_line: Callable[[str], None]) -> None:
        self._source, self._on_line = source, on_line
        self._rest = b""
        self._is_open = True

    def copy(self, timeout_s: float, signals: SignalQueue) -> None:
        """Wait for output or a signal, and pass on one piece of what there is."""
        ready, _, _ = select.select([signals.fileno(), *([self._source] if self._is_open else [])], [], [], timeout_s)
        if self._source in ready:
            self._pass_on()

    def finish(self) -> None:
        """Pass on what is in the pipe. Nobody who could write is left, but for what no signal kills."""
        while self._is_open and select.select([self._source], [], [], 0)[0]:
            self._pass_on()
        if self._rest:
            self._on_line(self._rest.decode("utf-8", errors="replace"))

    def _pass_on(self) -> None:
        piece = os.read(self._source, _CHUNK_BYTES)
        self._is_open = bool(piece)
        written = 0
        while written < len(piece):
            written += os.write(_STDOUT, piece[written:])
        *lines, self._rest = (self._rest + piece).replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            if line:
                self._on_line(line.decode("utf-8", errors="replace"))
        self._rest = self._rest[-_LONGEST_LINE_BYTES:]
