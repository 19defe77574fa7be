"""`worker.pyz nxdt RUN_DIR --stage compile|train --attempt N`: what NxDT's train.sh does on one node, without root.

The worker starts it as the only rank of its node. It sets the environment up, lets node 0 decide for all nodes (skip,
fresh or resume), starts torchrun, below neuron_parallel_compile in the compile stage, and judges how that ended.
Sources: neuronx-distributed-training, examples/train.sh and train_setup.sh.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from pathlib import Path
from typing import Callable, Sequence

from . import address, decision, drive, growing, janitor, neuron_cache, node_limits
from .cluster_env import LOOPBACK
from .compile_gate import CompileGate
from .decision import FRESH, RESUME, SKIP, Decision
from .drive import FAILED, USER_ERROR, DriverError, say
from .janitor import JanitorError
from .lock_watch import LockWatch
from .neuron_cache import CacheUse, Compiled
from .nxdt_setup import command, environment, package_versions, read_settings
from .peers import Peers
from .rank import PREEMPTED_CODE
from .run_paths import RunPaths
from .signals import SignalQueue, signal_name

COMPILE, TRAIN = "compile", "train"
_GRACE_SHARE = 0.7  # of the job's grace for the child; the rest is for us to tell how it ended


def main(argv: Sequence[str]) -> int:
    """Run this node's part of a stage of NxDT and return its exit code."""
    parser = argparse.ArgumentParser(prog="worker.pyz nxdt", description="Run NxDT on this node of a run.")
    parser.add_argument("run_dir", help="the run directory")
    parser.add_argument("--stage", required=True, choices=[COMPILE, TRAIN])
    parser.add_argument("--attempt", type=int, required=True)
    arguments = parser.parse_args(argv)
    paths = RunPaths(arguments.run_dir, growing.scratch_of(os.environ))
    driver = _Driver(paths, arguments.stage, arguments.attempt, drive.queue_signals())
    try:
        return driver.run()
    except DriverError as error:
        return driver.give_up(error, error.code)
    except JanitorError as error:
        return driver.give_up(error, USER_ERROR)
    except OSError as error:
        return driver.give_up(error, FAILED)


