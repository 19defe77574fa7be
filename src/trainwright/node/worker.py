"""The process that every job on every target starts, once per node: `worker.pyz RUN_DIR --stage S --attempt A`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Mapping, Sequence

from . import address, cluster_env, device_samples, events, processes, rank, requeue
from .cluster_env import ClusterEnv, ClusterEnvError
from .log_follower import LogFollower, last_lines
from .peers import Peers
from .run_paths import RunPaths
from .signals import STOP_SIGNALS, SignalQueue
from .supervisor import Supervisor
from .verdict import Verdict, judge

USER_ERROR, WORKER_ERROR = 2, 1
JOB_SCHEMA_VERSION = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run this node's part of a stage and return the exit code of the job."""
    arguments = _parser().parse_args(argv)
    paths = RunPaths(arguments.run_dir)
    job_file = paths.job(arguments.attempt, arguments.stage)
    try:
        job = json.loads(job_file.read_text(encoding="utf-8"))
        if job["schema_version"] != JOB_SCHEMA_VERSION:
            raise ValueError(f"schema_version={job['schema_version']}, this worker reads {JOB_SCHEMA_VERSION}")
    except (OSError, ValueError) as error:
        return _refuse(USER_ERROR, f"cannot read the job: {job_file}: {error}")
    try:
        if arguments.rank is not None:
            number = int(os.environ["RANK"] if arguments.rank == "env" else arguments.rank)
            return rank.run(paths, job, arguments.stage, arguments.attempt, number)
        if arguments.announce_requeue:
            requeue.announce(paths, arguments.stage, arguments.attempt + requeue.num_restarts(os.environ))
            return 0
        return _Node(paths, job, arguments).run()
    except ClusterEnvError as error:
        return _refuse(USER_ERROR, str(error))
    except OSError as error:  # a full disk or a directory that cannot be written: the events may be lost too
        return _refuse(WORKER_ERROR, f"cannot work in {paths.own}: {error}")


