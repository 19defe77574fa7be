"""Wait for signals, ended children and the clock in one place, with no work inside handlers."""

from __future__ import annotations

import select
import signal
import socket
from typing import Iterable

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class SignalQueue:
    """Signals of this process in the order of their arrival. One per process; made in the main thread."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)
        signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, lambda *_: None)  # the wakeup descriptor carries the number

    def close(self) -> None:
        """Give the descriptors back, in a process that goes on without this queue."""
        signal.set_wakeup_fd(-1)
        self._receiver.close()
        self._sender.close()

    def fileno(self) -> int:
        """Return the descriptor that is readable while signals wait, for select."""
        return self._receiver.fileno()

    def wait(self, timeout_s: float) -> list[int]:
        """Return the signals that arrived, at once if there are any, else after at most `timeout_s`."""
        ready, _, _ = select.select([self._receiver], [], [], timeout_s)
        return list(self._receiver.recv(4096)) if ready else []


def signal_name(number: int) -> str:
    """Return SIGKILL for 9; real-time signals have numbers only."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
