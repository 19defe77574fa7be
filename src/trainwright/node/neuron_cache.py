"""The compiler's cache of a Neuron device: what it holds, whose locks are stale, whether a run needs to compile at all.

CACHE/neuronxcc-VERSION/MODULE_hash+hash/ holds model.hlo_module.pb (the graph), model.neff and model.done (compiled),
model.log (failed) and, while one compiles, model.hlo_module.pb.lock. Ours is CACHE/trainwright/.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

from . import processes

DEFAULT_CACHE = "/var/tmp/neuron-compile-cache"  # of the compiler itself
URL_VARIABLE = "NEURON_COMPILE_CACHE_URL"

DONE, FAILED, LOCKED, INCOMPLETE = "done", "failed", "locked", "incomplete"

_OWN = "trainwright"
_COMPILER_DIRS = "neuronxcc-*"
_TOOLS = ("neuron_parallel_compile", "neuronx-cc")
YOUNG_S = 5.0  # a lock's maker may not yet have started what is looked for below
BEAT_S = 30.0  # how often a user of a cache says that it lives
SILENT_S = 600.0  # a user on another host that says nothing for so long is dead


@dataclass(frozen=True)
class Module:
    """One graph of a cache."""

    compiler: str  # neuronxcc-VERSION
    name: str  # MODULE_...
    path: Path
    state: str
    size_bytes: int
    changed: float  # seconds since the epoch, by the clock of the file system
    locks: tuple[Path, ...]


@dataclass(frozen=True)
class Clearing:
    """What became of the locks of a cache."""

    cleared: tuple[Path, ...]
    kept: Mapping[Path, str]  # lock -> why it is not stale


def is_remote(cache: str) -> bool:
    """Return whether a cache is a bucket, which this module cannot look into."""
    return "://" in cache


def modules(cache: Path) -> list[Module]:
    """Return all graphs of a cache, sorted; none of a directory that does not exist."""
    return [_module(path) for path in sorted(cache.glob(f"{_COMPILER_DIRS}/MODULE_*")) if path.is_dir()]


def is_done(cache: Path, graph: str) -> bool:
    """Return whether `graph`, as VERSION/MODULE, is compiled."""
    return (cache / graph / "model.done").exists() and (cache / graph / "model.neff").exists()


def clean(cache: Path, *, only_failed: bool) -> list[Path]:
    """Remove the graphs of a cache, or those that failed, and what we remembered of them; return what is gone."""
    gone = [module.path for module in modules(cache) if not only_failed or module.state == FAILED]
    if not only_failed:
        gone = [*sorted(cache.glob(_COMPILER_DIRS)), cache / _OWN]
    gone = [path for path in gone if path.exists()]
    for path in gone:
        shutil.rmtree(path)
    return gone


# ---- who uses a cache


class CacheUse:
    """Tells other nodes, by a file that is touched now and then, that this process uses a cache."""

    def __init__(self, cache: Path, **who: Any) -> None:
        identity = processes.identity()
        self._cache, self._who = cache, {**identity, **who}
        self.marker = cache / _OWN / "in-use" / f"{identity['host']}-{identity['pid']}.json"

    def begin(self) -> None:
        """Say so for the first time."""
        self.marker.parent.mkdir(parents=True, exist_ok=True)
        self.marker.write_text(json.dumps(self._who), encoding="utf-8")

    def beat(self) -> None:
        """Say so again; also where somebody has cleaned the cache in between."""
        try:
            os.utime(self.marker)
        except FileNotFoundError:
            self.begin()

    def end(self) -> None:
        """Take it back."""
        with contextlib.suppress(FileNotFoundError):
            self.marker.unlink()


def users(cache: Path, *, but_of: str | None = None) -> list[dict[str, Any]]:
    """Return who uses a cache now, without those of the run directory `but_of`."""
    folder = cache / _OWN / "in-use"
    found = []
    for marker in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError):  # ended or begins right now
            who = json.loads(marker.read_text(encoding="utf-8"))
            is_here = who["host"] == processes.identity()["host"]
            lives = processes.may_live(who) if is_here else _now(folder) - marker.stat().st_mtime < SILENT_S
            if lives and (but_of is None or who.get("run_dir") != but_of):
                found.append(who)
    return found


# ---- locks


def clear_stale_locks(
    cache: Path, *, own: str | None = None, only: Sequence[str] | None = None, compiles_here: bool = False
) -> Clearing:
    """Remove the locks that no process holds. `only`: of modules whose path holds one of these texts; None: all.

    `own` is our run directory. `compiles_here`: our own compiler runs, so that its presence tells nothing.

    The compiler waits while the file EXISTS, so what a killed one leaves behind, mostly of 0 bytes, blocks for ever.
    Whether somebody is behind it is asked in several ways, each of which sees what the others do not:
    - flock and lockf. Held ones are certain. Free ones are no proof: existence is the lock, and on shared file systems
      flock may be the node's own (Lustre mounted with localflock) or not exist (ENOLCK, ENOSYS).
    - processes of this host that name the module in their arguments, as neuronx-cc does, or have the file open.
    - our markers, for other hosts, which nothing above reaches. Another system's job on another host stays unseen.
    """
    cleared, kept = [], {}
    locks = [lock for module in modules(cache) for lock in module.locks]
    locks = [lock for lock in locks if only is None or any(text in str(lock) for text in only)]
    if locks:
        now, others, running = _now(cache), users(cache, but_of=own), _running()
        for lock in locks:
            why = _held(lock, now, others, running, compiles_here)
            if why is not None:
                kept[lock] = why
                continue
            with contextlib.suppress(FileNotFoundError):
                lock.unlink()
            cleared.append(lock)
    return Clearing(tuple(cleared), kept)


def _held(
    lock: Path, now: float, others: Sequence[Mapping[str, Any]], running: Mapping[int, _Process], compiles_here: bool
) -> str | None:
    """Return who may hold a lock; None: nobody."""
    try:
        age = now - lock.stat().st_mtime
        if _is_locked(lock):
            return "a process has locked it"
    except FileNotFoundError:  # released meanwhile
        return None
    if age < YOUNG_S:
        return f"it is only {max(age, 0):.0f} s old"
    for who in others:
        return f"run {who.get('run_dir')} uses this cache on {who['host']} (process {who['pid']})"
    for pid, process in running.items():
        if lock.parent.name in process.command or os.path.realpath(lock) in process.open_locks:
            return f"process {pid} of this host works on it"
        if not compiles_here and any(Path(word).name in _TOOLS for word in process.command.split("\0")[:3]):
            return f"process {pid} of this host compiles"
    return None


def _is_locked(path: Path) -> bool:
    for lock in (fcntl.flock, fcntl.lockf):
        try:
            with open(path, "rb+") as file:
                lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (
            BlockingIOError,
            PermissionError,
        ):  # EACCES: POSIX allows it for held locks; or it is another user's file
            return True
        except FileNotFoundError:
            raise
        except OSError:
            continue  # this file system has no such locks
    return False


@dataclass(frozen=True)
class _Process:
    command: str  # its arguments, parted by NUL
    open_locks: frozenset[str]


def _running() -> dict[int, _Process]:
    """Return all living processes but this one; of other users' processes not what they have open."""
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it has ended
            command = Path(f"/proc/{name}/cmdline").read_bytes().decode("utf-8", errors="replace")
            if command:  # kernel threads and the dead have none
                found[int(name)] = _Process(command, frozenset(_open_locks(f"/proc/{name}/fd")))
    return found


