"""What a run is at, told by the audit events of its interpreter while it happens: the code under test knows nothing.

Each line of a trace is the time in ns of the machine's steady clock, and the phase that begins then:
    shard write   a checkpoint's directory is made, and filled
    commit        the files are read for their checksums and flushed, and the commit file is written
    choice        the commit is there, and the checkpoints are listed to find those that it supersedes
    deletion      a commit file is removed, then the rest of the checkpoint
    step          all is done, until the next checkpoint: forward, backward, optimizer, validation
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.backends.native.ranks import run_training
from trainwright.node.commit import COMMIT_FILE
from trainwright.node.run_paths import RunPaths

SHARD_WRITE, COMMIT, CHOICE, DELETION, STEP = "shard write", "commit", "choice", "deletion", "step"


@dataclass(frozen=True)
class Phase:
    """A stretch of a run."""

    name: str
    began_ns: int


def parse(trace: bytes) -> list[Phase]:
    """Return the phases of a trace; a line that a kill cut short is none."""
    lines = trace.decode().split("\n")[:-1]
    return [Phase(name, int(began)) for began, _, name in (line.partition(" ") for line in lines)]


def run_traced(run_dir: Path, attempt: int, *, trace: Path) -> int:
    """Train, and write what rank 0 is at to `trace`, a file or a pipe."""
    if os.environ["RANK"] == "0":
        stream = os.open(trace, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        sys.addaudithook(_Tracer(str(RunPaths(run_dir).checkpoints), lambda line: os.write(stream, line)))
    return run_training(run_dir, attempt)


class _Tracer:
    """Follows the file operations below the directory of the checkpoints."""

    def __init__(self, checkpoints: str, write: Callable[[bytes], object]) -> None:
        self._checkpoints = checkpoints
        self._write = write
        self._phase = ""
        self._is_commit_open = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("os.mkdir", "open", "os.remove", "os.rmdir"):
            return
        path = arguments[0]
        if isinstance(path, (str, Path)) and os.path.dirname(path).startswith(self._checkpoints):
            self._follow(event, str(path), writes=event == "open" and arguments[2] & os.O_ACCMODE != os.O_RDONLY)

    def _follow(self, event: str, path: str, writes: bool) -> None:
        is_commit = os.path.basename(path) == COMMIT_FILE
        if event == "os.mkdir":
            self._begin(SHARD_WRITE)
        elif event == "os.remove" and is_commit:
            self._begin(DELETION)
        elif event == "os.rmdir":
            self._begin(STEP)
        elif event == "open" and self._phase == SHARD_WRITE and not writes:
            self._begin(COMMIT)  # the first file is read for its checksum
        elif event == "open" and self._phase == COMMIT and is_commit:
            self._is_commit_open = True
        elif event == "open" and self._phase == COMMIT and self._is_commit_open:
            self._begin(CHOICE)  # the directory is flushed for the last time

    def _begin(self, phase: str) -> None:
        if phase == self._phase:
            return
        self._phase, self._is_commit_open = phase, False
        self._write(f"{time.monotonic_ns()} {phase}\n".encode())
