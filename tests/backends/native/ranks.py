"""Real ranks of a run: processes with torchrun's environment, forked from a server that has torch loaded."""

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import yaml

from trainwright.config import RunConfig
from trainwright.node.run_paths import RunPaths

_CONTEXT = multiprocessing.get_context("forkserver")


def start_server() -> None:
    """Start loading torch, Lightning and transformers; returns at once."""
    _CONTEXT.set_forkserver_preload(["trainwright.backends.native.train"])
    from multiprocessing.forkserver import ensure_running

    ensure_running()


def run_training(run_dir: Path, attempt: int) -> int:
    """Do what `python -m trainwright.backends.native.train` does, and return its exit code."""
    from trainwright.backends.native.train import main

    return main([str(run_dir), "--attempt", str(attempt)])


def start_ranks(
    config: RunConfig,
    run_dir: Path,
    *,
    attempt: int = 1,
    nodes: int = 1,
    devices: int = 2,
    run: Callable[[Path, int], int] = run_training,
) -> list[ForkServerProcess]:
    """Record the run's config and start its ranks, each of which calls `run`, a function that can be pickled.

    Each writes what it prints to rankN.log.
    """
    record = RunPaths(run_dir).record(attempt)
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(yaml.safe_dump({"config": config.to_dict()}), encoding="utf-8")
    port = _free_port()
    processes = []
    for rank in range(nodes * devices):
        environ = {
            "RANK": str(rank),
            "WORLD_SIZE": str(nodes * devices),
            "LOCAL_RANK": str(rank % devices),
            "LOCAL_WORLD_SIZE": str(devices),
            "GROUP_RANK": str(rank // devices),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        process = _CONTEXT.Process(target=_rank_main, args=(environ, run_dir, attempt, rank, run))
        process.start()
        processes.append(process)
    return processes


def join(processes: Sequence[ForkServerProcess]) -> list[int | None]:
    """Wait for the ranks and return their exit codes."""
    for process in processes:
        process.join(timeout=60)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()  # one that still runs would keep the tests from ending
    return codes


def _rank_main(
    environ: dict[str, str], run_dir: Path, attempt: int, rank: int, run: Callable[[Path, int], int]
) -> None:
    os.environ.update(environ)
    with (run_dir / f"rank{rank}.log").open("a") as output, redirect_stdout(output), redirect_stderr(output):
        try:
            code = run(run_dir, attempt)
        except Exception:
            traceback.print_exc()  # into the log
            code = 1
    sys.exit(code)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
