"""Copies Megatron data sets to this node's own disk, once: a training that reads samples from a bucket waits for it.

A data set is `PREFIX.bin` and `PREFIX.idx`. Beside the copy lies `PREFIX.copied.json`, written last, which says of what
it is a copy: as long as that still holds, nothing is copied again. What a killed copy leaves is not looked at.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Callable, Dict, Iterator, List, Mapping, Sequence, Tuple

from . import processes

SUFFIXES = (".bin", ".idx")
SAY_EVERY_S = 5.0

_PIECE_BYTES = 64 << 20  # read at a time by one of several threads: a mounted bucket is faster for several readers
_NUM_READERS = 4
_CHUNK_BYTES = 8 << 20
_SPARE_BYTES = 256 << 20  # left free for the rest of the machine
_SCHEMA_VERSION = 1

Say = Callable[[str], None]
Sizes = Dict[str, List[int]]  # by suffix: size in bytes and time of change in seconds


class DataCopyError(Exception):
    """Data that cannot be copied. The message names the file or disk and the remedy."""


@dataclass(frozen=True)
class DataSet:
    """One data set to be copied: prefixes without .bin and .idx."""

    source: str  # as this node sees it
    target: str
    url: str | None = None  # of the source in a bucket; None: it is in none
    by_rsync: bool = False  # by `gcloud storage rsync`, where this machine has it, instead of through the mount

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> DataSet:
        """Return the data set that an entry of `data` in settings.json names."""
        return cls(entry["from"], entry["to"], entry.get("url"), entry.get("copy") == "rsync")

    @property
    def marker(self) -> Path:
        return Path(f"{self.target}.copied.json")

    @property
    def draft(self) -> Path:
        """The directory in which a copy is made."""
        return Path(f"{self.target}.copying")


def copy_all(data_sets: Sequence[DataSet], say: Say) -> None:
    """Copy what is missing or has changed. Raises DataCopyError, before any byte is copied where that can be told.

    Processes of one node that copy the same wait for each other.
    """
    found = {data_set: _source_sizes(data_set) for data_set in data_sets}
    for folder in {Path(data_set.target).parent for data_set in data_sets}:
        folder.mkdir(parents=True, exist_ok=True)
    for data_set in data_sets:
        with open(f"{data_set.target}.lock", "a+", encoding="utf-8") as lock:
            _take(lock, data_set, say)
            why = _why_copy(data_set, found[data_set])
            if why is None:
                say(f"data: {data_set.target} is there already")
                continue
            for path in (data_set.marker, *(Path(data_set.target + suffix) for suffix in SUFFIXES)):
                path.unlink(missing_ok=True)
            shutil.rmtree(data_set.draft, ignore_errors=True)
            say(f"data: copying {data_set.source} to {data_set.target}: {why}")
            left = [one for one in data_sets[data_sets.index(data_set) :] if _why_copy(one, found[one]) is not None]
            _check_space(left, found)
            _copy(data_set, found[data_set], say)


def _source_sizes(data_set: DataSet) -> Sizes:
    missing, sizes = [], {}
    for suffix in SUFFIXES:
        path = data_set.source + suffix
        try:
            status = os.stat(path)
        except FileNotFoundError:
            missing.append(path)
        else:
            sizes[suffix] = [status.st_size, int(status.st_mtime)]
    if missing:
        raise DataCopyError(f"data.data_prefix: {' and '.join(missing)} not there as this node sees it")
    empty = [data_set.source + suffix for suffix, (size, _) in sizes.items() if not size]
    if empty:
        raise DataCopyError(f"data.data_prefix: {' and '.join(empty)} empty; build the data set again")
    return sizes


def _take(lock: IO[str], data_set: DataSet, say: Say) -> None:
    """Wait until no other process copies this data set. The kernel lets go of the lock of one that was killed."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip()
        say(f"data: waiting for {f'process {holder}' if holder else 'another process'}, which copies {data_set.target}")
        fcntl.flock(lock, fcntl.LOCK_EX)
    lock.seek(0)
    lock.truncate()
    lock.write(f"{os.getpid()}\n")
    lock.flush()


def _why_copy(data_set: DataSet, sizes: Sizes) -> str | None:
    """Return why there must be a copy; None: there is one that holds."""
    try:
        marker = json.loads(data_set.marker.read_text(encoding="utf-8"))
        copied_from, copied = marker["from"], marker["files"]
    except FileNotFoundError:
        return "there is no whole copy"
    except (ValueError, KeyError, TypeError):
        return f"{data_set.marker.name} was cut short"
    if copied_from != data_set.source:
        return f"what is there is a copy of {copied_from}"
    for suffix, (size, changed) in sizes.items():
        if copied.get(suffix, [None])[0] != size:
            return f"the source's {suffix} has {size} bytes now, it had {copied.get(suffix, [0])[0]}"
        if copied[suffix][1] != changed:
            return f"the source's {suffix} has been written anew"
        path = Path(data_set.target + suffix)
        if not path.is_file() or path.stat().st_size != size:
            return f"{path.name} is not what was copied"
    return None


def _check_space(data_sets: Sequence[DataSet], found: Mapping[DataSet, Sizes]) -> None:
    needed: dict[int, int] = {}
    folders: dict[int, Path] = {}
    for data_set in data_sets:
        folder = Path(data_set.target).parent
        disk = folder.stat().st_dev
        folders[disk] = folder
        needed[disk] = needed.get(disk, 0) + sum(size for size, _ in found[data_set].values())
    for disk, num_bytes in needed.items():
        free = shutil.disk_usage(folders[disk]).free
        if num_bytes + _SPARE_BYTES > free:
            raise DataCopyError(
                f"{folders[disk]} has {_size(free)} free, the data needs {_size(num_bytes)}; set a larger "
                "launcher.boot_disk_size_gb, another backend.data_cache_dir, or backend.data_cache_dir=null to read "
                "the data where it is"
            )


