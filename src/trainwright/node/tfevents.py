"""Scalars in TensorBoard's event files, read while they are being written.

A file is a row of records: the length of an event (u64), a checksum of the length, the event, a checksum of the event.
Sources: tensorflow/core/lib/io/record_writer.h; tensorboard/compat/proto/{event,summary,tensor}.proto.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

_LENGTH = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_AT_A_TIME_BYTES = 1 << 20  # of a file that is long already: the reader is one of several things its process does
_DT_FLOAT, _DT_DOUBLE = 1, 2


@dataclass(frozen=True)
class Point:
    """One value of one tag, as the writer logged it."""

    tag: str
    step: int
    wall_time: float  # seconds since 1970 on the writer's clock
    value: float  # may be NaN or infinite


class ScalarReader:
    """Reads the scalars of one event file, each once.

    Both ways to write one are read: a plain value (torch, tensorboardX) and a tensor of one value (TensorFlow 2, and
    torch's `new_style`). `damage` says where a record's checksum does not fit; None: nowhere so far. A record with a
    damaged event is left out; behind a damaged length nothing can be found, and reading ends.
    """

    def __init__(self, path: Path) -> None:
        self.path = path  # may be set anew when the file has been moved
        self.damage: str | None = None
        self._offset = 0
        self._is_lost = False

    def read_new(self) -> list[Point]:
        """Return the next points, none where there are no new ones; of a long file, a part at a time.

        A record that is not whole yet is read when it is. A file that is gone has no more points.
        """
        size = _AT_A_TIME_BYTES
        try:
            if self._is_lost or os.stat(self.path).st_size <= self._offset:
                return []
            with open(self.path, "rb") as file:
                while True:
                    before = file.seek(self._offset)
                    content = file.read(size)
                    points = list(self._parse(content))
                    if points or len(content) < size or self._is_lost:
                        return points
                    if self._offset == before:  # a record, say an image, is longer than that
                        size *= 2
        except FileNotFoundError:
            return []

    def _parse(self, content: bytes) -> Iterator[Point]:
        """Yield the scalars of the whole records in `content`, which starts at the offset, and move it behind them."""
        start, base = 0, self._offset
        filled = len(content.rstrip(b"\0"))  # a file system may make room, zeros, before it has what is to stand there
        while len(content) - start >= _LENGTH.size:
            length, checksum = _LENGTH.unpack_from(content, start)
            if masked_crc32c(content[start : start + 8]) != checksum:
                if start + _LENGTH.size <= filled:
                    self._is_lost = True
                    self._note(base + start, "length", "reading ends there")
                return
            event = content[start + _LENGTH.size : start + _LENGTH.size + length]
            end = start + _LENGTH.size + length + _CHECKSUM.size
            if end > len(content):
                return
            (checksum,) = _CHECKSUM.unpack_from(content, end - _CHECKSUM.size)
            if masked_crc32c(event) == checksum:
                yield from _scalars(event)
            elif end > filled:
                return
            else:
                self._note(base + start, "event", "it is left out")
            start = end
            self._offset = base + start

    def _note(self, offset: int, part: str, consequence: str) -> None:
        words = f"{self.path}: the record at byte {offset} is damaged: the checksum of its {part} does not fit"
        self.damage = self.damage or f"{words}; {consequence}"


def masked_crc32c(content: bytes) -> int:
    """Return the checksum of a record's part: CRC-32C, rotated, plus a constant. Source: tensorflow/core/lib/hash."""
    crc = 0xFFFFFFFF
    for byte in content:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _table() -> list[int]:
    table = []
    for entry in range(256):
        for _ in range(8):
            entry = entry >> 1 ^ (0x82F63B78 if entry & 1 else 0)  # Castagnoli's polynomial, bits reflected
        table.append(entry)
    return table


_TABLE = _table()


def _scalars(event: bytes) -> Iterator[Point]:
    step, wall_time, summaries = 0, 0.0, []
    for field, value in _fields(event):
        if field == 1:
            (wall_time,) = struct.unpack("<d", value)
        elif field == 2 and isinstance(value, int):
            step = value - (1 << 64) if value >> 63 else value
        elif field == 5:
            summaries.append(value)
    for summary in summaries:
        for field, entry in _fields(summary):
            if field == 1:
                tag, number = _entry(entry)
                if number is not None:
                    yield Point(tag, step, wall_time, number)


def _entry(content: bytes) -> tuple[str, float | None]:
    """Return the tag of a summary's value and its number, None for an image, a text and the like."""
    tag, number = "", None
    for field, value in _fields(content):
        if field == 1:
            tag = value.decode("utf-8", errors="replace")
        elif field == 2:
            (number,) = struct.unpack("<f", value)
        elif field == 8:
            number = _single_value(value)
    return tag, number


def _single_value(tensor: bytes) -> float | None:
    """Return the value of a tensor without dimensions that holds a float or double, None for any other."""
    fields = dict(_fields(tensor))
    formats = {_DT_FLOAT: ("<f", 5), _DT_DOUBLE: ("<d", 6)}
    if fields.get(1) not in formats or any(field == 2 for field, _ in _fields(fields.get(2, b""))):
        return None
    layout, typed = formats[fields[1]]
    packed = fields.get(4) or fields.get(typed, b"")  # raw bytes, or the list of this type
    return float(struct.unpack(layout, packed)[0]) if len(packed) == struct.calcsize(layout) else None


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each field of a protobuf message: an integer, or bytes.

    Source: protobuf.dev/programming-guides/encoding.
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if kind not in _FIXED_BYTES:
            size, at = _varint(message, at)
        else:
            size = _FIXED_BYTES[kind]
        yield key >> 3, message[at : at + size]
        at += size


_FIXED_BYTES = {1: 8, 5: 4}


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return the number at an offset, seven bits a byte, and the offset behind it."""
    number = shift = 0
    while True:
        byte = message[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number, at
