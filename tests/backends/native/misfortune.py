"""Ranks that meet a misfortune: a limit that the system puts on them before they train."""

import ctypes
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.backends.native.ranks import run_training

_CAPABILITY_VERSION_3 = 0x20080522
_CAP_DAC_OVERRIDE = 1 << 1  # the right to write where the permissions forbid it


def with_small_files(run_dir: Path, attempt: int, *, largest_bytes: int) -> int:
    """Train, while no file may grow beyond `largest_bytes`: a write then fails as it does on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_bytes, largest_bytes))
    return run_training(run_dir, attempt)


def without_override(run_dir: Path, attempt: int) -> int:
    """Train bound by the permissions of directories, as root too."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, their lower halves first
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capget(header, sets):
        raise OSError(ctypes.get_errno(), "capget")
    sets[0] &= ~_CAP_DAC_OVERRIDE
    if libc.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset")
    return run_training(run_dir, attempt)


@contextmanager
def small_disk(directory: Path, size: str) -> Iterator[bool]:
    """Have a disk of `size` mounted at `directory`; give False where this process may not mount one."""
    directory.mkdir()
    mount = shutil.which("mount")
    command = [mount or "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
    if os.geteuid() or mount is None or subprocess.run(command, capture_output=True).returncode:
        yield False
        return
    try:
        yield True
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def enlarge(directory: Path, size: str) -> None:
    """Give the disk mounted at `directory` another size."""
    subprocess.run(["mount", "-o", f"remount,size={size}", str(directory)], check=True)
