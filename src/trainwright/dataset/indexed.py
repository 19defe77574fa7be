"""Megatron's .bin/.idx pair: a memory-mapped reader, a streaming writer, and the facts of a pair.

`.bin` holds the token arrays of all sequences, one after the other. `.idx` (little endian, no padding) holds: 9 bytes
magic, u64 version 1, u8 dtype code, u64 number of sequences S, u64 number of document bounds D, i32[S] lengths in
tokens, i64[S] byte offsets into `.bin`, i64[D] document bounds in sequence numbers (the first 0, the last S), and
i8[S] modes for multimodal data only.
Source: megatron.core.datasets.indexed_dataset, 0.16.1; the files are equal to its own byte for byte.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.dataset.index_header import HEADER, MAGIC
from trainwright.errors import UserError

DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_SCAN_TOKENS = 1 << 24
_COPY_BYTES = 1 << 22


def bin_path(prefix: Path) -> Path:
    """Return the path of the tokens of `prefix`, which itself may hold dots."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """Return the path of the index of `prefix`."""
    return prefix.with_name(prefix.name + ".idx")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype in which Megatron stores tokens below `vocab_size`."""
    return DTYPES[8] if vocab_size < 65500 else DTYPES[4]


class IndexedDataset:
    """A pair opened for reading; sequences are views of the mapped file. Pickles as its prefix.

    Raises UserError naming the file and data.data_prefix when a file is missing, alien or cut short.
    """

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix
        index = _map(idx_path(prefix), np.dtype("u1"))
        self.dtype, num_sequences, num_bounds = _parse_header(idx_path(prefix), index)
        self.sequence_lengths: npt.NDArray[np.int32] = _column(index, "<i4", num_sequences, HEADER.size)
        offset = HEADER.size + 4 * num_sequences
        self.sequence_pointers: npt.NDArray[np.int64] = _column(index, "<i8", num_sequences, offset)
        self.document_indices: npt.NDArray[np.int64] = _column(index, "<i8", num_bounds, offset + 8 * num_sequences)
        if num_sequences == 0 or self.document_indices[-1] != num_sequences:
            raise _unusable(idx_path(prefix), f"its documents do not end at its {num_sequences} sequences")
        self.num_tokens = int(self.sequence_lengths.sum(dtype=np.int64))
        _check_bin_size(bin_path(prefix), self.num_tokens * self.dtype.itemsize, idx_path(prefix))
        self.tokens = _map(bin_path(prefix), self.dtype)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, sequence: int) -> npt.NDArray[Any]:
        return self.get(sequence)

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Return `length` tokens (None: the rest) of one sequence from its token `offset` on."""
        if length is None:
            length = int(self.sequence_lengths[sequence]) - offset
        start = int(self.sequence_pointers[sequence]) // self.dtype.itemsize + offset
        return self.tokens[start : start + length]

    def span(self, first: int, stop: int) -> npt.NDArray[Any]:
        """Return the tokens of the sequences [first, stop) in one view."""
        if first == stop:
            return self.tokens[:0]
        begin = int(self.sequence_pointers[first]) // self.dtype.itemsize
        return self.tokens[begin : begin + int(self.sequence_lengths[first:stop].sum(dtype=np.int64))]

    def __reduce__(self) -> tuple[Callable[[Path], IndexedDataset], tuple[Path]]:
        return IndexedDataset, (self.prefix,)


class IndexedWriter:
    """Writes a pair sequence by sequence; the index is written when the `with` block ends without an error."""

    def __init__(self, prefix: Path, dtype: np.dtype[Any]) -> None:
        self._prefix = prefix
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._code = _CODES[self._dtype]
        self._lengths = array("i")
        self._bounds = array("q", [0])
        self.bin_crc32 = 0  # of what is in .bin so far
        self._bin = open(bin_path(prefix), "wb")  # noqa: SIM115 (closed by __exit__)

    def __enter__(self) -> IndexedWriter:
        return self

    def add_sequence(self, tokens: npt.NDArray[Any]) -> None:
        """Append one sequence to the current document. Raises OverflowError for a token that the dtype cannot hold."""
        stored = np.asarray(tokens).astype(self._dtype)
        if not np.array_equal(stored, tokens):
            raise OverflowError(f"tokens {np.min(tokens)}..{np.max(tokens)} do not fit {self._dtype}")
        self._put(stored.tobytes())
        self._lengths.append(len(stored))

    def end_document(self) -> None:
        """Close the document that the sequences since the last call make up."""
        self._bounds.append(len(self._lengths))

    def add_index(self, prefix: Path) -> None:
        """Append all documents of another pair of the same dtype. Raises UserError as IndexedDataset does."""
        other = IndexedDataset(prefix)
        assert other.dtype == self._dtype
        first = len(self._lengths)
        self._lengths.frombytes(other.sequence_lengths.astype(np.intc).tobytes())
        self._bounds.frombytes((other.document_indices[1:] + first).astype(np.longlong).tobytes())
        with open(bin_path(prefix), "rb") as stream:
            for chunk in iter(lambda: stream.read(_COPY_BYTES), b""):
                self._put(chunk)

    def _put(self, content: bytes) -> None:
        self._bin.write(content)
        self.bin_crc32 = zlib.crc32(content, self.bin_crc32)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bin.close()
        if kind is None:
            self._write_index()

    def _write_index(self) -> None:
        lengths = np.frombuffer(self._lengths, dtype=np.intc).astype("<i4")
        pointers = np.zeros(len(lengths), dtype="<i8")
        np.cumsum(lengths[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self._dtype.itemsize
        with open(idx_path(self._prefix), "wb") as stream:
            stream.write(HEADER.pack(MAGIC, 1, self._code, len(lengths), len(self._bounds)))
            stream.write(lengths.tobytes())
            stream.write(pointers.tobytes())
            stream.write(np.frombuffer(self._bounds, dtype=np.longlong).astype("<i8").tobytes())


@dataclass(frozen=True, kw_only=True)
class PrefixFacts:
    """What a pair holds."""

    dtype: str
    num_sequences: int
    num_documents: int
    num_tokens: int
    max_token_id: int  # a model needs a vocab_size above it


def inspect_prefix(prefix: Path) -> PrefixFacts:
    """Return the facts of the pair at `prefix`, after reading all of its tokens once, chunk by chunk.

    Raises UserError as IndexedDataset does.
    """
    dataset = IndexedDataset(prefix)
    return PrefixFacts(
        dtype=dataset.dtype.name,
        num_sequences=len(dataset),
        num_documents=len(dataset.document_indices) - 1,
        num_tokens=dataset.num_tokens,
        max_token_id=int(token_range(dataset)[1]),
    )


def token_range(dataset: IndexedDataset, on_bytes: Callable[[int], None] | None = None) -> tuple[float, float]:
    """Return the smallest and the largest token, all read chunk by chunk; `on_bytes` hears how many bytes are read."""
    found = []
    for start in range(0, dataset.num_tokens, _SCAN_TOKENS):
        chunk = dataset.tokens[start : start + _SCAN_TOKENS]
        found.append((chunk.min().item(), chunk.max().item()))
        if on_bytes is not None:
            on_bytes((start + len(chunk)) * dataset.dtype.itemsize)
    return min(low for low, _ in found), max(high for _, high in found)


def _parse_header(path: Path, index: npt.NDArray[np.uint8]) -> tuple[np.dtype[Any], int, int]:
    if len(index) < HEADER.size:
        raise _unusable(path, f"it has {len(index)} bytes, fewer than a Megatron index header ({HEADER.size})")
    magic, version, code, num_sequences, num_bounds = HEADER.unpack(index[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise _unusable(path, f"it begins with {magic!r}, a Megatron index with {MAGIC!r}")
    if version != 1 or code not in DTYPES:
        raise _unusable(path, f"it has version {version} and dtype code {code}; known are version 1 and codes 1 to 8")
    size = HEADER.size + 12 * num_sequences + 8 * num_bounds
    if len(index) == size + num_sequences != size:
        raise _unusable(path, f"it holds a mode for each of its {num_sequences} sequences: it is of multimodal data")
    if len(index) != size or num_bounds == 0:
        raise _unusable(
            path, f"it has {len(index)} bytes, but {num_sequences} sequences and {num_bounds} bounds take {size}"
        )
    return DTYPES[code], num_sequences, num_bounds


def _check_bin_size(path: Path, expected: int, index: Path) -> None:
    if not path.is_file():
        raise _unusable(path, "there is no such file")
    if path.stat().st_size != expected:
        raise _unusable(path, f"it has {path.stat().st_size} bytes, but {index.name} describes {expected}")
    if expected == 0:
        raise _unusable(path, "it holds no tokens")


def _map(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if not path.is_file():
        raise _unusable(path, "there is no such file")
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        raise _unusable(path, "it is empty")
    return np.memmap(path, dtype=dtype, mode="r")


def _column(index: npt.NDArray[np.uint8], dtype: str, count: int, offset: int) -> npt.NDArray[Any]:
    return np.frombuffer(index, dtype=dtype, count=count, offset=offset)  # a view; the columns are not aligned


def _unusable(path: Path, reason: str) -> UserError:
    return UserError(
        f"data.data_prefix: {path} is no usable part of a Megatron data set: {reason}. "
        "Give the path of a complete PREFIX.bin/PREFIX.idx pair without its ending, or copy the pair again."
    )