def _open_locks(folder: str) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                target = os.readlink(f"{folder}/{name}")
                if target.endswith(".lock"):
                    yield target


def _now(folder: Path) -> float:
    """Return the present by the clock of the file system, which is not this host's where it is shared."""
    probe = folder / f".{secrets.token_hex(8)}.tmp"
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink()


# ---- what was compiled before


@dataclass(frozen=True)
class Compiled:
    """What a successful compile stage leaves to later runs: nothing of it may have changed for them to skip theirs."""

    key: str  # of the config: model, degrees, shapes, flags
    key_of: Mapping[str, Any]  # what the key covers
    versions: Mapping[str, str | None]  # of the packages that shape a graph; None: not installed
    graphs: tuple[str, ...]  # VERSION/MODULE


def record(cache: Path, compiled: Compiled, *, node: int, num_nodes: int) -> Path:
    """Remember a success of one node, whole at first sight."""
    path = _record(cache, compiled.key, node)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}-{secrets.token_hex(8)}.tmp")
    content = {"schema_version": 1, "num_nodes": num_nodes, **compiled.__dict__}
    draft.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(draft, path)
    return path


def why_compile(cache: Path, key: str, versions: Mapping[str, str | None], num_nodes: int) -> tuple[str | None, int]:
    """Return why a run must compile, None if it need not, and the number of graphs that it would find."""
    graphs: set[str] = set()
    for node in range(num_nodes):
        path = _record(cache, key, node)
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            known, listed = dict(before["versions"]), list(before["graphs"])
        except FileNotFoundError:
            return f"no run with this cache key ({key[:12]}) has compiled into {cache} yet", 0
        except (ValueError, KeyError, TypeError):
            return f"{path} is no record of ours", 0
        for name in sorted(versions.keys() | known.keys()):
            if versions.get(name) != known.get(name):
                return f"{name} is {versions.get(name)}, the cache was made with {known.get(name)}", 0
        graphs.update(listed)
    missing = sorted(graph for graph in graphs if not is_done(cache, graph))
    if missing:
        return f"{len(missing)} of {len(graphs)} graphs are gone from {cache}, first {missing[0]}", 0
    return None, len(graphs)


def _record(cache: Path, key: str, node: int) -> Path:
    return cache / _OWN / (f"{key}.json" if node == 0 else f"{key}.node{node}.json")


def _module(path: Path) -> Module:
    files = {file.name: file.stat() for file in _files(path)}
    locks = tuple(sorted(path / name for name in files if name.endswith(".lock")))
    if "model.done" in files and "model.neff" in files:
        state = DONE
    elif locks:
        state = LOCKED
    else:
        state = FAILED if "model.log" in files else INCOMPLETE
    return Module(
        compiler=path.parent.name,
        name=path.name,
        path=path,
        state=state,
        size_bytes=sum(status.st_size for status in files.values()),
        changed=max([status.st_mtime for status in files.values()], default=path.stat().st_mtime),
        locks=locks,
    )


def _files(path: Path) -> Iterator[Path]:
    return (file for file in path.iterdir() if file.is_file())
