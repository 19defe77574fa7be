"""Where the files of runs are as this machine reaches them: folders, or buckets that only nodes have mounted.

Runs on Vertex AI lie in a bucket. Nodes see it below `launcher.bucket_mount`, this machine speaks to it through fsspec,
by paths of universal_pathlib. These have pathlib's methods and are typed as such here, but the operating system does
not know them: `open(path)` and `os` fail, and what makes, reads or removes many things at once has its own functions.

On a bucket nothing is appended, renamed or locked; an object is written once, whole, by one writer.
"""

import asyncio
import importlib.util
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from trainwright.config import RunConfig
from trainwright.errors import UserError

_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_INSTALL = "pip install 'trainwright[{}]'"
_EXTRAS = {"s3": "nxdt,vertex"}  # of ours, which bring what reaches such URLs; for all others vertex does
_CLOUD_STORAGE = ("gs://", "gcs://")
# gcsfs by itself waits for ever. It tries six times, and a large object may take as long as it does not come to a halt.
_CONNECT_S, _SILENCE_S = 10.0, 30.0
_THREADS = 32  # requests on their way at once: each takes some 50 ms, and hardly any work here
_Item = TypeVar("_Item")
_Made = TypeVar("_Made")


def seen_from_here(config: RunConfig, path: str) -> Path:
    """Return how this machine reaches a path as the nodes of a run see it. Raises UserError as `at` does."""
    launcher = config.launcher
    return mapped(path, launcher.bucket_mount, launcher.bucket_url) if launcher.kind == "vertex" else Path(path)


def mapped(path: str, mount: str, url: str) -> Path:
    """Return where `path` is if what is mounted as `mount` is `url` from here; what lies elsewhere is the same here."""
    root = mount.rstrip("/")
    if path != root and not path.startswith(f"{root}/"):
        return Path(path)
    return at(f"{url if url.endswith('/') else url + '/'}{path[len(root) + 1 :]}")


def file_system_class(protocol: str) -> type[Any]:
    """Return fsspec's class for a protocol. Raises ImportError where its package is missing, ValueError if it has none.

    For Cloud Storage it is gcsfs's plain class, whoever has imported gcsfs before: the other one asks a second service
    about each bucket first, and without an answer waits half a minute each time.
    """
    import fsspec

    if protocol in ("gs", "gcs"):
        from gcsfs.core import GCSFileSystem

        fsspec.register_implementation(protocol, GCSFileSystem, clobber=True)
    return cast(type[Any], fsspec.get_filesystem_class(protocol))


