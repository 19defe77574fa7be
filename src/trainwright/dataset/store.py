"""Where derived data is kept: ENTRY/UNIQUE/ directories, of which a committed one is the entry's content.

Each builder works in a directory of its own and publishes it by its commit file, so any number of processes may build
the same entry at once, and one that dies leaves nothing that counts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.errors import UserError
from trainwright.node.commit import read_commit, sweep, write_commit

# A live builder writes all the time; what is this old was left by a killed one. Clocks of other hosts may be off by
# hours.
_ABANDONED_AFTER_S = 24 * 3600.0


def find_or_build(entry: Path, build: Callable[[Path], Mapping[str, Any]], *, key: str) -> Path:
    """Return the committed directory of `entry`; where there is none, let `build` fill one, and commit it.

    `build` returns the metadata of the commit. Raises UserError naming `key`, the configuration key of the place, when
    it cannot be written; nothing half-made stays.
    """
    found = find_built(entry)
    if found is not None:
        return found
    directory = entry / uuid.uuid4().hex
    try:
        directory.mkdir(parents=True)
        sweep(entry, unchanged_for_s=_ABANDONED_AFTER_S)
        metadata = dict(build(directory))
        found = find_built(entry)
        if found is None:
            write_commit(directory, metadata)
            return directory
    except OSError as error:
        _remove(directory)
        raise UserError(_cannot_write(entry, error, key)) from error
    except BaseException:
        _remove(directory)
        raise
    _remove(directory)  # another process was faster; what it committed is the same
    return found


def find_built(entry: Path) -> Path | None:
    """Return the committed directory of `entry`, None where there is none."""
    if not entry.is_dir():
        return None
    return next((path for path in sorted(entry.iterdir()) if read_commit(path) is not None), None)


def save_array(path: Path, values: npt.NDArray[Any]) -> None:
    """Write a .npy file. Unlike numpy.save, which loses it, a failed write raises the system's error (a full disk)."""
    with open(path, "wb") as stream:
        np.lib.format.write_array_header_1_0(stream, np.lib.format.header_data_from_array_1_0(values))
        stream.write(np.ascontiguousarray(values).data)


def _remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):  # the entry holds another builder's directory, or was never made
        directory.parent.rmdir()


def _cannot_write(entry: Path, error: OSError, key: str) -> str:
    message = f"{key}: cannot write {entry}: {error.strerror or error}"
    existing = next((path for path in [entry, *entry.parents] if path.is_dir()), None)
    if existing is not None and os.access(existing, os.W_OK):
        message += f"; {shutil.disk_usage(existing).free / 2**20:.0f} MiB are free there"
    return f"{message}. Free some space, or set {key} to a directory that can be written and has room."
