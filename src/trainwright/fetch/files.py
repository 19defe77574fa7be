"""Single files from s3://, gs://, https:// or a path, to where training reads them.

A file arrives under a name of its own, gets its real name when it is whole, and is committed beside itself.
"""

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fsspec.callbacks import Callback

from trainwright import storage
from trainwright.checkpoint.convert import ReportBytes
from trainwright.checkpoint.progress import shown
from trainwright.errors import UserError
from trainwright.fetch.lock import Say, held
from trainwright.fetch.retry import WAITS_S, DamagedError, joined, reason_of, retrying
from trainwright.node import commit

_AT_ONCE = 4  # files
_PART = ".part"
# How to open each kind of storage, public access first: a signed request with the wrong keys fails where none would.
_ACCESS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "s3": ({"anon": True}, {"anon": False}),
    "gs": ({"token": "anon"}, {"token": "google_default"}),
}
_CREDENTIALS = {
    "s3": "it is not public: give the node an instance role that may read it, or set AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY and launcher.env_from=[AWS_ACCESS_KEY_ID,AWS_SECRET_ACCESS_KEY]",
    "gs": "it is not public: give the node a service account that may read it, or set GOOGLE_APPLICATION_CREDENTIALS "
    "and launcher.env_from=[GOOGLE_APPLICATION_CREDENTIALS]",
}


@dataclass(frozen=True, kw_only=True)
class FileRequest:
    """One file to fetch; the keys are the config's, for messages."""

    source: str
    target: Path
    source_key: str
    target_key: str


@dataclass(frozen=True, kw_only=True)
class _Remote:
    system: Any  # fsspec's file system
    path: str  # there
    num_bytes: int | None  # None: the server does not tell
    etag: str | None


def fetch_files(requests: Sequence[FileRequest], *, say: Say, waits_s: Sequence[float] = WAITS_S) -> None:
    """Fetch several files at a time, those left out that are there. Raises UserError with what all of them lack."""
    with shown("data") as report, ThreadPoolExecutor(_AT_ONCE) as pool:
        sums = _Sums(report)
        started = [pool.submit(_fetch, request, sums, say, waits_s) for request in requests]
        errors = [error for each in started if (error := each.exception()) is not None]
    mistakes = [error for error in errors if isinstance(error, UserError)]
    if len(mistakes) < len(errors):
        raise next(error for error in errors if not isinstance(error, UserError))
    if mistakes:
        raise joined(mistakes)


@contextlib.contextmanager
def writing(target: Path, key: str) -> Iterator[None]:
    """Turn errors of the disk that holds `target` into the user's, who named it by `key`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(f"{key}: {target} cannot be written: {error}") from error


def _fetch(request: FileRequest, sums: "_Sums", say: Say, waits_s: Sequence[float]) -> None:
    if _is_there(request, say):
        return
    target, key = request.target, request.target_key
    with writing(target, key), held(target.with_name(target.name + ".lock"), say=say):
        if _is_there(request, say):  # another has just fetched it
            return
        remote = _open(request, say, waits_s)
        commit.commit_file(target).unlink(missing_ok=True)  # of a writer that was killed: it does not parse
        metadata = {"kind": "file", "source": request.source, "etag": remote.etag}
        if target.exists():
            _check_size(request, remote)
            say(f"{key}: {target} was there already and has the size of {request.source}; it is used")
            commit.write_commit(target, {**metadata, "was_there": True})
            return
        check_space(target.parent, remote.num_bytes or 0, key)
        part = target.with_name(target.name + _PART)
        retrying(lambda: _transfer(remote, part, sums), request.source, say=say, waits_s=waits_s)
        os.replace(part, target)
        commit.write_commit(target, {**metadata, "was_there": False})
        say(f"{key}: {target} fetched from {request.source}, {target.stat().st_size} bytes")


def _is_there(request: FileRequest, say: Say) -> bool:
    """Return whether the file is complete. Raises UserError where it is another's or was damaged later."""
    target = request.target
    metadata = commit.read_commit(target)
    if metadata is None:
        if commit.was_committed(target):
            raise UserError(
                f"{request.target_key}: {target} is damaged: {commit.why_incomplete(target)}; remove it to have it "
                "fetched again"
            )
        return False
    if metadata.get("source") != request.source:
        raise UserError(
            f"{request.target_key}: {target} was fetched from {metadata.get('source')}, but {request.source_key} is "
            f"{request.source}; choose another path, or remove it"
        )
    say(f"{request.target_key}: {target} is there, from {request.source}")
    return True


