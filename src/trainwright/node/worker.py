"""The process that every job on every target starts, once per node: `worker.pyz RUN_DIR --stage S --attempt A`."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Mapping, Sequence

from . import (
    address,
    chain,
    cluster_env,
    device_samples,
    events,
    growing,
    masking,
    pools,
    processes,
    rank,
    requeue,
)
from .cluster_env import LOOPBACK, ClusterEnv
from .collector import Collector
from .log_follower import LogFollower, last_lines
from .peers import Peers
from .pools import ClusterEnvError
from .run_paths import RunPaths
from .signals import STOP_SIGNALS, SignalQueue
from .supervisor import Outcome, Supervisor
from .verdict import Verdict, judge, judge_preparation

USER_ERROR, WORKER_ERROR = 2, 1
DEBUG = "TRAINWRIGHT_DEBUG"  # set: say what the environment tells of the cluster

# Machines of a cloud arrive one by one, and every one waits for the first: its name, then its port.
ARRIVAL_S = 1800
# Vertex AI ends a job, whatever its other nodes still do, when the first one has ended with 0.
LAST_WORDS_S = 600

# What a node's environment says of ranks is about this process, or on Vertex AI about nodes: never about its children.
_STALE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


def main(argv: Sequence[str] | None = None) -> int:
    """Run this node's part of a stage and return the exit code of the job."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["nxdt"]:  # what the only rank of a node runs, out of the same file
        from . import nxdt

        return nxdt.main(words[1:])
    if words[:1] == ["program"]:  # the same, where our whole package is needed
        from . import program

        return program.main(words[1:])
    if words[:1] == ["nemo"]:  # what a node runs before its ranks
        from . import nemo

        return nemo.main(words[1:])
    arguments = _parser().parse_args(words)
    is_rank = arguments.rank is not None
    paths = RunPaths(arguments.run_dir, growing.scratch_of(os.environ) if is_rank else None)
    try:
        jobs = chain.read_jobs(paths, arguments.attempt, arguments.stage, only_first=is_rank)
    except (OSError, ValueError) as error:
        job_file = paths.job(arguments.attempt, arguments.stage)
        return _refuse(USER_ERROR, f"cannot read the job: {job_file}: {error}")
    try:
        if is_rank:
            number = int(os.environ["RANK"] if arguments.rank == "env" else arguments.rank)
            return rank.run(paths, jobs[arguments.stage], arguments.stage, arguments.attempt, number)
        if arguments.announce_requeue:
            requeue.announce(paths, arguments.stage, arguments.attempt + requeue.num_restarts(os.environ))
            return 0
        return _run_stages(jobs, arguments)
    except ClusterEnvError as error:
        return _refuse(USER_ERROR, str(error))
    except OSError as error:  # a full disk or a directory that cannot be written: the events may be lost too
        return _refuse(WORKER_ERROR, f"cannot work in {paths.own}: {error}")


def _run_stages(jobs: Mapping[str, Mapping[str, Any]], arguments: argparse.Namespace) -> int:
    """Run this node's part of a stage and of those that follow it in the same job, as long as they succeed."""
    submitted, on_vertex = arguments.attempt, pools.ON_VERTEX in os.environ
    cluster = _find_place(jobs, arguments, wait_s=ARRIVAL_S if on_vertex else 0)
    node, num_nodes = cluster.node_rank, cluster.num_nodes
    paths = RunPaths(arguments.run_dir)
    restarts = requeue.num_restarts(os.environ)
    if on_vertex:
        restarts = requeue.restarts_in_place(paths, jobs, submitted, node, num_nodes)
    scratch = jobs[arguments.stage].get("scratch")
    if scratch is not None:
        paths = RunPaths(arguments.run_dir, _fresh(Path(scratch), paths, submitted + restarts, node))
    mirror = _mirror(paths, {**os.environ, **jobs[arguments.stage]["env"]})
    stages = chain.Chain(paths, jobs, submitted, node)
    signals = SignalQueue((*STOP_SIGNALS, signal.SIGCHLD))
    code = 0
    for stage in stages.begin(submitted + restarts):
        if stages.takes_part(stage):
            attempt = requeue.adopt(paths, stage, submitted, restarts)
            part = _part(cluster, jobs[stage]["num_nodes"])
            code = _Node(paths, jobs[stage], stage, attempt, restarts, part, mirror, signals).run()
        if not code and (on_vertex or not stages.is_last(stage)):
            limit_s = LAST_WORDS_S if stages.is_last(stage) else None
            code = stages.wait_for(stage, signals, mirror.beat if mirror is not None else _nothing, limit_s)
        if code:
            break
    if mirror is not None:
        mirror.close()
    return code


