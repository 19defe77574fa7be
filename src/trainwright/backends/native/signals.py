"""Requests to stop from outside: SIGTERM, SIGINT and SIGUSR1 set a flag that the step boundary reads."""

import signal
from types import FrameType, TracebackType
from typing import Any

import lightning.pytorch as pl

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopRequest:
    """While entered, remembers whether a stop was asked for. Main thread only."""

    def __init__(self) -> None:
        self.received = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopRequest":
        self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # Whoever starts ranks may answer the end of the first with SIGTERM for the rest; one that was asked to
            # stop is about to exit with its own code and must not be killed while it does.
            signal.signal(number, signal.SIG_IGN if self.received else handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True


def keep_own_handlers(trainer: pl.Trainer) -> None:
    """Keep Lightning from registering its SIGTERM handler, for which Lightning 2.6 has no switch.

    That handler ends the run without a checkpoint, and calls a collective from inside a signal.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
