"""The engine of both directions: tensors flow from mapped files into new ones, one layer in memory at a time."""

import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trainwright.checkpoint.bits import Bits
from trainwright.checkpoint.tensor_file import TensorFile

ReportBytes = Callable[[int, int], None]  # bytes written so far, bytes of all; called by one thread at a time
_MAX_WORKERS = 4  # each holds a slice or a tensor of its own, and a disk takes no more
_GROUPS_AHEAD = 2  # read into the system's cache before they are written


@dataclass(frozen=True, kw_only=True)
class Source:
    """A tensor that is read."""

    name: str
    values: Callable[[], Bits]
    read_ahead: Callable[[], None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class Target:
    """A tensor that is written."""

    file: TensorFile
    index: int  # in the file
    num_bytes: int
    blocks: Callable[[], Sequence[Bits]]  # its values in pieces that follow each other


@dataclass(kw_only=True)
class Group:
    """What is in memory together: one layer, or what stands before or after all layers."""

    sources: list[Source] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a conversion did. Bytes and seconds; `was_complete`: it was all there already, and nothing was written."""

    kind: str
    output: str
    was_complete: bool
    num_tensors: int
    read_bytes: int
    written_bytes: int
    wall_s: float
    degrees: Mapping[str, Any]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": 1, **asdict(self)}


def default_workers() -> int:
    """Return how many threads write at once unless told otherwise."""
    return min(_MAX_WORKERS, len(os.sched_getaffinity(0)))


def stream(groups: Sequence[Group], *, workers: int, report: ReportBytes | None) -> dict[str, int]:
    """Write all targets, group by group, and return the CRC-32 of all sources by name.

    While a group is written the next ones are read from the disk, by the thread that checks their sums.
    """
    progress = _Progress(sum(target.num_bytes for group in groups for target in group.targets), report)
    crc32s: dict[str, int] = {}
    files = {id(target.file): target.file for group in groups for target in group.targets}
    writers, reader = ThreadPoolExecutor(workers), ThreadPoolExecutor(1)
    try:
        upcoming = deque(reader.submit(_checksums, group.sources) for group in groups[:_GROUPS_AHEAD])
        for position, group in enumerate(groups):
            crc32s |= upcoming.popleft().result()
            for following in groups[position + _GROUPS_AHEAD : position + _GROUPS_AHEAD + 1]:
                upcoming.append(reader.submit(_checksums, following.sources))
            for written in [writers.submit(_write, target, progress) for target in group.targets]:
                written.result()
    finally:
        for pool in (writers, reader):
            pool.shutdown(cancel_futures=True)
        for file in files.values():
            file.close()
    return crc32s


def source_crc32s(groups: Sequence[Group]) -> dict[str, int]:
    """Return the CRC-32 of all sources by name."""
    crc32s: dict[str, int] = {}
    for group in groups:
        crc32s |= _checksums(group.sources)
    return crc32s


def file_crc32s(directory: Path, groups: Sequence[Group]) -> dict[str, int]:
    """Return the checksums of the files that `stream` wrote, by their path below `directory`."""
    files = {target.file.path: target.file.crc32 for group in groups for target in group.targets}
    unfinished = [path for path, crc32 in files.items() if crc32 is None]
    assert not unfinished, f"tensors of {unfinished} were never written"
    return {path.relative_to(directory).as_posix(): crc32 for path, crc32 in files.items() if crc32 is not None}


def in_groups(sources: Mapping[int, Sequence[Source]], targets: Mapping[int, Sequence[Target]]) -> list[Group]:
    """Return the groups of a model in order, given what is in each by its number."""
    numbers = sorted({*sources, *targets})
    return [Group(sources=list(sources.get(n, ())), targets=list(targets.get(n, ()))) for n in numbers]


def _checksums(sources: Sequence[Source]) -> dict[str, int]:
    for source in sources:
        source.read_ahead()
    # Not a cryptographic hash: like a commit's, these are to find other or broken data, and SHA-256 took a third of all
    # processor time (2026-11-30).
    return {source.name: zlib.crc32(_bytes(source.values())) for source in sources}


def _bytes(values: Bits) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def _write(target: Target, progress: "_Progress") -> None:
    target.file.write(target.index, target.blocks())
    progress.add(target.num_bytes)


class _Progress:
    def __init__(self, total_bytes: int, report: ReportBytes | None) -> None:
        self._lock = threading.Lock()
        self._done_bytes, self._total_bytes, self._report = 0, total_bytes, report

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done_bytes += num_bytes
            if self._report is not None:
                self._report(self._done_bytes, self._total_bytes)
