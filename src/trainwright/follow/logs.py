"""The logs of a run on the terminal: one file, or all that a run goes on to write."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from trainwright import storage
from trainwright.errors import UserError
from trainwright.follow import overview
from trainwright.follow.observe import confirm
from trainwright.follow.overview import Overview
from trainwright.node import events, growing
from trainwright.node.run_paths import RunPaths

_POLL_S = 0.2  # how far behind the run a follower may be
_POLL_BUCKET_S = 2.0  # a look costs a dozen requests, and nodes copy there only now and then
_ASK_EVERY_S = 15.0  # whether a run is still there: its scheduler has others to serve


@dataclass(frozen=True, kw_only=True)
class Log:
    """A log and whose it is."""

    path: Path
    stage: str
    attempt: int
    rank: int | None  # None: of the node's worker, or of the scheduler's script


def find_log(run: Overview, *, stage: str | None, rank: int | None, attempt: int | None) -> Log | None:
    """Return the log to read: of the newest stage that started, and of the rank that failed first, else of rank 0.

    Before a rank starts it is the worker's log, or the scheduler's. None: there is none yet.
    Raises UserError when there is no such stage, rank or attempt.
    """
    paths = RunPaths(run.run_dir)
    names = [known.stage for known in run.state.stages if known.stage is not None]
    if stage is not None and stage not in names:
        raise UserError(f"--stage {stage}: no stage of this run; use {', '.join(names)}")
    if attempt is not None and not 1 <= attempt <= run.state.attempt:
        raise UserError(f"--attempt {attempt}: this run has {run.state.attempt}")
    attempts = range(run.state.attempt, 0, -1) if attempt is None else [attempt]
    wanted = rank if rank is not None else run.state.first_failing_rank or 0
    for number in attempts:
        for name in reversed(names) if stage is None else [stage]:
            of_rank = paths.rank_log(name, number, wanted)
            if of_rank.exists():
                return Log(path=of_rank, stage=name, attempt=number, rank=wanted)
            has_begun = paths.rank_log(name, number, 0).exists()
            if rank is not None and has_begun:
                known = sorted(int(path.stem.rpartition("rank")[2]) for path in paths.rank_logs(name, number))
                raise UserError(f"--rank {rank}: stage {name} has logs of ranks {', '.join(map(str, known))}")
            for path in (paths.node_log(name, number, 0), paths.job_log(name, number)):
                if rank is None and path.exists():
                    return Log(path=path, stage=name, attempt=number, rank=None)
    return None


def copy(log: Log, target: BinaryIO) -> None:
    """Write a whole log, byte for byte."""
    Reader(log.path).copy_rest(target)


def follow(run_dir: Path, find: Callable[[Overview], Log | None], target: BinaryIO) -> Overview:
    """Write what the run writes until it is over, stage after stage and attempt after attempt; return how it ended."""
    shown: Log | None = None
    reader: Reader | None = None
    ask_at = 0.0
    while True:
        run = overview.look(run_dir)  # before the copying: what was written up to its end is copied
        if not run.is_over and time.monotonic() >= ask_at:
            (run,) = confirm([run])
            ask_at = time.monotonic() + _ASK_EVERY_S
        found = find(run)
        if found is not None and found != shown:
            if reader is not None:
                reader.copy_rest(target)
                print(f"==> {found.path} <==", file=sys.stderr)
            shown, reader = found, Reader(found.path)
        if reader is not None:
            reader.copy_rest(target)
        if run.is_over or run.state.state == events.UNKNOWN:
            return run
        time.sleep(_POLL_BUCKET_S if storage.is_bucket(run_dir) else _POLL_S)


class Reader:
    """Reads a log as it grows, through all its parts; the last of them may be replaced by a longer one."""

    def __init__(self, path: Path) -> None:
        self._path, self._part, self._read_bytes = path, 0, 0

    def copy_rest(self, target: BinaryIO) -> None:
        """Write what has been added since."""
        while True:
            is_full = growing.part(self._path, self._part + 1).is_file()  # asked first: then nothing is added to this
            for chunk in storage.read_from(growing.part(self._path, self._part), self._read_bytes):
                target.write(chunk)
                self._read_bytes += len(chunk)
            if not is_full:
                break
            self._part, self._read_bytes = self._part + 1, 0
        target.flush()
