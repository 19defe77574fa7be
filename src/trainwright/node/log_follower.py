"""Show a growing log on a terminal or pipe without ever waiting for its reader, and quote its end."""

from __future__ import annotations

import os
import select
from pathlib import Path
from typing import BinaryIO

_CHUNK_BYTES = 4096  # a pipe that select calls writable takes PIPE_BUF bytes without blocking
_CHUNKS_PER_ROUND = 64
_STALLED_S = 5.0  # a reader that takes nothing for so long at the end gets no more

LAST_LINES = 20
LAST_BYTES = 4096


class LogFollower:
    """Copies what is appended to `log` to the descriptor `target`, byte for byte.

    The log on disk is the truth, the copy a convenience: a reader that goes away ends the copying, not the run.
    """

    def __init__(self, log: Path, target: int) -> None:
        self._log, self._target = log, target
        self._offset = log.stat().st_size if log.exists() else 0
        self._file: BinaryIO | None = None
        self._pending = b""
        self._is_cut = False

    def copy(self) -> bool:
        """Copy a bounded piece of what can be copied at once; return whether more may follow at once."""
        for _ in range(_CHUNKS_PER_ROUND):
            self._pending = self._pending or self._read()
            if self._is_cut or not self._pending:
                return False
            try:
                if not self._is_writable(0):
                    return False
                self._pending = self._pending[os.write(self._target, self._pending) :]
            except OSError:
                self._is_cut = True
        return True

    def finish(self) -> None:
        """Copy the rest, as long as the reader takes it."""
        while self.copy() or (self._pending and not self._is_cut and self._is_writable(_STALLED_S)):
            pass
        if self._file is not None:
            self._file.close()

    def _read(self) -> bytes:
        if self._file is None:
            if not self._log.exists():
                return b""
            self._file = open(self._log, "rb", buffering=0)  # noqa: SIM115  open as long as we follow
            self._file.seek(self._offset)
        return self._file.read(_CHUNK_BYTES)

    def _is_writable(self, timeout_s: float) -> bool:
        return bool(select.select([], [self._target], [], timeout_s)[1])


def last_lines(log: Path) -> list[str]:
    """Return the end of a log as text: at most 20 lines from its last 4 KiB. A missing log has no lines."""
    try:
        with open(log, "rb") as file:
            start = max(file.seek(0, os.SEEK_END) - LAST_BYTES, 0)
            file.seek(start)
            content = file.read(LAST_BYTES)
    except OSError:
        return []
    lines = content.decode("utf-8", errors="replace").rstrip("\n").split("\n")
    if start and len(lines) > 1:
        del lines[0]  # most likely cut
    # A progress bar rewrites its line after each carriage return: only what stood there last is worth a line.
    return [line.rstrip("\r").rpartition("\r")[2] for line in lines[-LAST_LINES:] if content]