def _find_place(jobs: Mapping[str, Mapping[str, Any]], arguments: argparse.Namespace, wait_s: float) -> ClusterEnv:
    """Return the place of this node in the job, which has as many nodes as the largest of its stages."""
    for line in pools.seen(os.environ) if os.environ.get(DEBUG) else ():
        print(f"worker: {masking.masked(line)}", file=sys.stderr, flush=True)
    place = cluster_env.resolve(
        {**os.environ, **jobs[arguments.stage]["env"]},
        max(job["num_nodes"] for job in jobs.values()),
        node_rank=arguments.node_rank,
        told_num_nodes=arguments.num_nodes,
        master_addr=arguments.master_addr,
        master_port=arguments.master_port,
    )
    return replace(place, master_addr=address.reachable(place.master_addr, wait_s))


def _part(cluster: ClusterEnv, num_nodes: int) -> ClusterEnv:
    """Return the place of a node in a stage of `num_nodes`, the first ones of its job."""
    if num_nodes > 1 or num_nodes == cluster.num_nodes:
        return replace(cluster, num_nodes=num_nodes)
    return ClusterEnv(cluster.node_rank, num_nodes, LOOPBACK, None)  # it meets nobody


def _fresh(scratch: Path, paths: RunPaths, attempt: int, node: int) -> Path:
    """Return an empty directory on this node's own disk: what an earlier start left there has been copied, or is lost.

    Nodes have one each even where tests, or a person, start them all on one machine.
    """
    folder = scratch / paths.run_dir.name / f"a{attempt}-node{node}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _mirror(paths: RunPaths, environ: Mapping[str, str]) -> growing.Mirror | None:
    if paths.scratch is None:
        return None
    period_s = float(environ.get(growing.PERIOD) or growing.PERIOD_S)
    return growing.Mirror(paths.scratch, paths.run_dir, period_s=period_s)


def _nothing() -> None:
    """Do nothing: the run directory has all that grows already."""


