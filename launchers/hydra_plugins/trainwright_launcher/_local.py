"""Runs on this machine: a worker process for each "node", at most `launcher.max_parallel` runs at a time."""

import asyncio
import functools
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Mapping

from trainwright.config import LocalLauncher, RunConfig
from trainwright.job import JobSpec
from trainwright.node.processes import die_with_parent
from trainwright.node.run_paths import RunPaths
from trainwright.scheduler import Ended

_LOOPBACK = "127.0.0.1"


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

    def submit(self, job: JobSpec, *, after: tuple[str, ...]) -> str:
        job_id = f"{job.run_id}/{job.stage}"
        self._queue[job_id] = (job, after)
        return job_id

    def wait(self, on_start: Callable[[str], None], on_end: Callable[[Ended], None]) -> None:
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
            if not self._is_stopping and not any(code != 0 for code in before):
                on_start(job_id)
                exit_code = await self._run_nodes(job)
            self._is_stopping |= bool(exit_code) and self._stops_at_failure
            self._exit_codes[job_id].set_result(exit_code)
            on_end(Ended(job_id=job_id, exit_code=exit_code))

    async def _run_nodes(self, job: JobSpec) -> int:
        """Run a worker for each node, bring the others down when one fails, return the first failure's exit code."""
        port = _free_port()
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
        place = ["--node-rank", node, "--num-nodes", job.num_nodes, "--master-addr", _LOOPBACK, "--master-port", port]
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


def _environment(shown: bool) -> Mapping[str, str]:
    """Return this process's environment, and what the ranks cannot see of the terminal that shows their output."""
    environment = {name: value for name, value in os.environ.items() if name != "HYDRA_FULL_ERROR"}
    if shown and sys.stdout.isatty():
        environment.update(TRAINWRIGHT_TTY="1", COLUMNS=str(shutil.get_terminal_size().columns))
    return environment


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
