"""What the code was at submit time: commit, changes and new files of the repository that a run is started in."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright import storage
from trainwright.node.run_paths import RunPaths

SCHEMA_VERSION = 1
_NOTHING = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"  # git's empty tree: what a repository without commits holds


@dataclass(frozen=True, kw_only=True)
class CodeState:
    """A working tree as it is at this moment."""

    top: Path
    commit: str | None  # None: there is none yet
    changed: tuple[str, ...]  # tracked files that differ from the commit; paths below `top`, like all here
    untracked: tuple[str, ...]  # files that git neither knows nor ignores
    tracked: tuple[str, ...]
    diff: bytes  # what `git apply` makes of the commit

    @property
    def is_dirty(self) -> bool:
        return bool(self.changed or self.untracked)

    @property
    def num_bytes(self) -> int:
        """The size of all files that a snapshot holds."""
        return sum(os.lstat(self.top / name).st_size for name in self.files())

    def files(self) -> Iterator[str]:
        """Yield what a snapshot holds: all files that are neither ignored nor removed; no submodules."""
        yield from (name for name in (*self.tracked, *self.untracked) if _is_file(self.top / name))


def look(directory: Path, *, leave_out: tuple[str, ...] = (), hidden: tuple[str, ...] = ()) -> CodeState | None:
    """Return the state of the repository around `directory`; None where there is none, or no git.

    What lies below `leave_out` is output, not code. Values of the environment variables `hidden` stand in the diff by
    their names only.
    """
    top = _ask(directory, "rev-parse", "--show-toplevel")
    if top is None:
        return None
    root = Path(top.decode().rstrip("\n"))
    outputs = [os.path.relpath(path, root) for path in leave_out]
    pathspec = ["--", ".", *(f":(exclude){path}" for path in outputs if path.split(os.sep)[0] not in (os.pardir, "."))]
    commit = _ask(root, "rev-parse", "--verify", "--quiet", "HEAD")
    base = _NOTHING if commit is None else "HEAD"
    diff = _ask(root, "diff", "--binary", "--no-color", "--no-ext-diff", base, *pathspec) or b""
    for name in hidden:
        if os.environ.get(name):
            diff = diff.replace(os.environ[name].encode(), f"<{name}>".encode())
    return CodeState(
        top=root,
        commit=None if commit is None else commit.decode().strip(),
        changed=_names(root, "diff", "--name-only", "--no-ext-diff", "-z", base, *pathspec),
        untracked=_names(root, "ls-files", "--others", "--exclude-standard", "-z", *pathspec),
        tracked=_names(root, "ls-files", "--cached", "-z", *pathspec),
        diff=diff,
    )


def as_tree(code: CodeState | None) -> dict[str, Any] | None:
    """Return what the record of a run says of the code; None outside of a repository."""
    return None if code is None else {"commit": code.commit, "is_dirty": code.is_dirty}


def write(code: CodeState, paths: RunPaths, attempt: int) -> list[Path]:
    """Write commit, changes and the names of new files beside the record of an attempt; return the files."""
    folder = paths.code(attempt)
    state = {
        "schema_version": SCHEMA_VERSION,
        "directory": str(code.top),
        **(as_tree(code) or {}),
        "changed": list(code.changed),
        "untracked": list(code.untracked),
    }
    text = json.dumps(state, indent=1) + "\n"
    files = {folder / "state.json": text.encode("utf-8"), folder / "changes.diff": code.diff}
    storage.write_all(files)
    return list(files)


def write_snapshot(code: CodeState, paths: RunPaths, attempt: int) -> None:
    """Copy the code itself beside the record of an attempt; to a bucket, which has no links, what these lead to."""
    snapshot = paths.code_snapshot(attempt)
    if storage.is_bucket(snapshot):
        contents = {name: code.top / name for name in code.files() if (code.top / name).is_file()}
        storage.write_all({snapshot / name: path.read_bytes() for name, path in contents.items()})
        return
    for name in code.files():
        target = snapshot / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(code.top / name, target, follow_symlinks=False)


def snapshot_env(code: CodeState, paths: RunPaths, attempt: int) -> dict[str, str]:
    """Return the environment in which Python imports the snapshot where this process imports the working tree."""
    snapshot = paths.code_snapshot(attempt)
    searched = [Path(entry or ".").resolve() for entry in sys.path]
    top = code.top.resolve()
    inside = [snapshot / entry.relative_to(top) for entry in searched if _is_source(entry, top)]
    entries = dict.fromkeys(map(str, (*inside, snapshot)))
    before = os.environ.get("PYTHONPATH")
    # Safe path: the directory in which a job starts, first otherwise for `python -m`, is the working tree itself.
    return {"PYTHONPATH": os.pathsep.join([*entries, *([before] if before else [])]), "PYTHONSAFEPATH": "1"}


def _is_source(entry: Path, top: Path) -> bool:
    """Return whether a place that Python searches is the repository's code, not an environment that lies in it."""
    return entry.is_dir() and entry.is_relative_to(top) and "site-packages" not in entry.parts


def _is_file(path: Path) -> bool:
    return path.is_symlink() or path.is_file()


def _names(root: Path, *command: str) -> tuple[str, ...]:
    listed = _ask(root, *command) or b""
    return tuple(os.fsdecode(name) for name in listed.split(b"\0") if name)


def _ask(directory: Path, *command: str) -> bytes | None:
    """Return what git prints; None when it refuses or is not there."""
    try:
        asked = subprocess.run(["git", "-C", str(directory), *command], capture_output=True)
    except FileNotFoundError:
        return None
    return asked.stdout if asked.returncode == 0 else None