def at(text: str) -> Path:
    """Return the place that a path or a URL names.

    Raises UserError when the packages that reach such URLs are not installed.
    """
    if _URL.match(text) is None:
        return Path(os.path.abspath(text))
    protocol = text.partition("://")[0]
    install = _INSTALL.format(_EXTRAS.get(protocol, "vertex"))
    if importlib.util.find_spec("upath") is None:
        raise UserError(f"{text}: universal_pathlib is not installed; {install}")
    from upath import UPath

    try:
        file_system_class(protocol)
    except ImportError as error:
        raise UserError(f"{text}: {error}; {install}") from error
    except ValueError as error:
        raise UserError(f"{text}: {error}; buckets begin with gs://") from error
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it prints a traceback of what it raises, too
    # What other machines write must be seen at once: nothing that was listed before is believed.
    options: dict[str, Any] = {"use_listings_cache": False}
    if text.startswith(_CLOUD_STORAGE):
        from aiohttp import ClientTimeout

        options["requests_timeout"] = ClientTimeout(sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
    return cast(Path, UPath(text, **options))


def is_bucket(path: Path) -> bool:
    """Return whether a place is reached through fsspec, not through the operating system."""
    return not isinstance(path, os.PathLike)


def subfolders(folder: Path) -> list[Path]:
    """Return the folders in a folder by name; none where it is missing."""
    try:
        if is_bucket(folder):
            entries = _fs(folder).ls(_key(folder), detail=True, refresh=True)
            names = [entry["name"].rstrip("/").rpartition("/")[2] for entry in entries if entry["type"] == "directory"]
        else:
            with os.scandir(folder) as scanned:
                names = [entry.name for entry in scanned if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [folder / name for name in sorted(names)]


def names(folder: Path) -> frozenset[str]:
    """Return the names of all that is in a folder; none where it is missing."""
    try:
        if is_bucket(folder):
            return frozenset(key.rpartition("/")[2] for key in _fs(folder).ls(_key(folder), detail=False, refresh=True))
        return frozenset(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return frozenset()


def find_files(folder: Path, pattern: Path) -> list[Path]:
    """Return the files below a folder on a bucket that match; `*` in `pattern` stands for anything but `/`.

    Cloud Storage picks them out itself, a thousand with each request: all else that runs keep is not even named.
    """
    wanted = re.compile(re.escape(_key(pattern)).replace(r"\*", "[^/]*"))
    options = {}
    if str(folder).startswith(_CLOUD_STORAGE):
        options = {"delimiter": "", "matchGlob": f"**/{_key(pattern).rpartition('*/')[2]}"}
    try:
        if options:
            found = _fs(folder).ls(_key(folder), detail=False, refresh=True, **options)
        else:
            found = _fs(folder).find(_key(folder))
    except FileNotFoundError:
        return []
    return [folder / key[len(_key(folder)) :].lstrip("/") for key in sorted(found) if wanted.fullmatch(key)]


def read_many(paths: Sequence[Path]) -> dict[Path, bytes]:
    """Return the contents of files on one bucket, all fetched at once; those that are not there are left out."""
    by_key = {_key(path): path for path in paths}
    fetched = _fs(paths[0]).cat(list(by_key), on_error="return") if paths else {}
    for content in fetched.values():
        if isinstance(content, Exception) and not isinstance(content, FileNotFoundError):
            raise content
    return {by_key[key]: content for key, content in fetched.items() if not isinstance(content, Exception)}


def is_folder(place: Path) -> bool:
    """Return whether there is such a folder; on a bucket it is there as long as it holds something. One request."""
    return bool(names(place)) if is_bucket(place) else os.path.isdir(place)


def read_from(path: Path, start: int) -> Iterator[bytes]:
    """Yield the bytes of a file from `start` on, as many as there are now. Raises FileNotFoundError."""
    if is_bucket(path) and not start:
        yield _fs(path).cat_file(_key(path))
        return
    if is_bucket(path):
        size = path.stat().st_size
        if size > start:
            yield _fs(path).cat_file(_key(path), start=start, end=size)
        return
    with open(path, "rb") as file:
        file.seek(start)
        yield from iter(lambda: file.read(1 << 16), b"")


def read_head(path: Path, num_bytes: int) -> bytes:
    """Return the first bytes of a file; one request. Raises what `failures` names."""
    if is_bucket(path):
        return bytes(_fs(path).cat_file(_key(path), start=0, end=num_bytes))
    with open(path, "rb") as file:
        return file.read(num_bytes)


def write_all(contents: Mapping[Path, bytes]) -> None:
    """Write files, each whole at first sight on a bucket; those that are there are replaced."""
    for path, content in contents.items():
        if not is_bucket(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    in_bucket = {_key(path): content for path, content in contents.items() if is_bucket(path)}
    if in_bucket:
        _fs(next(iter(contents))).pipe(in_bucket)


def remove(place: Path) -> None:
    """Remove a file or folder and all below it, as far as that is possible."""
    if is_bucket(place):
        with suppress(*failures(place)):
            _fs(place).rm(_key(place), recursive=True)
    else:
        shutil.rmtree(place, ignore_errors=True)


def in_parallel(function: Callable[[_Item], _Made], items: Sequence[_Item], places: Iterable[Path]) -> list[_Made]:
    """Return `function` of each item; at once if a place is on a bucket, where the way takes the time."""
    if not any(is_bucket(place) for place in places):
        return [function(item) for item in items]
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(function, items))


def failures(place: Path) -> tuple[type[Exception], ...]:
    """Return what using a place raises when it cannot be reached or does not let us in."""
    if not is_bucket(place) or importlib.util.find_spec("gcsfs") is None:
        return (OSError,)
    from gcsfs.retry import RETRIABLE_EXCEPTIONS, HttpError, NonRetryableError

    # fsspec's own time-out is asyncio's, which is an OSError from Python 3.11 on only.
    return (OSError, asyncio.TimeoutError, HttpError, NonRetryableError, *RETRIABLE_EXCEPTIONS)


@contextmanager
def reached(place: Path, key: str) -> Iterator[None]:
    """Turn what a bucket's client raises into a UserError that names `key`.

    A folder's errors stay as they are, and so does FileExistsError: that is an answer, not a failure.
    """
    try:
        yield
    except failures(place) as error:
        if not is_bucket(place) or isinstance(error, FileExistsError):
            raise
        what, remedy = in_words(place, error)
        raise UserError(f"{key}: {what}; {remedy}") from error


def problems(folder: Path) -> tuple[tuple[str, str], ...]:
    """Return (what is wrong, what to do) for the reason why nothing can be written below a folder on a bucket."""
    if not is_bucket(folder):
        return ()
    probe = folder / f".writable-{secrets.token_hex(8)}"
    try:
        _fs(probe).pipe_file(_key(probe), b"may go", mode="create")
    except failures(folder) as error:
        return (in_words(folder, error),)
    remove(probe)
    return ()


def in_words(place: Path, error: Exception) -> tuple[str, str]:
    """Return (what is wrong, what to do) about an error of `failures`."""
    bucket = f"{str(place).partition('://')[0]}://{_key(place).split('/')[0]}"
    said = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, asyncio.TimeoutError):
        said = "no answer"
    code = str(getattr(error, "code", ""))
    if isinstance(error, FileNotFoundError):
        return (
            f"{place} cannot be used: there is no {bucket}",
            "create the bucket or name another as site.vertex.bucket",
        )
    if code == "401" or "nonymous" in said or "Invalid Credentials" in said:
        return f"{place} cannot be used: {said}", "log in with `gcloud auth application-default login`"
    if code == "403" or said.startswith("Forbidden"):
        return f"{place} cannot be used: {said}", f"ask for the role Storage Object Admin on {bucket}"
    return f"{place} cannot be used: {said}", f"look whether {bucket} can be reached from this machine"


def _fs(path: Path) -> Any:
    return path.fs  # type: ignore[attr-defined]


def _key(path: Path) -> str:
    return str(path.path)  # type: ignore[attr-defined]
