"""Runs on this machine: a worker process for each "node", at most `launcher.max_parallel` runs at a time."""

import asyncio
import functools
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainwright.config import RunConfig
from trainwright.config_launcher import LocalLauncher
from trainwright.errors import UserError
from trainwright.job import JobSpec
from trainwright.node import events, processes
from trainwright.node.address import free_port
from trainwright.node.cluster_env import LOOPBACK
from trainwright.node.processes import die_with_parent
from trainwright.node.run_paths import RunPaths
from trainwright.scheduler import Ended, JobState


class LocalScheduler:
    """A queue of jobs, run while `wait` is called. Ctrl-C and SIGTERM go on to the ranks and end the queue."""

    is_attached = True

    def __init__(self, config: RunConfig) -> None:
        assert isinstance(config.launcher, LocalLauncher)
        self._max_parallel = config.launcher.max_parallel
        self._stops_at_failure = config.on_failure == "stop"
        self._queue: dict[str, tuple[JobSpec, tuple[str, ...]]] = {}
        self._exit_codes: dict[str, asyncio.Future[int | None]] = {}
        self._running: set[asyncio.subprocess.Process] = set()
        self._is_stopping = False

    def problems(self) -> Iterator[tuple[str, str]]:
        return iter(())

    def arrange(self, job: JobSpec) -> JobSpec:
        return job  # the worker reads it as it is

    def by_hand(self, job: JobSpec, own: Path) -> str | None:
        return None

    def look_up(self, job_ids: Collection[str]) -> Mapping[str, JobState]:
        return {}  # workers of this machine tell all by their events

    def cancel(self, job_ids: Collection[str]) -> None:
        """Tell the workers to stop as Ctrl-C would; jobs that wait are ended by the event of their cancellation."""
        workers = [worker for job_id in job_ids for worker in _workers(job_id)]
        elsewhere = {worker["host"] for worker in workers} - {socket.gethostname()}
        if elsewhere:
            raise UserError(f"{next(iter(job_ids))} runs on {', '.join(sorted(elsewhere))}; cancel it there")
        for worker in workers:
            _send(worker, signal.SIGTERM)

    def submit(self, job: JobSpec, *, after: tuple[str, ...]) -> str:
        job_id = f"{job.run_dir}/{job.stage}"  # all that another command needs to find its workers
        self._queue[job_id] = (job, after)
        return job_id

    def wait(
        self,
        on_start: Callable[[str], None],
        on_end: Callable[[Ended], None],
        on_wait: Callable[[str, str], None],
    ) -> None:
        asyncio.run(self._run_queue(on_start, on_end))

    async def _run_queue(self, on_start: Callable[[str], None], on_end: Callable[[Ended], None]) -> None:
        loop = asyncio.get_running_loop()
        for caught, passed_on in (
            (signal.SIGINT, signal.SIGINT),
            (signal.SIGTERM,) * 2,
            (signal.SIGHUP, signal.SIGTERM),
        ):
            loop.add_signal_handler(caught, self._stop, passed_on)
        slots = asyncio.Semaphore(self._max_parallel)
        self._exit_codes = {job_id: loop.create_future() for job_id in self._queue}
        await asyncio.gather(*(self._run(job_id, slots, on_start, on_end) for job_id in self._queue))

    def _stop(self, passed_on: signal.Signals) -> None:
        self._is_stopping = True
        for worker in self._running:
            worker.send_signal(passed_on)

    async def _run(
        self,
        job_id: str,
        slots: asyncio.Semaphore,
        on_start: Callable[[str], None],
        on_end: Callable[[Ended], None],
    ) -> None:
        job, after = self._queue[job_id]
        before = [await self._exit_codes[previous] for previous in after]
        async with slots:
            exit_code = None
            is_cancelled = events.is_cancelled(RunPaths(job.run_dir), job.stage, job.attempt)
            if not is_cancelled and not self._is_stopping and not any(code != 0 for code in before):
                on_start(job_id)
                exit_code = await self._run_nodes(job)
            self._is_stopping |= bool(exit_code) and self._stops_at_failure
            self._exit_codes[job_id].set_result(exit_code)
            on_end(Ended(job_id=job_id, exit_code=exit_code, state=events.CANCELLED if is_cancelled else None))

    async def _run_nodes(self, job: JobSpec) -> int:
        """Run a worker for each node, bring the others down when one fails, return the first failure's exit code."""
        port = free_port()
        shown = self._max_parallel == 1  # several runs at once would garble each other; their logs are on disk
        workers = [await self._start_worker(job, node, port, shown) for node in range(job.num_nodes)]
        self._running.update(workers)
        first_failure = 0
        for ended in asyncio.as_completed([worker.wait() for worker in workers]):
            code = await ended
            if code and not first_failure:
                first_failure = code
                for worker in workers:
                    if worker.returncode is None:
                        worker.send_signal(signal.SIGTERM)
        self._running.difference_update(workers)
        return first_failure if first_failure >= 0 else 128 - first_failure

    async def _start_worker(self, job: JobSpec, node: int, port: int, shown: bool) -> asyncio.subprocess.Process:
        paths = RunPaths(job.run_dir)
        place = ["--node-rank", node, "--num-nodes", job.num_nodes, "--master-addr", LOOPBACK, "--master-port", port]
        command = [job.python, paths.worker, job.run_dir, "--stage", job.stage, "--attempt", job.attempt, *place]
        return await asyncio.create_subprocess_exec(
            *map(str, command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=None if shown and node == 0 else asyncio.subprocess.DEVNULL,
            env=_environment(shown),
            start_new_session=True,  # the terminal's Ctrl-C is ours to pass on, once
            # A killed command must not leave runs behind: they save and stop as on any SIGTERM.
            preexec_fn=functools.partial(die_with_parent, os.getpid(), signal.SIGTERM),
        )


def _workers(job_id: str) -> list[Mapping[str, Any]]:
    """Return the worker processes of a job that are not known to have ended."""
    run_dir, _, stage = job_id.rpartition("/")
    history = [event for event in events.read_events(RunPaths(run_dir)).events if event.stage == stage]
    newest = max((event.attempt for event in history), default=0)
    of_nodes = [event for event in history if event.node is not None and event.attempt == newest]
    ended = {event.node for event in of_nodes if event.state in events.ENDED}
    started = [event for event in of_nodes if event.state == events.RUNNING and event.node not in ended]
    return [event.extra["process"] for event in started if processes.may_live(event.extra["process"])]


def _send(process: Mapping[str, Any], how: signal.Signals) -> None:
    """Send a signal to a process and to no later one that has its id."""
    try:
        handle = os.pidfd_open(process["pid"])
    except ProcessLookupError:
        return
    try:
        if processes.may_live(process):  # the handle is of this process or of a later one, whatever comes now
            signal.pidfd_send_signal(handle, how)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)


def _environment(shown: bool) -> Mapping[str, str]:
    """Return this process's environment, and what the ranks cannot see of the terminal that shows their output."""
    environment = {name: value for name, value in os.environ.items() if name != "HYDRA_FULL_ERROR"}
    if shown and sys.stdout.isatty():
        environment.update(TRAINWRIGHT_TTY="1", COLUMNS=str(shutil.get_terminal_size().columns))
    return environment