class _Node:
    """One node's part of a stage."""

    def __init__(
        self,
        paths: RunPaths,
        job: Mapping[str, Any],
        stage: str,
        attempt: int,
        restarts: int,
        cluster: ClusterEnv,
        mirror: growing.Mirror | None,  # None: nothing is to be copied
        signals: SignalQueue,
    ) -> None:
        self._paths, self._job, self._stage, self._attempt, self._restarts = paths, job, stage, attempt, restarts
        self._cluster, self._mirror, self._signals = cluster, mirror, signals
        node, per_node = self._cluster.node_rank, job["devices"] if job["launch"] == "torchrun" else 1
        self._ranks = range(node * per_node, (node + 1) * per_node)
        self._log = paths.node_log(self._stage, self._attempt, node)
        self._peers = Peers(paths, self._stage, self._attempt, node, self._cluster.num_nodes)

    def run(self) -> int:
        """Run all ranks of this node to their end; leave an event before and after."""
        too_often = requeue.refuse(self._restarts, self._job.get("max_requeues"))
        if too_often is not None:
            return self._conclude(too_often)
        records = {number: self._paths.rank_record(self._stage, self._attempt, number) for number in self._ranks}
        self._paths.logs.mkdir(parents=True, exist_ok=True)
        self._paths.ranks.mkdir(parents=True, exist_ok=True)
        for record in records.values():
            record.unlink(missing_ok=True)  # of a start of this attempt that was cut short
        self._tell(events.RUNNING, devices=self._job["devices"], process=processes.identity())
        if events.is_cancelled(self._paths, self._stage, self._attempt):  # while we started
            return self._conclude(Verdict(events.CANCELLED, WORKER_ERROR, "cancelled before it started", None))
        # A job that was submitted by hand has the placeholder of the record.
        missing = [name for name in self._job.get("env_from", ()) if os.environ.get(name, f"<{name}>") == f"<{name}>"]
        if missing:
            reason = f"variables of launcher.env_from did not reach this node: {', '.join(missing)}"
            return self._conclude(Verdict(events.FAILED, USER_ERROR, reason, None))
        device_samples.start(self._paths, self._stage, self._attempt, self._cluster.node_rank)
        try:
            outcome, verdict = self._run_ranks(records)
        except (OSError, ValueError) as error:  # most likely a `python` that does not exist
            return self._conclude(Verdict(events.FAILED, WORKER_ERROR, str(error), None))
        if outcome.unkillable:
            print(f"worker: processes {list(outcome.unkillable)} do not end, not even by SIGKILL", file=sys.stderr)
        return self._conclude(requeue.final(verdict, outcome.stopped_by, self._restarts, self._job.get("max_requeues")))

    def _run_ranks(self, records: Mapping[int, Path]) -> tuple[Outcome, Verdict]:
        """Run what the job has to run before its ranks, then these, and return how it ended."""
        preparing = self._job.get("prepare")
        if preparing is not None:
            reason = self._paths.prepare_reason(self._stage, self._attempt, self._cluster.node_rank)
            reason.unlink(missing_ok=True)  # of a start of this attempt that was cut short
            outcome = self._supervise(rank.numbered(preparing, self._attempt), {}, self._log)
            unprepared = judge_preparation(outcome, rank.read_if_there(reason))
            if unprepared is not None:
                return outcome, unprepared
        foreign = self._job.get("foreign") if self._cluster.node_rank == 0 else None
        collector = Collector(self._paths, foreign, self._attempt, self._stage) if foreign is not None else None
        outcome = self._supervise(self._command(), records, self._rank_log(0), collector)
        verdict = judge(outcome)
        return outcome, verdict if collector is None else collector.finish(verdict)

    def _supervise(
        self, argv: Sequence[str], records: Mapping[int, Path], shown: Path, collector: Collector | None = None
    ) -> Outcome:
        """Run a command of this node to its end; node 0 shows the log `shown`."""

        def beat() -> None:
            for one in (self._mirror, collector):
                if one is not None:
                    one.beat()

        return Supervisor(
            argv,
            self._environment(),
            self._log,
            records,
            self._job["grace_s"],
            self._signals,
            LogFollower(shown, sys.stdout.fileno()) if 0 in self._ranks else None,
            self._peers,
            beat,
        ).run()

    def _conclude(self, verdict: Verdict) -> int:
        """Tell how it ended, on disk and on stderr."""
        extra: dict[str, Any] = {"exit_code": verdict.exit_code, "reason": verdict.reason}
        log = self._log
        if verdict.first is not None:
            extra.update(first_failing_rank=verdict.first.rank, rank_ended=verdict.first.ended)
            log = self._rank_log(verdict.first.rank)
        elif not last_lines(log) and last_lines(self._rank_log(self._ranks[0])):  # nothing was said but by the ranks
            log = self._rank_log(self._ranks[0])
        if verdict.state in (events.FAILED, events.CANCELLED):
            extra["last_lines"] = [self._without_secrets(line) for line in last_lines(log)]
            extra["log"] = str(log.relative_to(self._paths.growing))
        if verdict.state != events.SUCCEEDED:
            seen = self._paths.run_dir / log.relative_to(self._paths.growing)
            print(f"worker: {verdict.state}: {verdict.reason}; see {seen}", file=sys.stderr)
        if verdict.state == events.FAILED and log != self._rank_log(0):  # rank 0 is on the terminal already
            sys.stderr.writelines(f"{line}\n" for line in extra["last_lines"])
        if self._mirror is not None:
            self._mirror.finish()  # who sees the last event looks for the rest
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
        inherited = {name: value for name, value in os.environ.items() if name not in (*_STALE, growing.SCRATCH)}
        own = {} if self._paths.scratch is None else {growing.SCRATCH: str(self._paths.scratch)}
        return {**inherited, **self._job["env"], **_exported(self._cluster), **own}

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
        if self._cluster.num_nodes > 1:
            options["--rdzv-conf"] = f"timeout={ARRIVAL_S}"  # torchrun's own 15 minutes are soon over in a cloud
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