def _open(request: FileRequest, say: Say, waits_s: Sequence[float]) -> _Remote:
    protocol = request.source.split("://")[0] if "://" in request.source else "file"
    protocol = {"http": "https", "gcs": "gs"}.get(protocol, protocol)
    refusal = ""
    for options in _ACCESS.get(protocol, ({},)):
        try:
            return retrying(partial(_look, protocol, request.source, options), request.source, say=say, waits_s=waits_s)
        except UserError as error:
            raise type(error)(f"{request.source_key}: {error}") from error
        except FileNotFoundError as error:
            raise UserError(f"{request.source_key}: {request.source} does not exist") from error
        except ImportError as error:
            raise UserError(f"{request.source_key}: {error}; pip install 'trainwright[nxdt]'") from error
        except ValueError as error:
            raise UserError(f"{request.source_key}: {request.source}: {error}") from error
        except Exception as error:  # each storage has classes of its own for a refusal; the next access may do
            refusal = reason_of(error)
    raise UserError(f"{request.source_key}: {request.source}: {refusal}; {_CREDENTIALS.get(protocol, 'is it public?')}")


def _look(protocol: str, source: str, options: Mapping[str, Any]) -> _Remote:
    system = storage.file_system_class(protocol)(skip_instance_cache=True, **options)
    path = system._strip_protocol(source)
    info = system.info(path)
    if info.get("type") == "directory":
        raise ValueError("it is a directory; name one file")
    etag = info.get("ETag") or info.get("etag")
    return _Remote(system=system, path=path, num_bytes=info.get("size"), etag=etag and str(etag).strip('"'))


def _transfer(remote: _Remote, part: Path, sums: "_Sums") -> None:
    """Copy the whole file anew: one that was begun by another process may be of another version."""
    part.unlink(missing_ok=True)
    remote.system.get_file(remote.path, str(part), callback=_Counter(sums, remote))
    if remote.num_bytes is not None and part.stat().st_size != remote.num_bytes:
        raise DamagedError(f"{part.stat().st_size} of {remote.num_bytes} bytes arrived")


def _check_size(request: FileRequest, remote: _Remote) -> None:
    found = request.target.stat().st_size
    if remote.num_bytes not in (None, found):
        raise UserError(
            f"{request.target_key}: {request.target} was there already, with {found} bytes, but {request.source} has "
            f"{remote.num_bytes}; remove it to have it fetched, or set {request.source_key}=null to use it"
        )


def check_space(directory: Path, needed_bytes: int, key: str) -> None:
    """Raise UserError unless the disk of `directory` has room. `key` is what named the directory."""
    existing = next(path for path in [directory, *directory.parents] if path.is_dir())
    free = shutil.disk_usage(existing).free
    if needed_bytes > free:
        raise UserError(
            f"{key}: {needed_bytes} bytes are to be fetched into {directory}, {free} are free on its disk; free some "
            "or choose another"
        )


class _Sums:
    """The progress of all files together."""

    def __init__(self, report: ReportBytes) -> None:
        self._lock = threading.Lock()
        self._report = report
        self._of: dict[str, tuple[int, int]] = {}

    def set(self, path: str, done: int, total: int) -> None:
        with self._lock:
            self._of[path] = (done, total)
            all_done, all_total = (sum(column) for column in zip(*self._of.values(), strict=True))
            if all_total > 0:
                self._report(all_done, all_total)


class _Counter(Callback):  # type: ignore[misc]  # fsspec has no types
    def __init__(self, sums: _Sums, remote: _Remote) -> None:
        super().__init__()
        self._sums, self._remote = sums, remote

    def call(self, *_: Any, **__: Any) -> None:
        self._sums.set(self._remote.path, self.value, max(self.value, self._remote.num_bytes or 0))
