"""One fetch of a thing at a time, on all machines that see its disk; whoever waits goes on with what is there then.

A lock is a file made exclusively, since not every shared file system keeps locks of the kernel. Its owner refreshes
it; one that is not refreshed any longer, or whose owner has ended on this machine, is taken over.
"""

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainwright.node import processes

Say = Callable[[str], None]  # told to the user, one line each
_STALE_AFTER_S = 120.0
_REFRESH_S = 15.0
_LOOK_AGAIN_S = 1.0


@contextlib.contextmanager
def held(path: Path, *, say: Say, stale_after_s: float = _STALE_AFTER_S) -> Iterator[None]:
    """Hold the lock file `path`, after waiting for whoever holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _acquire(path, say, stale_after_s)
    ended = threading.Event()
    refresher = threading.Thread(target=_keep_fresh, args=(path, ended), daemon=True)
    refresher.start()
    try:
        yield
    finally:
        ended.set()
        refresher.join()
        path.unlink(missing_ok=True)


def _acquire(path: Path, say: Say, stale_after_s: float) -> None:
    seen: tuple[float, dict[str, Any] | None] | None = None
    seen_at = time.monotonic()
    while not _make(path):
        owner, refreshed = _read(path)
        if (refreshed, owner) != seen:
            if seen is None and owner is not None:
                say(f"process {owner['pid']} on {owner['host']} is fetching this already; waiting for it")
            seen, seen_at = (refreshed, owner), time.monotonic()
        # By our own clock: the clocks of machines and of the file server differ.
        is_stale = time.monotonic() - seen_at > stale_after_s
        if is_stale or (owner is not None and not processes.may_live(owner)):
            _remove(path, owner)
        else:
            time.sleep(_LOOK_AGAIN_S)  # no system call waits for a file on another machine's disk


def _make(path: Path) -> bool:
    """Make the lock, whole from its first moment; return whether it was free."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    draft.write_text(json.dumps(processes.identity()), encoding="utf-8")
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    return True


def _read(path: Path) -> tuple[dict[str, Any] | None, float]:
    """Return the owner of a lock and when it was refreshed; (None, 0) where it is gone."""
    try:
        owner: dict[str, Any] = json.loads(path.read_bytes())
        return owner, path.stat().st_mtime
    except FileNotFoundError:
        return None, 0.0


def _remove(path: Path, dead: dict[str, Any] | None) -> None:
    """Remove the lock of a dead owner, by a rename: only one of those who wait can succeed."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, aside)
        owner, _ = _read(aside)
        if owner != dead:  # another was quicker, and this is its lock
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()


def _keep_fresh(path: Path, ended: threading.Event) -> None:
    while not ended.wait(_REFRESH_S):
        with contextlib.suppress(FileNotFoundError):  # in the moment of another's mistaken `_remove`
            os.utime(path)
