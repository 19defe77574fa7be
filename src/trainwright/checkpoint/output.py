"""The directory that a conversion fills: new or its own, written by one process, complete when its commit is there.

`conversion.json`, the first file of a conversion, marks a directory as one whose content may be removed: what a killed
conversion left is removed by the next, never continued, so that no output is a mixture of two.
"""

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from trainwright.errors import UserError
from trainwright.node.commit import COMMIT_FILE, read_commit, was_committed, why_incomplete

MARKER = "conversion.json"
Standing = Literal["free", "unfinished", "complete"]


def standing(directory: Path) -> tuple[Standing, list[str]]:
    """Return how `directory` stands as an output, and why it cannot be one."""
    if read_commit(directory) is not None:
        return "complete", []
    if was_committed(directory):
        return "free", [f"--output {directory}: damaged: {why_incomplete(directory)}; remove it, or name another"]
    if (directory / MARKER).exists():
        return "unfinished", []
    if directory.exists() and not directory.is_dir():
        return "free", [f"--output {directory}: is a file; name a new directory"]
    if directory.is_dir() and any(directory.iterdir()):
        return "free", [f"--output {directory}: holds files that no conversion made; name a new directory"]
    return "free", []


def unfinished_problems(directory: Path) -> list[str]:
    """Return why `directory` cannot be read, if it is an output that is not, or no longer, complete."""
    if not ((directory / MARKER).exists() or (directory / COMMIT_FILE).exists()):
        return []  # not one of ours
    reason = why_incomplete(directory)
    return [f"it is not complete: {reason}; convert it again"] if reason is not None else []


def space_problems(directory: Path, needed_bytes: int) -> list[str]:
    """Return whether the disk has room, what an unfinished conversion will give back counted in."""
    existing = next(path for path in [directory, *directory.parents] if path.is_dir())
    free = shutil.disk_usage(existing).free
    if (directory / MARKER).exists():
        free += sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    if needed_bytes <= free:
        return []
    return [
        f"--output {directory}: {needed_bytes} bytes are needed, {free} are free on its disk; free some or name another"
    ]


@contextlib.contextmanager
def claimed(directory: Path, request: Mapping[str, Any]) -> Iterator[None]:
    """Own `directory` alone, empty but for the marker that holds `request`; leave nothing of it after an exception.

    Raises UserError when another conversion is writing there, and when the disk is full or cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / MARKER) as descriptor:
            _empty(directory, keep=MARKER)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(request, indent=1).encode(), 0)
            try:
                yield
            except BaseException:
                _empty(directory)
                raise
    except OSError as error:
        raise UserError(f"--output {directory}: cannot be written: {error}") from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Open `path` with a lock that ends with this process, however it ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Some shared file systems know no locks (Lustre mounted without -o flock): one writer is then up to users.
            if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                raise UserError(f"--output {path.parent}: another conversion is writing there; wait for it") from error
        if was_committed(path.parent):
            raise UserError(f"--output {path.parent}: another conversion has just finished there; start again")
        yield descriptor
    finally:
        os.close(descriptor)


def _empty(directory: Path, keep: str | None = None) -> None:
    for path in directory.iterdir():
        if path.name == keep:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