class _Node:
    """One node's part of a stage."""

    def __init__(self, paths: RunPaths, job: Mapping[str, Any], arguments: argparse.Namespace) -> None:
        self._paths, self._job = paths, job
        self._stage, self._restarts = arguments.stage, requeue.num_restarts(os.environ)
        self._attempt = requeue.adopt(paths, self._stage, arguments.attempt, self._restarts)
        place = cluster_env.resolve(
            {**os.environ, **job["env"]},
            job["num_nodes"],
            node_rank=arguments.node_rank,
            told_num_nodes=arguments.num_nodes,
            master_addr=arguments.master_addr,
            master_port=arguments.master_port,
        )
        self._cluster = replace(place, master_addr=address.reachable(place.master_addr))
        node, per_node = self._cluster.node_rank, job["devices"] if job["launch"] == "torchrun" else 1
        self._ranks = range(node * per_node, (node + 1) * per_node)
        self._log = paths.node_log(self._stage, self._attempt, node)
        self._peers = Peers(paths, self._stage, self._attempt, node, self._cluster.num_nodes)

    def run(self) -> int:
        """Run all ranks of this node to their end; leave an event before and after."""
        too_often = requeue.refuse(self._restarts, self._job.get("max_requeues"))
        if too_often is not None:
            return self._conclude(too_often)
        signals = SignalQueue((*STOP_SIGNALS, signal.SIGCHLD))
        records = {number: self._paths.rank_record(self._stage, self._attempt, number) for number in self._ranks}
        self._paths.logs.mkdir(parents=True, exist_ok=True)
        self._paths.ranks.mkdir(parents=True, exist_ok=True)
        for record in records.values():
            record.unlink(missing_ok=True)  # of a start of this attempt that was cut short
        self._tell(events.RUNNING, devices=self._job["devices"], process=processes.identity())
        if events.is_cancelled(self._paths, self._stage, self._attempt):  # while we started
            return self._conclude(Verdict(events.CANCELLED, WORKER_ERROR, "cancelled before it started", None))
        missing = [name for name in self._job.get("env_from", ()) if name not in os.environ]
        if missing:
            reason = f"variables of launcher.env_from did not reach this node: {', '.join(missing)}"
            return self._conclude(Verdict(events.FAILED, USER_ERROR, reason, None))
        device_samples.start(self._paths, self._stage, self._attempt, self._cluster.node_rank)
        supervisor = Supervisor(
            self._command(),
            self._environment(),
            self._log,
            records,
            self._job["grace_s"],
            signals,
            LogFollower(self._rank_log(0), sys.stdout.fileno()) if 0 in self._ranks else None,
            self._peers,
        )
        try:
            outcome = supervisor.run()
        except OSError as error:  # most likely a `python` that does not exist
            return self._conclude(Verdict(events.FAILED, WORKER_ERROR, str(error), None))
        if outcome.unkillable:
            print(f"worker: processes {list(outcome.unkillable)} do not end, not even by SIGKILL", file=sys.stderr)
        last_word = requeue.final(judge(outcome), outcome.stopped_by, self._restarts, self._job.get("max_requeues"))
        return self._conclude(last_word)

    def _conclude(self, verdict: Verdict) -> int:
        """Tell how it ended, on disk and on stderr."""
        extra: dict[str, Any] = {"exit_code": verdict.exit_code, "reason": verdict.reason}
        log = self._log
        if verdict.first is not None:
            extra.update(first_failing_rank=verdict.first.rank, rank_ended=verdict.first.ended)
            log = self._rank_log(verdict.first.rank)
        if verdict.state in (events.FAILED, events.CANCELLED):
            extra["last_lines"] = [self._without_secrets(line) for line in last_lines(log)]
            extra["log"] = str(log.relative_to(self._paths.run_dir))
        if verdict.state != events.SUCCEEDED:
            print(f"worker: {verdict.state}: {verdict.reason}; see {log}", file=sys.stderr)
        if verdict.state == events.FAILED and log != self._rank_log(0):  # rank 0 is on the terminal already
            sys.stderr.writelines(f"{line}\n" for line in extra["last_lines"])
        self._tell(verdict.state, **extra)
        return verdict.exit_code

    def _tell(self, state: str, **extra: Any) -> None:
        events.append(
            self._paths,
            state,
            who=events.node_who(self._attempt, self._cluster.node_rank),
            stage=self._stage,
            attempt=self._attempt,
            num_nodes=self._cluster.num_nodes,
            **extra,
        )

    def _without_secrets(self, line: str) -> str:
        for name in self._job.get("env_from", ()):
            if os.environ.get(name):
                line = line.replace(os.environ[name], f"<{name}>")
        return line

    def _rank_log(self, number: int) -> Path:
        return self._paths.rank_log(self._stage, self._attempt, number)

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self._job["env"], **_exported(self._cluster)}

    def _command(self) -> list[str]:
        """Argv below the worker: torchrun starting the wrappers of this node's ranks, or the only wrapper itself."""
        python = self._job["python"]
        stage = ["--stage", self._stage, "--attempt", str(self._attempt)]
        # -I -S: neither the user's site nor PYTHONPATH can break a wrapper that needs the standard library only.
        wrapper = [python, "-I", "-S", str(self._paths.worker), str(self._paths.run_dir), *stage, "--rank"]
        if self._job["launch"] == "plain":
            return [*wrapper, str(self._ranks[0])]
        options = {
            "--nnodes": self._cluster.num_nodes,
            "--nproc-per-node": self._job["devices"],
            "--node-rank": self._cluster.node_rank,
            "--master-addr": self._cluster.master_addr,
            "--master-port": self._cluster.master_port or address.free_port(),
            "--max-restarts": 0,
        }
        torchrun = [f"{option}={value}" for option, value in options.items()]
        return [python, "-m", "torch.distributed.run", *torchrun, "--no-python", *wrapper, "env"]


def _exported(cluster: ClusterEnv) -> dict[str, str]:
    """What launchers of other systems read when they are started once per node."""
    exported = {"NODE_RANK": str(cluster.node_rank), "NNODES": str(cluster.num_nodes)}
    if cluster.master_port is not None:
        exported.update(MASTER_ADDR=cluster.master_addr, MASTER_PORT=str(cluster.master_port))
    return exported


def _refuse(code: int, message: str) -> int:
    print(f"worker: {message}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="worker.pyz", description="Run this node's part of one stage of a run.")
    parser.add_argument("run_dir", help="the run directory")
    parser.add_argument("--stage", required=True)
    parser.add_argument("--attempt", type=int, default=1)
    parser.add_argument("--node-rank", type=int, help="this node, from 0; default: from the environment")
    parser.add_argument("--num-nodes", type=int, help="must equal the job's; default: from the environment")
    parser.add_argument("--master-addr", help="where the nodes meet; default: from the environment")
    parser.add_argument("--master-port", type=int, help="default: from the environment; one node: any free port")
    parser.add_argument("--announce-requeue", action="store_true", help="tell that the job will start again; no more")
    parser.add_argument("--rank", help=argparse.SUPPRESS)  # used by the worker itself: a number, or env to read RANK
    return parser