class _Driver:
    """One node's part of a stage."""

    def __init__(self, paths: RunPaths, stage: str, attempt: int, signals: SignalQueue) -> None:
        self._paths, self._stage, self._attempt, self._signals = paths, stage, attempt, signals
        self._node = int(os.environ.get("NODE_RANK", "0"))
        self._num_nodes = int(os.environ.get("NNODES", "1"))
        self._next_beat = 0.0

    def explain(self, reason: str) -> None:
        """Leave the reason where the worker looks for it, in one line."""
        file = self._paths.rank_reason(self._stage, self._attempt, self._node)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(" ".join(reason.split()) + "\n", encoding="utf-8")

    def give_up(self, error: Exception, code: int) -> int:
        """Tell why the stage cannot go on and return its exit code."""
        say(f"cannot go on: {error}")
        with contextlib.suppress(OSError):  # it may be the disk that is full
            self.explain(str(error))
        return code

    def run(self) -> int:
        """Run to the end. Raises DriverError, JanitorError and OSError."""
        self._job = json.loads(self._paths.job(self._attempt, self._stage).read_text(encoding="utf-8"))
        self._folder, self._settings = read_settings(self._paths, self._attempt)
        self._bin = Path(self._settings["python"]).parent
        self._check_programs()
        self._told_port = int(os.environ["MASTER_PORT"]) if os.environ.get("MASTER_PORT") else None
        self._report_findings()
        self._cache = None if neuron_cache.is_remote(self._settings["cache_url"]) else Path(self._settings["cache_url"])
        self._use = self._begin_use()
        try:
            return self._run_decided()
        finally:
            if self._use is not None:
                self._use.end()

    def _run_decided(self) -> int:
        decided = self._decide() if self._node == 0 else self._await_decision()
        if decided is None:
            return self._stopped("nothing was started")
        say(f"{self._stage}: {decided.what}: {decided.reason}")
        if decided.what == SKIP:
            self.explain(f"skipped: {decided.reason}")
            return 0
        gate = CompileGate(self._settings["cache_url"])
        if self._stage == COMPILE:
            return self._compile(decided, gate)
        return self._train(decided, gate)

    # ---- the two stages

    def _compile(self, decided: Decision, gate: CompileGate) -> int:
        told = ""
        locks = self._locks() if self._node == 0 else None

        def on_tick() -> None:
            nonlocal told
            self._beat()
            if locks is not None:
                say("\n".join(locks.look(gate, time.monotonic())))
            progress = gate.progress()
            if progress is not None and progress != told:
                told = progress
                say(f"compile: {progress}")

        end = self._start(decided, gate, on_tick)
        if end.stopped_by is not None:
            return self._stopped("what is compiled stays in the cache")
        problem = gate.problem(end.code, self._is_done)
        if problem is not None:
            self.explain(problem)
            say(f"compile has failed: {problem}")
            return end.code or FAILED
        say("compile gate: passed")
        self._remember(gate)
        return 0

    def _train(self, decided: Decision, gate: CompileGate) -> int:
        end = self._start(decided, gate, self._beat)
        cause = str(gate.causes) if end.code and end.stopped_by is None else ""
        if end.stopped_by is not None:
            return self._stopped("the next attempt goes on from the newest complete checkpoint")
        if cause:
            self.explain(cause)
        if end.code:
            say(f"train has failed with exit code {end.code}; {cause or 'no known cause in its output'}")
        return end.code

    def _start(self, decided: Decision, gate: CompileGate, on_tick: Callable[[], None]) -> drive.ChildEnd:
        settings = self._settings
        argv = command(
            settings,
            compiles=self._stage == COMPILE,
            folder=self._folder,
            config=RESUME if decided.what == RESUME else FRESH,
            node=self._node,
            num_nodes=self._num_nodes,
            master_addr=os.environ.get("MASTER_ADDR") or LOOPBACK,
            master_port=self._told_port or address.free_port(),  # a single node meets itself
        )
        env, notes = environment(os.environ, settings, kept=self._job["env"], compiles=self._stage == COMPILE)
        for note in notes:
            say(note)
        say(f"starting {' '.join(argv)}")
        return drive.run(
            argv,
            env=env,
            cwd=Path(settings["orchestrator"]).parent,
            signals=self._signals,
            grace_s=float(self._job["grace_s"]) * _GRACE_SHARE,
            on_line=lambda line: gate.feed(line, time.monotonic()),
            on_tick=on_tick,
            on_stop=lambda number: say(
                f"told to stop by {signal_name(number)}; NxDT saves nothing on a signal, so the steps since its last "
                "checkpoint are lost"
                if self._stage == TRAIN
                else f"told to stop by {signal_name(number)}"
            ),
        )

    def _stopped(self, what_now: str) -> int:
        """Ask for another start: a job that is told to stop, for time or for others, is begun again where it can be."""
        say(f"stopped; {what_now}")
        return PREEMPTED_CODE

    # ---- what node 0 does for all, and the others wait for

    def _decide(self) -> Decision:
        locks = self._locks()
        if locks is None:
            say("locks in a bucket are not looked at; neuron_parallel_compile --command clear-locks does")
        else:
            say("\n".join(locks.before_start()))
        decided = self._decide_compile() if self._stage == COMPILE else self._decide_train()
        decision.publish(self._paths.nxdt_decision(self._stage, self._attempt), decided, self._num_nodes)
        return decided

    def _decide_compile(self) -> Decision:
        if self._cache is None:
            return Decision(
                FRESH, f"{self._settings['cache_url']} is a bucket, which is not looked into: always compiled"
            )
        versions = package_versions(self._settings["python"])
        key = self._settings["cache_key"]
        why, num_graphs = neuron_cache.why_compile(self._cache, key, versions, self._num_nodes)
        if why is not None:
            return Decision(FRESH, why)
        return Decision(SKIP, f"all {num_graphs} graphs are in {self._cache}, made with the same key and versions")

    def _decide_train(self) -> Decision:
        order = janitor.tidy(
            self._paths.checkpoints,
            has_resumed=decision.has_resumed(
                self._paths.nxdt_decision(TRAIN, attempt) for attempt in range(1, self._attempt)
            ),
            may_ignore_damaged=decision.may_ignore_damaged(self._paths, self._attempt),
        )
        for action in order.actions:
            say(f"janitor: {action}")
        if order.checkpoint is None:
            return Decision(FRESH, "no checkpoint yet; starting from the pretrained weights")
        return Decision(RESUME, f"from {order.checkpoint.path.name}, step {order.checkpoint.step}")

    def _await_decision(self) -> Decision | None:
        """Return what node 0 has decided; None: we were told to stop."""
        return decision.wait_for(
            self._paths.nxdt_decision(self._stage, self._attempt),
            Peers(self._paths, self._stage, self._attempt, self._node, self._num_nodes),
            self._signals,
        )

    # ---- the cache

    def _begin_use(self) -> CacheUse | None:
        if self._cache is None:
            return None
        use = CacheUse(self._cache, run_dir=str(self._paths.run_dir), stage=self._stage, node=self._node)
        use.begin()
        return use

    def _beat(self) -> None:
        if self._use is not None and time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + neuron_cache.BEAT_S
            self._use.beat()

    def _locks(self) -> LockWatch | None:
        return None if self._cache is None else LockWatch(self._cache, self._paths.run_dir, self._num_nodes)

    def _is_done(self, graph: str) -> bool:
        return self._cache is not None and neuron_cache.is_done(self._cache, graph)

    def _remember(self, gate: CompileGate) -> None:
        if self._cache is None:
            return
        graphs = gate.graphs or {f"{m.compiler}/{m.name}" for m in neuron_cache.modules(self._cache)}
        missing = sorted(graph for graph in graphs if not self._is_done(graph))
        if missing:
            say(f"{len(missing)} of {len(graphs)} graphs are not in {self._cache}, first {missing[0]}: not remembered")
            return
        compiled = Compiled(
            key=self._settings["cache_key"],
            key_of=self._settings["cache_key_of"],
            versions=package_versions(self._settings["python"]),
            graphs=tuple(sorted(graphs)),
        )
        neuron_cache.record(self._cache, compiled, node=self._node, num_nodes=self._num_nodes)

    # ---- before it starts

    def _check_programs(self) -> None:
        tools = ["torchrun"] + ["neuron_parallel_compile"] * (self._stage == COMPILE)
        missing = [str(self._bin / tool) for tool in tools if not os.access(self._bin / tool, os.X_OK)]
        if missing:
            raise DriverError(f"{', '.join(missing)}: not there; backend.python must be of a Neuron environment")
        if not Path(self._settings["orchestrator"]).exists():
            raise DriverError(f"{self._settings['orchestrator']} is not there; set backend.nxdt_dir to NxDT's checkout")

    def _report_findings(self) -> None:
        findings = node_limits.raise_open_files(self._settings["max_open_files"]) + node_limits.check(
            num_nodes=self._num_nodes, master_port=self._told_port, reserved_port=self._settings["reserved_port"]
        )
        for finding in findings:
            say(str(finding))
        file = self._paths.nxdt_findings(self._stage, self._attempt, self._node)
        file.parent.mkdir(parents=True, exist_ok=True)
        content = {"schema_version": 1, "findings": [finding.to_json() for finding in findings]}
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
