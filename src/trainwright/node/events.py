"""The history of a run: one immutable file per event, written once and never changed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, Callable, Collection, Iterable, Iterator, Mapping

from .run_paths import RunPaths

PLANNED = "PLANNED"
SUBMITTED = "SUBMITTED"
QUEUED = "QUEUED"
RUNNING = "RUNNING"
REQUEUED = "REQUEUED"
SUCCEEDED = "SUCCEEDED"
FAILED = "FAILED"
TIMEOUT = "TIMEOUT"
PREEMPTED = "PREEMPTED"
CANCELLED = "CANCELLED"
NOT_SUBMITTED = "NOT_SUBMITTED"
UNKNOWN = "UNKNOWN"

ENDED = frozenset({SUCCEEDED, FAILED, TIMEOUT, PREEMPTED, CANCELLED, NOT_SUBMITTED})
STATES = ENDED | {PLANNED, SUBMITTED, QUEUED, RUNNING, REQUEUED, UNKNOWN}

SUBMIT = "submit"  # who: the side that plans, submits and asks the scheduler
SCHEMA_VERSION = 1

_NAME = re.compile(r"^(\d{4,})-(.+)-([A-Z_]+)\.json$")
_NODE = re.compile(r"^a\d+-node(\d+)$")
_NO_HARD_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL}


@dataclass(frozen=True)
class Event:
    """One thing that happened to a run."""

    number: int  # order of writing; events of different writers may share one
    state: str
    time: str  # UTC, ISO 8601
    who: str
    stage: str | None  # None: the run, that is all its stages
    attempt: int
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def node(self) -> int | None:
        """The node that speaks; None when it is the submit side."""
        match = _NODE.match(self.who)
        return int(match.group(1)) if match else None


@dataclass(frozen=True)
class History:
    """All events of a run in order, and the names of files that hold none."""

    events: tuple[Event, ...]
    unreadable: tuple[str, ...]


def node_who(attempt: int, node: int) -> str:
    """Return how a node signs its events."""
    return f"a{attempt}-node{node}"


def timestamp() -> str:
    """Return the present as events write it: UTC with microseconds."""
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def append(paths: RunPaths, state: str, *, who: str, stage: str | None, attempt: int, **extra: Any) -> Path:
    """Write one event, complete from the moment it can be seen, and return its file."""
    assert state in STATES, state
    event = {"schema_version": SCHEMA_VERSION, "state": state, "time": timestamp(), "who": who}
    content = json.dumps({**event, "stage": stage, "attempt": attempt, **extra}, indent=1) + "\n"
    if not _is_object(paths.events):
        paths.events.mkdir(parents=True, exist_ok=True)
    while True:
        target = paths.events / f"{_highest(paths.events) + 1:04d}-{who}-{state}.json"
        try:
            publish(target, content, has_links=paths.scratch is None)
        except FileExistsError:
            continue  # another writer of this name came first: take the next number
        return target


def publish(target: Path, content: str, *, has_links: bool = True) -> None:
    """Write a new file that is whole from the moment it can be seen. Raises FileExistsError when it is there already.

    Where hard links do not exist (bucket mounts), a file appears when it is closed. A path of fsspec's is one object.
    """
    if _is_object(target):
        _create_object(target, content.encode("utf-8"))
        return
    if not has_links:
        _write_new(target, content)
        return
    draft = target.with_name(f".{target.name}-{secrets.token_hex(8)}.tmp")
    try:
        _write_new(draft, content)
        try:
            os.link(draft, target)
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            _write_new(target, content)
    finally:
        draft.unlink(missing_ok=True)


def read_events(paths: RunPaths) -> History:
    """Read all events in order. A file that is no whole event is named in the result, never an error."""
    return history(_contents(paths.events, _listing(paths.events)))


def history(contents: Iterable[tuple[str, Callable[[], bytes]]]) -> History:
    """Return the events of a run from the names of files and what reads each; files of other names are passed over."""
    events, unreadable = [], []
    for name, read in contents:
        if not _NAME.match(name):
            continue
        try:
            events.append(_parse(name, read()))
        except (OSError, ValueError, KeyError, TypeError):
            unreadable.append(name)
    return History(tuple(sorted(events, key=order)), tuple(sorted(unreadable)))


def find(paths: RunPaths, who: Collection[str], states: Collection[str]) -> list[Event]:
    """Return the events of these writers in these states, in order, without opening any other file."""
    wanted = tuple(f"-{writer}-{state}.json" for writer in who for state in states)
    found = []
    for name, read in _contents(paths.events, [name for name in _listing(paths.events) if name.endswith(wanted)]):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # as in read_events
            found.append(_parse(name, read()))
    return sorted(found, key=order)


def is_cancelled(paths: RunPaths, stage: str, attempt: int) -> bool:
    """Return whether the user has cancelled an attempt at a stage."""
    words = find(paths, [SUBMIT], [CANCELLED])
    return any(word.stage in (stage, None) and word.attempt == attempt for word in words)


def order(event: Event) -> tuple[int, str, str, str]:
    """Sort key of events: numbers first, then the clock, which may differ between nodes."""
    return event.number, event.time, event.who, event.state


def _write_new(path: Path, content: str) -> None:
    try:
        with open(path, "x", encoding="utf-8") as file:
            try:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            except OSError as error:
                if error.errno != errno.ESTALE:
                    path.unlink()  # a full disk must not leave half an event
                raise
    except OSError as error:
        if error.errno == errno.ESTALE:  # on a bucket mount: another mount's file of this name was there first
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from error
        raise


def _listing(folder: Path) -> list[str]:
    if _is_object(folder):
        return [name for name in _objects(folder) if _NAME.match(name)]
    return [name for name in os.listdir(folder) if _NAME.match(name)] if folder.is_dir() else []


def _contents(folder: Path, names: Collection[str]) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield each file's name and what reads it, or raises."""
    if not _is_object(folder):
        yield from ((name, (folder / name).read_bytes) for name in names)
    elif names:
        paths = {name: (folder / name).path for name in names}  # type: ignore[attr-defined]
        fetched = folder.fs.cat(list(paths.values()), on_error="return")  # type: ignore[attr-defined]  # all at once
        yield from ((name, partial(_fetched, fetched, path)) for name, path in paths.items())


