"""Start the processes of one node, watch its ranks, stop them politely and then surely."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Mapping, Sequence

from . import processes
from .events import FAILED, Event, timestamp
from .log_follower import LogFollower
from .peers import Peers
from .rank import PREEMPTED_CODE, RankEnd, read_record, write_record
from .signals import SignalQueue

POLL_S = 0.1
# What a rank may do after a peer crashed is little: it hangs in a collective. torchrun alone would wait 30 s.
PEER_CRASH_GRACE_S = 5.0
KILL_WAIT_S = 10.0  # SIGKILL is at once, unless the kernel holds a process (a hung disk or device)


@dataclass(frozen=True)
class Outcome:
    """All that is known when no process of the node is left."""

    ends: Mapping[int, RankEnd]  # global rank -> how it ended
    missing: tuple[int, ...]  # ranks that never started
    stopped_by: int | None  # the signal that this node was told to stop by; None: it was not
    launcher_code: int  # of torchrun, or of the only rank; -n for the signal n
    unkillable: tuple[int, ...]  # process ids that survived SIGKILL
    peer: Event | None = None  # the end of another node that ours was stopped for; None: for no node's


class Supervisor:
    """Runs `argv` (torchrun or one rank's wrapper) and all that it starts."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        node_log: Path,
        records: Mapping[int, Path],
        grace_s: float,
        signals: SignalQueue,
        follower: LogFollower | None,
        peers: Peers,
        beat: Callable[[], None],
    ) -> None:
        self._argv, self._env, self._node_log = argv, env, node_log
        self._records, self._grace_s = records, grace_s
        self._signals, self._follower, self._peers = signals, follower, peers
        self._beat = beat  # called all the time that ranks run
        self._code: int | None = None  # of the launcher, once it has ended
        self._pids: dict[int, int] = {}  # rank -> process id of its wrapper
        self._ends: dict[int, RankEnd] = {}
        self._stop: int | None = None  # the signal that ranks are stopped by; None: they run
        self._deadline = 0.0
        self._told: set[int] = set()
        self._stopped_by: int | None = None
        self._peer: Event | None = None

    def run(self) -> Outcome:
        """Run to the end. Raises OSError when the launcher cannot be started; leaves no process in any case."""
        processes.adopt_orphans()
        launcher = self._start()
        unkillable: list[int] = []
        try:
            while self._code is None:
                is_behind = self._follower is not None and self._follower.copy()
                for number in self._signals.wait(0 if is_behind else POLL_S):
                    self._on_signal(number)
                self._collect(launcher)
                self._watch_ranks()
                self._react()
                self._beat()
                if self._stop is not None and time.monotonic() > self._deadline:
                    break
        finally:
            unkillable = self._kill_all(launcher)
        self._watch_ranks()
        if self._follower is not None:
            self._follower.finish()
        code = -signal.SIGKILL if self._code is None else self._code
        missing = tuple(sorted(self._records.keys() - self._ends.keys()))
        return Outcome(self._ends, missing, self._stopped_by, code, tuple(unkillable), self._peer)

    def _start(self) -> subprocess.Popen[bytes]:
        parent = os.getpid()

        def before_exec() -> None:
            processes.die_with_parent(parent)
            # Slurm may signal every process of a step, and torchrun would die of this one. Ranks do not inherit it.
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

        with open(self._node_log, "ab", buffering=0) as log:
            return subprocess.Popen(
                self._argv,
                env=dict(self._env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=before_exec,
            )

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGCHLD:
            return
        if self._stopped_by is not None and number == signal.SIGINT:
            self._deadline = 0.0  # asked twice: at once
        if self._stop is None:
            self._stopped_by = number
            self._begin_stop(number, self._grace_s)

    def _begin_stop(self, number: int, grace_s: float) -> None:
        self._stop = number
        self._deadline = time.monotonic() + grace_s

    def _react(self) -> None:
        """Stop all ranks when one failed, and tell each rank once, also one that starts late."""
        if self._stop is None:
            self._stop_after_a_failure()
        if self._stop is None:
            return
        if not self._pids:
            self._deadline = 0.0  # no rank has begun, so none has anything to save
        for rank in self._pids.keys() - self._ends.keys() - self._told:
            self._told.add(rank)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], self._stop)

    def _stop_after_a_failure(self) -> None:
        """Begin to stop if a rank of this node has failed, or else another node has."""
        failed = [end for end in self._ends.values() if end.exit_code]
        crashed = any(end.exit_code != PREEMPTED_CODE for end in failed)
        if not failed:
            self._peer = self._peers.first_bad_end()
            if self._peer is None:
                return
            crashed = self._peer.state == FAILED
        self._begin_stop(signal.SIGTERM, min(self._grace_s, PEER_CRASH_GRACE_S) if crashed else self._grace_s)

    def _watch_ranks(self) -> None:
        """Note which ranks started and which ended."""
        for rank in self._records.keys() - self._ends.keys():
            if rank in self._pids and processes.is_alive(self._pids[rank]):
                continue  # /proc is local and cheap; the record may lie on a shared file system
            record = read_record(self._records[rank], rank)
            if record is not None:
                self._pids[rank], end = record
                if end is not None or not processes.is_alive(self._pids[rank]):
                    self._ends[rank] = end or self._final_end(rank)

    def _final_end(self, rank: int) -> RankEnd:
        """How a rank ended whose wrapper is gone. One that was killed, by us or for memory, could not write it."""
        record = read_record(self._records[rank], rank)
        if record is not None and record[1] is not None:
            return record[1]
        end = RankEnd(rank, 128 + signal.SIGKILL, signal.SIGKILL, timestamp())
        write_record(self._records[rank], self._pids[rank], end)
        return end

    def _collect(self, launcher: subprocess.Popen[bytes]) -> None:
        codes = processes.reap()
        if launcher.pid in codes:
            self._code = launcher.returncode = codes[launcher.pid]

    def _kill_all(self, launcher: subprocess.Popen[bytes]) -> list[int]:
        """Kill every descendant, until none is left; return those that the kernel does not let go."""
        deadline = time.monotonic() + KILL_WAIT_S
        while True:
            self._collect(launcher)
            left = processes.descendants()
            if not left or time.monotonic() > deadline:
                return left
            processes.kill(left)
            self._signals.wait(POLL_S)
