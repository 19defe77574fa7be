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
from trainwright.checkpoint.crc32 import combine
from trainwright.checkpoint.tensor_file import TensorFile

ReportBytes = Callable[[int, int], None]  # bytes written so far, bytes of all; called by one thread at a time
_MAX_WORKERS = 4  # each holds a slice or a tensor of its own, and a disk takes no more
_GROUPS_AHEAD = 2  # prepared while one is written


@dataclass(frozen=True, kw_only=True)
class Source:
    """A tensor that is read."""

    name: str
    values: Callable[[], Bits]
    prepare: Callable[[], int | None]  # called ahead of its group; its CRC-32, or None where spans make that up


@dataclass(frozen=True, kw_only=True)
class Span:
    """Bytes of a source that are written just as they are."""

    source: str
    start: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class Target:
    """A tensor that is written."""

    file: TensorFile
    index: int  # in the file
    num_bytes: int
    blocks: Callable[[], Sequence[Bits]]  # its values in pieces that follow each other
    spans: Sequence[Span | None] = ()  # what each block is of the source; None: not just as it is


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

    While a group is written one thread prepares the next ones.
    """
    progress = _Progress(sum(target.num_bytes for group in groups for target in group.targets), report)
    crc32s: dict[str, int] = {}
    spans: dict[Span, int] = {}
    files = {id(target.file): target.file for group in groups for target in group.targets}
    writers, reader = ThreadPoolExecutor(workers), ThreadPoolExecutor(1)
    try:
        upcoming = deque(reader.submit(_prepare, group) for group in groups[:_GROUPS_AHEAD])
        for position, group in enumerate(groups):
            crc32s |= upcoming.popleft().result()
            for following in groups[position + _GROUPS_AHEAD : position + _GROUPS_AHEAD + 1]:
                upcoming.append(reader.submit(_prepare, following))
            for written in [writers.submit(_write, target, progress) for target in group.targets]:
                spans |= written.result()
    finally:
        for pool in (writers, reader):
            pool.shutdown(cancel_futures=True)
        for file in files.values():
            file.close()
    return crc32s | _joined(spans)


def source_crc32s(groups: Sequence[Group]) -> dict[str, int]:
    """Return the CRC-32 of all sources by name."""
    return {source.name: crc32_of(source.values()) for group in groups for source in group.sources}


def crc32_of(values: Bits, start: int = 0) -> int:
    """Return the checksum of a tensor: to find other or broken data, as a commit's, for which SHA-256 is too slow."""
    return zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data, start)


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


def _prepare(group: Group) -> dict[str, int]:
    crc32s = {source.name: source.prepare() for source in group.sources}
    return {name: crc32 for name, crc32 in crc32s.items() if crc32 is not None}


def _write(target: Target, progress: "_Progress") -> dict[Span, int]:
    crc32s = target.file.write(target.index, target.blocks())
    progress.add(target.num_bytes)
    return {span: crc32 for span, crc32 in zip(target.spans, crc32s, strict=False) if span is not None}


def _joined(spans: Mapping[Span, int]) -> dict[str, int]:
    """Return the checksums of the sources made up of `spans`: what is summed up while written need not be again."""
    crc32s: dict[str, int] = {}
    ends: dict[str, int] = {}
    for span in sorted(spans, key=lambda span: span.start):
        assert ends.get(span.source, 0) == span.start, f"{span} leaves a gap"
        ends[span.source] = span.start + span.num_bytes
        crc32s[span.source] = combine(crc32s.get(span.source, 0), spans[span], span.num_bytes)
    return crc32s


class _Progress:
    def __init__(self, total_bytes: int, report: ReportBytes | None) -> None:
        self._lock = threading.Lock()
        self._done_bytes, self._total_bytes, self._report = 0, total_bytes, report

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done_bytes += num_bytes
            if self._report is not None:
                self._report(self._done_bytes, self._total_bytes)
