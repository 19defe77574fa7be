"""Keep hold of all descendants of a process, through forks, new sessions and dead parents (Linux)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
from typing import Any, Mapping

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None)  # loaded here: a child between fork and exec must not import


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int, how: int = signal.SIGKILL) -> None:
    """Let the kernel send `how` to this process when `parent` ends; also right when it has ended already."""
    _libc.prctl(_PR_SET_PDEATHSIG, how, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), how)


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended but is not yet reaped does not."""
    return _parent_if_alive(pid) is not None


def identity() -> dict[str, Any]:
    """Return what tells this process from all others, later ones with the same id included."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid())}


def may_live(process: Mapping[str, Any]) -> bool:
    """Return whether the process of that identity runs; of one on another host nobody here can tell."""
    is_here = process["host"] == socket.gethostname()
    return not is_here or _started(process["pid"]) == process["started"]


def descendants() -> list[int]:
    """Return the ids of all living processes below this one."""
    parents = {int(name): _parent_if_alive(int(name)) for name in os.listdir("/proc") if name.isdigit()}
    children: dict[int | None, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found = [os.getpid()]
    for pid in found:  # grows while we walk it
        found.extend(children.get(pid, ()))
    return found[1:]


def kill(pids: list[int]) -> None:
    """Send SIGKILL to each process that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def reap() -> dict[int, int]:
    """Collect ended children, adopted ones too, and return their exit codes; -n for the signal n."""
    codes: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return codes
        if pid == 0:
            return codes
        codes[pid] = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _parent_if_alive(pid: int) -> int | None:
    status = _status_if_alive(pid)
    return None if status is None else int(status[1])


def _started(pid: int) -> int | None:
    """Return when a living process started, in clock ticks since the machine did (proc(5), field 22 of stat)."""
    status = _status_if_alive(pid)
    return None if status is None else int(status[19])


def _status_if_alive(pid: int) -> list[bytes] | None:
    """Return the fields of /proc/PID/stat from the third on, which is the state."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            status = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if status[0] in (b"Z", b"X") else status
