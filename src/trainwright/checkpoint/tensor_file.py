"""A file of tensors, written in any order by several threads, checksummed on the way and flushed when it is whole."""

import os
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from trainwright.checkpoint.bits import Bits
from trainwright.checkpoint.containers import Container
from trainwright.checkpoint.crc32 import combine


class TensorFile:
    """Opened by the first tensor that is written, closed by the last."""

    def __init__(self, path: Path, container: Container) -> None:
        self.path = path
        self.crc32: int | None = None  # None: not whole yet
        self._container = container
        self._crc32s: dict[int, int] = {}
        self._lock = threading.Lock()
        self._descriptor: int | None = None

    def write(self, index: int, blocks: Sequence[Bits]) -> list[int]:
        """Write tensor `index`, given as blocks that follow each other, and return the checksum of each block."""
        pieces = [np.ascontiguousarray(block).reshape(-1).view(np.uint8).data for block in blocks]
        num_bytes, expected = sum(piece.nbytes for piece in pieces), self._container.specs[index].num_bytes
        assert num_bytes == expected, f"{self.path} tensor {index}: {num_bytes} bytes, not {expected}"
        piece_crc32s = [zlib.crc32(piece) for piece in pieces]
        crc32 = 0
        for piece, piece_crc32 in zip(pieces, piece_crc32s, strict=True):
            crc32 = combine(crc32, piece_crc32, piece.nbytes)
        descriptor = self._open()
        position = self._container.starts[index]
        for piece in (memoryview(self._container.before(index, crc32)), *pieces):
            position = _write_at(descriptor, piece, position)
        with self._lock:
            self._crc32s[index] = crc32
            is_whole = len(self._crc32s) == len(self._container.specs)
        if is_whole:
            self._finish(descriptor)
        return piece_crc32s

    def close(self) -> None:
        """Let go of a file that will not be finished."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        with self._lock:
            if self._descriptor is None:
                self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
                _write_at(self._descriptor, memoryview(self._container.head), 0)
            return self._descriptor

    def _finish(self, descriptor: int) -> None:
        container = self._container
        crc32s = [self._crc32s[index] for index in range(len(container.specs))]
        tail = container.tail(crc32s)
        end = container.starts[-1] + len(container.before(len(crc32s) - 1, 0)) + container.specs[-1].num_bytes
        _write_at(descriptor, memoryview(tail), end)
        os.fsync(descriptor)
        self.close()
        total = zlib.crc32(container.head)
        for index, (crc32, spec) in enumerate(zip(crc32s, container.specs, strict=True)):
            total = combine(zlib.crc32(container.before(index, crc32), total), crc32, spec.num_bytes)
        self.crc32 = zlib.crc32(tail, total)


def _write_at(descriptor: int, piece: memoryview, position: int) -> int:
    """Write all of `piece`, and return the position after it. A system call writes 2 GiB at most."""
    while piece:
        written = os.pwrite(descriptor, piece, position)
        piece, position = piece[written:], position + written
    return position
