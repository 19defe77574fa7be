"""What a mounted bucket (Cloud Storage FUSE) refuses or makes slow, refused on an ordinary disk by an audit hook.

Below its root nothing is appended to, changed in place, renamed, linked or cut, and only files that grow are replaced.
"""

import errno
import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT, REFUSED = "TEST_BUCKET", "TEST_BUCKET_REFUSED"  # the run directory; a file that gets a line for each refusal
REPLACED = re.compile(
    r"run/(logs|devices|ranks)/|run/metrics-a\d+\.jsonl|run/results\.json$|(logs/)?events\.out\.tfevents"
)

_TWO_PATHS = ("os.rename", "os.link", "os.symlink")


class Bucket:
    """The hook: raises what the mount would, and notes it, since some code has another way to go then."""

    def __init__(self, root: str, refused: str) -> None:
        self._root, self._refused = f"{root}/", refused

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            self._open(arguments[0], arguments[2])
        elif event in _TWO_PATHS:
            self._refuse_below(event, *arguments[:2])
        elif event == "os.truncate":
            self._refuse_below(event, arguments[0])

    def _open(self, path: Any, flags: int) -> None:
        name = self._below(path)
        if name is None or flags & os.O_ACCMODE == os.O_RDONLY:
            return
        if flags & os.O_APPEND:
            self._refuse("append", name)
        is_there = not flags & os.O_EXCL and os.path.exists(path)
        if is_there and not flags & os.O_TRUNC:
            self._refuse("change in place", name)
        if is_there and not REPLACED.match(name):
            self._refuse("replace", name)

    def _refuse_below(self, event: str, *paths: Any) -> None:
        for name in map(self._below, paths):
            if name is not None:
                self._refuse(event, name)

    def _below(self, path: Any) -> str | None:
        text = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
        return text[len(self._root) :] if text.startswith(self._root) else None

    def _refuse(self, what: str, name: str) -> None:
        descriptor = os.open(self._refused, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{what} {name}\n".encode())
        os.close(descriptor)
        raise OSError(errno.EOPNOTSUPP, f"no {what} on a bucket", name)


def environment(run_dir: Path, folder: Path) -> dict[str, str]:
    """Return the environment of programs to which `run_dir` shall be a bucket; `folder` gets what they need for it."""
    site = folder / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("from tests.bucket_mount import mount\nmount()\n")
    python_path = os.pathsep.join([str(site), str(Path(__file__).parents[1])])
    return {ROOT: str(run_dir), REFUSED: str(folder / "refused"), "PYTHONPATH": python_path}


def mount() -> None:
    """Make the run directory a bucket for the rest of this process."""
    sys.addaudithook(Bucket(os.environ[ROOT], os.environ[REFUSED]))


def refused(environ: dict[str, str]) -> list[str]:
    """Return all that was refused so far."""
    path = Path(environ[REFUSED])
    return path.read_text().splitlines() if path.exists() else []
