"""Runs whose stages are Python snippets, recorded and sent to Slurm as dispatch does it."""

import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.slurm.cluster import Cluster, wait_for
from trainwright import dispatch, registry
from trainwright.config import RunConfig
from trainwright.job import JobSpec
from trainwright.node.events import Event, read_events
from trainwright.node.run_paths import RunPaths
from trainwright.plan import make_plan
from trainwright.registry import RunRecord
from trainwright.report import Outcome

OK = "print('fine')"
BOOM = "import sys; print('boom'); sys.exit(7)"
WAITS = "import signal; print('ready', flush=True); signal.pause()"
# Counts its attempts in RUN_DIR, saves when told to and goes on from there; never ends by itself.
COUNTS = """
    import os, pathlib, signal, sys
    saved = pathlib.Path(sys.argv[1], f"saved-{os.environ['NODE_RANK']}")
    count = int(saved.read_text()) if saved.exists() else 0
    def stop(number, _):
        signal.signal(number, signal.SIG_IGN)  # Slurm signals all processes of a step, and our wrapper passes it on
        saved.write_text(str(count + 1))
        sys.exit(75)
    signal.signal(signal.SIGUSR1, stop)
    print("attempt", sys.argv[2], "from", count, flush=True)
    signal.pause()
"""
# The same, but done in its second attempt.
COUNTS_TWO = COUNTS.replace("    signal.pause()\n", "    count or signal.pause()\n")
SMALL = ("launcher.exclusive=false", "launcher.grace_s=5.0", "launcher.signal_s=30", "launcher.time=600")


@dataclass(frozen=True)
class Runs:
    """Makes runs below one shared directory of one cluster."""

    slurm: Cluster
    parsed: Callable[..., RunConfig]
    shared: Path

    def config(self, *overrides: str, num_nodes: int = 1) -> RunConfig:
        config = self.parsed(
            "launcher=slurm",
            *SMALL,
            f"launcher.python={sys.executable}",
            f"hardware.num_nodes={num_nodes}",
            *overrides,
        )
        exp_manager = config.exp_manager.model_copy(update={"exp_dir": f"{self.shared}/experiments"})
        return config.model_copy(update={"exp_manager": exp_manager})

    def make(
        self, *chains: Sequence[str], overrides: Sequence[str] = (), num_nodes: int = 1, **job: Any
    ) -> list[RunRecord]:
        """Return a run for each chain of snippets, arranged for Slurm and recorded; a snippet's argv[1] is RUN_DIR."""
        config = self.config("launcher.wait=true", *overrides, num_nodes=num_nodes)
        records = [self._record(config, registry.new_id("r"), 1, chain, job) for chain in chains]
        return self._create(records)

    def again(self, record: RunRecord, chain: Sequence[str], **job: Any) -> RunRecord:
        """Return the next attempt at a run, recorded."""
        attempt = registry.last_attempt(record.run_dir) + 1
        return self._create([self._record(record.config, record.run_id, attempt, chain, job)])[0]

    def _create(self, records: list[RunRecord]) -> list[RunRecord]:
        arranged = dispatch.arrange(records)
        for record in arranged:
            registry.create(record)
        return arranged

    def _record(
        self, config: RunConfig, run_id: str, attempt: int, chain: Sequence[str], job: dict[str, Any]
    ) -> RunRecord:
        run_dir = str(registry.run_dir(config, run_id))
        fields: dict[str, Any] = {
            "launch": "plain",
            "python": sys.executable,
            "env": {"MARK": run_id},
            "num_nodes": config.hardware.num_nodes,
            "devices": 1,
            "image": None,
            "time_limit_s": getattr(config.launcher, "time"),  # noqa: B009  every launcher here is Slurm's
            "grace_s": config.launcher.grace_s,
            "files": {},
        }
        jobs = tuple(
            JobSpec(
                run_id=run_id,
                run_dir=run_dir,
                stage=f"s{number}",
                attempt=attempt,
                command=(sys.executable, "-c", textwrap.dedent(code), run_dir, "{attempt}"),
                **{**fields, **job},
            )
            for number, code in enumerate(chain)
        )
        return RunRecord(
            run_id=run_id,
            attempt=attempt,
            config=config,
            plan=make_plan(config),
            findings=(),
            jobs=jobs,
            overrides=(f"run={run_id}",),
        )

    def follow(self, *chains: Sequence[str], **rest: Any) -> list[Outcome]:
        """Make runs, submit them and follow them to their ends."""
        return dispatch.submit_and_follow(self.make(*chains, **rest))

    def start(self, chain: Sequence[str], overrides: Sequence[str] = (), **rest: Any) -> RunRecord:
        """Make one run and submit it without following it."""
        (record,) = self.make(chain, overrides=("launcher.wait=false", *overrides), **rest)
        dispatch.submit_and_follow([record])
        return record


def history(run: RunRecord | Outcome) -> tuple[Event, ...]:
    told = read_events(RunPaths(run.run_dir))
    assert told.unreadable == ()
    return told.events


def stages(run: RunRecord | Outcome) -> dict[str | None, str]:
    return {stage.stage: stage.state for stage in registry.refresh(run.run_dir).stages}


def log(run: RunRecord | Outcome, stage: str = "s0", rank: int = 0, attempt: int = 1) -> str:
    path = RunPaths(run.run_dir).rank_log(stage, attempt, rank)
    return path.read_text() if path.exists() else ""


def await_log(run: RunRecord, text: str, *, rank: int = 0, attempt: int = 1) -> None:
    wait_for(lambda: text in log(run, rank=rank, attempt=attempt), f"{text!r} in the log of rank {rank}")


def await_state(run: RunRecord, state: str) -> None:
    wait_for(lambda: registry.refresh(run.run_dir).state == state, f"{run.run_id} is {state}")


def job_id(run: RunRecord | Outcome, stage: str = "s0") -> str:
    told = [event.extra["job_id"] for event in history(run) if event.state == "SUBMITTED" and event.stage == stage]
    return str(told[-1])


def processes(mark: str) -> list[int]:
    """Return the living processes that carry a run's mark in their environment."""
    wanted = f"MARK={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def read_json(path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(path.read_text())
    return tree
