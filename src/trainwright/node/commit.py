"""The commit protocol: a directory counts if its commit file, written last, parses and each listed file has its size.

Directories are never renamed: mounted buckets (Cloud Storage FUSE) have no atomic rename. A directory without a commit
is one whose writer was killed; readers ignore it and `sweep` removes it. A file that was committed and later cut short
is damage, which is told and kept.

A single file can be committed too; its commit lies beside it, as NAME.commit.json.

Checksums are CRC-32: they are to find broken transfers and disks, not forgery, and cost less than reading the file
does.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
import zlib
from pathlib import Path
from typing import Any

COMMIT_FILE = "commit.json"
SCHEMA_VERSION = 1
_CHUNK_BYTES = 1 << 22


def write_commit(directory: Path, metadata: dict[str, Any], *, known_crc32s: dict[str, int] | None = None) -> None:
    """Declare `directory`, or a single file, complete: list size and checksum of what it has, flush, write the commit.

    `metadata` comes back from `read_commit`; NaN and infinities survive (Python's JSON spells them NaN and Infinity).
    `known_crc32s` holds checksums by path below `directory` of files that need not be read again.
    Raises FileExistsError when the directory is already committed: what is committed never changes.
    """
    files = {}
    root = _root(directory)
    for path in [directory] if directory.is_file() else _files_below(directory):
        name = path.relative_to(root).as_posix()
        size, crc32 = _measure_and_flush(path, (known_crc32s or {}).get(name))
        files[name] = {"size": size, "crc32": crc32}
    for folder, _, _ in os.walk(directory):  # none where it is a file
        _flush_directory(Path(folder))
    record = {"schema_version": SCHEMA_VERSION, "metadata": metadata, "files": files}
    # No temporary name is needed: a JSON object cut short does not parse, so a torn commit file counts as none.
    with open(commit_file(directory), "x", encoding="utf-8") as stream:
        json.dump(record, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    _flush_directory(root)


def commit_file(directory: Path) -> Path:
    """Return where the commit of a directory, or of a single file, is or will be."""
    return directory.with_name(f"{directory.name}.{COMMIT_FILE}") if directory.is_file() else directory / COMMIT_FILE


def read_commit(directory: Path) -> dict[str, Any] | None:
    """Return the metadata of a complete directory, None for any other; `why_incomplete` says why."""
    record = _load(directory)
    if record is None or _first_misfit(directory, record) is not None:
        return None
    metadata: dict[str, Any] = record["metadata"]
    return metadata


def was_committed(directory: Path) -> bool:
    """Return whether `directory` was complete once, whatever has become of its files."""
    return _load(directory) is not None


def why_incomplete(directory: Path) -> str | None:
    """Return what keeps `directory` from being complete, in words; None for a complete one."""
    record = _load(directory)
    if record is not None:
        return _first_misfit(directory, record)
    if commit_file(directory).exists():
        return f"{COMMIT_FILE} does not parse: its writer was stopped, or it was damaged"
    return f"it has no {COMMIT_FILE}: its writer was stopped before the end"


def verify(directory: Path) -> list[str]:
    """Return what is wrong with `directory`, every listed file read and its checksum compared; empty means intact."""
    reason = why_incomplete(directory)
    if reason is not None:
        return [reason]
    record = _load(directory)
    assert record is not None
    return [
        f"{name} has checksum {found:08x}, {listed['crc32']:08x} was committed"
        for name, listed in record["files"].items()
        for found in [_checksum(_root(directory) / name)]
        if found != listed["crc32"]
    ]


def sweep(parent: Path, unchanged_for_s: float = 0.0) -> list[Path]:
    """Remove the directories in `parent` that were never committed, and return them.

    Where other writers may be at work, `unchanged_for_s` spares a directory in which any file changed since.
    """
    newest_to_remove = time.time() - unchanged_for_s
    swept = []
    for directory in sorted(path for path in parent.iterdir() if path.is_dir() and not path.is_symlink()):
        with contextlib.suppress(FileNotFoundError):  # its writer, or another sweeper, is removing it right now
            if _load(directory) is None and _last_change(directory) <= newest_to_remove:
                shutil.rmtree(directory)
                swept.append(directory)
    return swept


def _load(directory: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(commit_file(directory).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: neither UTF-8 nor JSON
        return None
    is_commit = isinstance(record, dict) and {"schema_version", "metadata", "files"} <= record.keys()
    return record if is_commit and record["schema_version"] == SCHEMA_VERSION else None


def _first_misfit(directory: Path, record: dict[str, Any]) -> str | None:
    for name, listed in record["files"].items():
        try:
            size = (_root(directory) / name).stat().st_size
        except FileNotFoundError:
            return f"{name} is missing"
        if size != listed["size"]:
            return f"{name} has {size} bytes, {listed['size']} were committed"
    return None


def _root(directory: Path) -> Path:
    return directory.parent if directory.is_file() else directory


def _files_below(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def _measure_and_flush(path: Path, known_crc32: int | None) -> tuple[int, int]:
    crc32 = _checksum(path) if known_crc32 is None else known_crc32
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
        return os.fstat(stream.fileno()).st_size, crc32


def _checksum(path: Path) -> int:
    crc32 = 0
    with open(path, "rb") as stream:
        for chunk in iter(lambda: stream.read(_CHUNK_BYTES), b""):
            crc32 = zlib.crc32(chunk, crc32)
    return crc32


def _flush_directory(directory: Path) -> None:
    descriptor = os.open(str(directory), os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Network and bucket mounts may refuse to flush a directory; they keep no entry of it that could be lost.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


def _last_change(directory: Path) -> float:
    return max(path.stat().st_mtime for path in [directory, *directory.rglob("*")])