def _copy(data_set: DataSet, sizes: Sizes, say: Say) -> None:
    data_set.draft.mkdir()
    name = Path(data_set.source).name
    drafts = {suffix: data_set.draft / (name + suffix) for suffix in SUFFIXES}
    total = sum(size for size, _ in sizes.values())
    try:
        if data_set.by_rsync and data_set.url is not None and shutil.which("gcloud") is not None:
            _by_rsync(data_set, total, say)
        else:
            if data_set.by_rsync:
                say(f"data: no gcloud on this machine; copying from {data_set.source} as it is mounted")
            _through_mount({Path(data_set.source + suffix): drafts[suffix] for suffix in SUFFIXES}, total, say)
    except OSError as error:
        raise DataCopyError(f"cannot copy {data_set.source} to {data_set.target}: {error}") from error
    for suffix, copied in drafts.items():
        size = copied.stat().st_size if copied.is_file() else None
        if size != sizes[suffix][0]:
            raise DataCopyError(f"{copied} has {size} bytes, its source {sizes[suffix][0]}: not used")
    now = _source_sizes(data_set)
    if now != sizes:
        raise DataCopyError(f"{data_set.source} was changed while it was copied; start again when it is whole")
    for suffix, copied in drafts.items():
        os.replace(copied, data_set.target + suffix)
    shutil.rmtree(data_set.draft)
    content = {"schema_version": _SCHEMA_VERSION, "from": data_set.source, "files": sizes}
    draft = data_set.marker.with_suffix(".tmp")
    draft.write_text(json.dumps(content) + "\n", encoding="utf-8")
    os.replace(draft, data_set.marker)
    say(f"data: copied {data_set.target}, {_size(total)}")


def _through_mount(files: Mapping[Path, Path], total: int, say: Say) -> None:
    progress = _Progress(total, say)
    for source, target in files.items():
        with open(source, "rb") as reader, open(target, "wb") as writer:
            size = os.fstat(reader.fileno()).st_size
            os.ftruncate(writer.fileno(), size)

            def copy_piece(start: int, reader: IO[bytes] = reader, writer: IO[bytes] = writer) -> None:
                for offset, length in _chunks(start, min(start + _PIECE_BYTES, os.fstat(reader.fileno()).st_size)):
                    data = os.pread(reader.fileno(), length, offset)
                    if len(data) != length:
                        raise OSError(f"{reader.name} ended at byte {offset + len(data)}")
                    while data:
                        written = os.pwrite(writer.fileno(), data, offset)
                        data, offset = data[written:], offset + written
                    progress.add(length)

            with ThreadPoolExecutor(_NUM_READERS) as readers:
                for _ in readers.map(copy_piece, range(0, size, _PIECE_BYTES)):
                    pass
            os.fsync(writer.fileno())  # the marker must not outlive a crash that the data does not
    progress.finish()


def _chunks(start: int, end: int) -> Iterator[Tuple[int, int]]:
    for offset in range(start, end, _CHUNK_BYTES):
        yield offset, min(_CHUNK_BYTES, end - offset)


def _by_rsync(data_set: DataSet, total: int, say: Say) -> None:
    """Let gcloud copy the two files of the prefix, and no other of the same folder, many ranges at a time."""
    assert data_set.url is not None
    folder, _, name = data_set.url.rpartition("/")
    parent = os.getpid()
    # gcloud takes a list of Python's regular expressions, so that a comma would end this one.
    others = rf"^(?!{re.escape(name).replace(',', '.')}\.(bin|idx)$).*$"
    argv = ["gcloud", "storage", "rsync", folder, str(data_set.draft), f"--exclude={others}"]
    progress = _Progress(total, say)
    process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, preexec_fn=lambda: processes.die_with_parent(parent))
    while True:
        try:
            code = process.wait(SAY_EVERY_S)
            break
        except subprocess.TimeoutExpired:
            progress.set(sum(path.stat().st_size for path in data_set.draft.rglob("*") if path.is_file()))
    if code:
        raise DataCopyError(f"`gcloud storage rsync {folder}` ended with exit code {code}; see its words above")
    progress.finish()


class _Progress:
    """Tells every few seconds how much is copied, how fast, and how long the rest takes."""

    def __init__(self, total: int, say: Say) -> None:
        self._total, self._say = total, say
        self._done, self._lock = 0, threading.Lock()
        self._started = self._told = time.monotonic()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.set(self._done + num_bytes)

    def set(self, done: int) -> None:
        self._done = done
        if time.monotonic() - self._told >= SAY_EVERY_S:
            self._told = time.monotonic()
            self._tell()

    def finish(self) -> None:
        self._done = self._total
        self._tell()

    def _tell(self) -> None:
        rate = self._done / max(time.monotonic() - self._started, 1e-6)
        left = f", {(self._total - self._done) / rate:.0f} s left" if 0 < self._done < self._total else ""
        share = 100 * self._done // max(self._total, 1)
        self._say(f"data: {_size(self._done)} of {_size(self._total)} ({share}%), {rate / (1 << 20):.0f} MiB/s{left}")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / (1 << 20):.1f} MiB"