# ---- where fsspec is the way to a bucket: on the submitting side only, and without importing it here


def _is_object(path: Path) -> bool:
    return not isinstance(path, os.PathLike)


def _objects(folder: Any) -> list[str]:
    """Return the names of all objects in a folder; none where it is missing."""
    try:
        return [path.rpartition("/")[2] for path in folder.fs.ls(folder.path, detail=False, refresh=True)]
    except FileNotFoundError:
        return []


def _create_object(target: Any, content: bytes) -> None:
    try:
        target.fs.pipe_file(target.path, content, mode="create")
    except FileExistsError:
        # A request whose answer was lost is sent again, and then meets what it has written itself.
        if target.fs.cat_file(target.path) != content:
            raise


def _fetched(fetched: Mapping[str, Any], path: str) -> bytes:
    content = fetched.get(path, FileNotFoundError(path))
    if isinstance(content, Exception):
        raise content
    return bytes(content)


def _highest(folder: Path) -> int:
    return max((int(name.split("-")[0]) for name in _listing(folder)), default=0)


def _parse(name: str, content: bytes) -> Event:
    data = json.loads(content.decode("utf-8"))
    if data.pop("schema_version") != SCHEMA_VERSION or data["state"] not in STATES:
        raise ValueError(f"{name} was written by another version")
    known = {key: data.pop(key) for key in ("state", "time", "who", "stage", "attempt")}
    return Event(number=int(name.split("-")[0]), extra=data, **known)
