"""Files that grow, for a run directory that cannot append: kept on the node's own disk, copied as whole new objects.

Mounted buckets (Cloud Storage FUSE) show a file when it is closed, upload all of it again when it is changed, and know
neither appending nor renaming. So a log of many megabytes is cut into parts, `NAME`, `NAME.part1`, `NAME.part2` and so
on: one that is full is never written again, and only the last one is replaced as the file grows.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import IO, Dict, Iterator, List, Mapping, Protocol, TypeVar

SCRATCH = "TRAINWRIGHT_SCRATCH"  # tells the processes of a node where files that grow are kept; unset: in the run
PERIOD = "TRAINWRIGHT_COPY_EVERY_S"  # how often they are copied; unset: PERIOD_S
PERIOD_S = 30.0  # a bucket takes one write a second of an object; readers of a log are glad of more than one a minute
PART_BYTES = 8 << 20

_CHUNK_BYTES = 1 << 20
_WHOLE = "tfevents"  # TensorBoard takes each file that has this in its name for one that starts with a whole record
_COPIED = ".copied.json"  # below the scratch directory: the size and time of each file as it was copied last
_LOCK = ".copying"


class _Readable(Protocol):
    @property
    def name(self) -> str: ...

    def is_file(self) -> bool: ...

    def read_bytes(self) -> bytes: ...


Readable = TypeVar("Readable", bound=_Readable)  # a pathlib.Path, or one of fsspec's that looks like it


def part(path: Readable, number: int) -> Readable:
    """Return where part `number` of a file that grows is kept; the first has the file's own name."""
    return path.with_name(f"{path.name}.part{number}") if number else path  # type: ignore[attr-defined]


def parts(path: Readable) -> List[Readable]:
    """Return the parts of a file that exist, in order: of a file that was never cut, itself; of none, none."""
    found: List[Readable] = []
    while part(path, len(found)).is_file():
        found.append(part(path, len(found)))
    return found


def read_bytes(path: Readable) -> bytes:
    """Return the content of a file, all its parts in a row. Raises FileNotFoundError where there is none."""
    found = parts(path)
    return b"".join(piece.read_bytes() for piece in found) if found else path.read_bytes()


class Mirror:
    """Copies all files below `scratch` to the same places below `target`; symbolic links and hidden files stay.

    Any process of the node may copy, one at a time: what was copied is noted in `scratch`. Two nodes never share one.
    """

    def __init__(
        self, scratch: Path, target: Path, *, period_s: float = PERIOD_S, part_bytes: int = PART_BYTES
    ) -> None:
        self._scratch, self._target = scratch, target
        self._period_s, self._part_bytes = period_s, part_bytes
        self._next_round = time.monotonic() + period_s
        self._round: threading.Thread | None = None  # None: nothing is copied in the background now

    def beat(self) -> None:
        """Copy in the background if it is time to. To be called often; a mount that hangs holds nobody up."""
        if self._round is not None and self._round.is_alive():
            return
        if time.monotonic() >= self._next_round:
            self._next_round = time.monotonic() + self._period_s
            self._round = threading.Thread(target=self._try_to_copy, name="mirror", daemon=True)
            self._round.start()

    def finish(self) -> bool:
        """Copy what has changed since and return, once it is there, True; what cannot be copied is said on stderr."""
        if self._round is not None:
            self._round.join()
        return self._try_to_copy()

    def close(self) -> None:
        """Copy what is left, once nobody writes any more, and remove the originals if all of it has come over."""
        if not (self.finish() and self._has_come_over()):
            print(f"what grew stays in {self._scratch}: not all of it was copied", file=sys.stderr, flush=True)
            return
        shutil.rmtree(self._scratch, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._scratch.parent.rmdir()  # of the run, unless other nodes have theirs in it

    def copy(self) -> None:
        """Copy each file that has changed since it was copied last. Raises the OSError of the first that failed."""
        self._scratch.mkdir(parents=True, exist_ok=True)
        failure: OSError | None = None
        with open(self._scratch / _LOCK, "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            copied = self._read_copied()
            for name in sorted(self._names()):
                try:
                    self._copy_file(name, copied)
                except OSError as error:  # the others shall not miss their turn
                    failure = failure or error
            # Written in place: one that is cut short does not parse, and then all is copied once more.
            (self._scratch / _COPIED).write_text(json.dumps(copied), encoding="utf-8")
        if failure is not None:
            raise failure

    def _try_to_copy(self) -> bool:
        try:
            self.copy()
        except OSError as error:  # a busy bucket must not end a training; the next round tries again
            print(f"could not copy files that grow to {self._target}: {error}", file=sys.stderr, flush=True)
            return False
        return True

    def _has_come_over(self) -> bool:
        def size(path: Path) -> int:
            return sum(piece.stat().st_size for piece in parts(path))

        try:
            return all(size(self._target / name) == (self._scratch / name).stat().st_size for name in self._names())
        except OSError:  # a mount that fails now
            return False

    def _read_copied(self) -> Dict[str, List[int]]:
        try:
            copied: Dict[str, List[int]] = json.loads((self._scratch / _COPIED).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        return copied

    def _names(self) -> Iterator[str]:
        for folder, _, files in os.walk(self._scratch):
            for file in files:
                path = Path(folder, file)
                if not file.startswith(".") and not file.endswith(".tmp") and not path.is_symlink():
                    yield path.relative_to(self._scratch).as_posix()

    def _copy_file(self, name: str, copied: Dict[str, List[int]]) -> None:
        source, target = self._scratch / name, self._target / name
        try:
            status = source.stat()
        except FileNotFoundError:
            return  # a draft that has got its name since
        seen = [status.st_size, status.st_mtime_ns]
        if copied.get(name) == seen:
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        before = copied.get(name, [0, 0])[0]
        part_bytes = sys.maxsize if _WHOLE in source.name else self._part_bytes
        with open(source, "rb") as stream:
            for number in range(_first_changed(before, status.st_size, part_bytes), 1 + status.st_size // part_bytes):
                start = number * part_bytes
                length = min(part_bytes, status.st_size - start)
                if length or not number:
                    stream.seek(start)
                    with open(part(target, number), "wb") as new:
                        _copy_bytes(stream, new, length)
        copied[name] = seen


def scratch_of(environ: Mapping[str, str]) -> Path | None:
    """Return where this process keeps files that grow; None: in the run directory."""
    return Path(environ[SCRATCH]) if environ.get(SCRATCH) else None


def _first_changed(before: int, size: int, part_bytes: int) -> int:
    """Return the first part that was not full when `before` bytes were copied; of a file cut short it is the first."""
    return before // part_bytes if size >= before else 0


def _copy_bytes(source: IO[bytes], target: IO[bytes], length: int) -> None:
    while length:
        chunk = source.read(min(length, _CHUNK_BYTES))
        if not chunk:
            return  # cut short meanwhile; the next round sees it
        target.write(chunk)
        length -= len(chunk)
