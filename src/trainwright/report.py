"""What the terminal shows of a batch of runs: warnings, starts, ends, the table, where everything is."""

import shlex
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright import registry
from trainwright.job import JobSpec
from trainwright.node import events
from trainwright.node.run_paths import RunPaths
from trainwright.node.run_state import RunState
from trainwright.registry import RunRecord
from trainwright.scheduler import JobState

_PATIENCE_S = 5.0  # for which a terminal may say nothing


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run stands when the command ends."""

    run_id: str
    run_dir: Path
    state: str
    exit_code: int  # for the shell: 0, 1 or 75
    overrides: tuple[str, ...]
    attempt: int
    reason: str | None  # None: nothing to explain
    results: Mapping[str, Any] | None  # results.json; None: the run wrote none

    @classmethod
    def of(cls, record: RunRecord, *, reason: str | None = None, results: Any = None, **rest: Any) -> "Outcome":
        return cls(
            run_id=record.run_id,
            overrides=record.overrides,
            attempt=record.attempt,
            reason=reason,
            results=results,
            **rest,
        )

    @property
    def val_loss(self) -> float | None:
        """The last validation loss in nats; None where the run has none."""
        value = (self.results or {}).get("val_loss")
        return float(value) if value is not None else None  # "nan" is text in JSON

    @property
    def failure(self) -> str:
        """One line that says what went wrong and where to read more."""
        log = RunPaths(self.run_dir).logs
        return f"{self.run_id} {self.state}" + (f": {self.reason}" if self.reason else "") + f"\nlogs: {log}"


def say(line: str) -> None:
    print(line, flush=True)


def warn(line: str) -> None:
    print(line if line.startswith("warning") else f"warning: {line}", file=sys.stderr, flush=True)


@contextmanager
def patience(whom: object, patience_s: float = _PATIENCE_S) -> Iterator[None]:
    """Say that `whom` is waited for, if what is done meanwhile takes long: without a network it may be a minute."""
    timer = threading.Timer(patience_s, sys.stderr.write, [f"waiting for an answer from {whom}\n"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def sweep(folder: Path) -> None:
    """Name a sweep, and the commands that follow all of it."""
    say(f"sweep        {folder}")
    for does, command in (("results", "results"), ("cancel", "cancel"), ("again", "retry")):
        say(f"{does:<12} trainwright {command} {shlex.quote(str(folder))}")


def started(record: RunRecord, jobs: Sequence[JobSpec], records: Sequence[RunRecord]) -> None:
    place = f" {records.index(record) + 1}/{len(records)}" if len(records) > 1 else ""
    stage = f" {_stages(jobs)}" if len(record.jobs) > 1 else ""
    is_later = jobs[0] != record.jobs[0]  # the run's words stood at its first stage
    say(f"run{place}  {record.run_id}{stage}  {'' if is_later else ' '.join(record.overrides)}".rstrip())


def _stages(jobs: Sequence[JobSpec]) -> str:
    return "+".join(job.stage for job in jobs)


def detached(jobs: Mapping[str, tuple[RunRecord, Sequence[JobSpec]]], known: Mapping[str, JobState]) -> None:
    """Name the jobs that run on without this command, and what those wait for that wait."""
    for job_id, (record, of_job) in jobs.items():
        say(f"job {job_id}  {record.run_id} {_stages(of_job)}  {' '.join(record.overrides)}".rstrip())
        if job_id in known and known[job_id].reason is not None and known[job_id].state not in events.ENDED:
            waits(job_id, str(known[job_id].reason))


def asks(question: str, *, interrupt_says_yes: bool = False) -> bool:
    """Return whether the user says yes. Without a terminal nobody does.

    Ctrl-C at the question raises KeyboardInterrupt, unless it says yes, too.
    """
    if not sys.stdin.isatty():
        return False
    print(f"\n{question} [y/N] ", end="", file=sys.stderr, flush=True)
    try:
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    except KeyboardInterrupt:
        if interrupt_says_yes:
            return True
        raise


def waits(job_id: str, reason: str) -> None:
    say(f"job {job_id} waits  {reason}")


def progress(job_id: str, step: int, max_steps: int | None, train_loss: float | None) -> None:
    loss = "" if train_loss is None else f"  train_loss {train_loss:.4f}"
    say(f"job {job_id}  step {step}/{max_steps}{loss}")


def skipped(record: RunRecord, stage: str, reason: str) -> None:
    say(f"skipped  {record.run_id} {stage}: {reason}")


def stages_ended(jobs: Sequence[JobSpec], state: RunState) -> None:
    """Tell how the stages of one job of a run ended."""
    known = {stage.stage: stage for stage in state.stages}
    for job in jobs:
        stage = known[job.stage]
        has_spoken = stage.reason and stage.state not in (
            events.CANCELLED,
            events.NOT_SUBMITTED,
        )  # of others, too often
        say(f"end  {job.run_id} {job.stage}  {stage.state}" + (f": {stage.reason}" if has_spoken else ""))


def ended(outcome: Outcome) -> None:
    loss = "" if outcome.val_loss is None else f"  val_loss {outcome.val_loss:.4f}"
    say(f"end  {outcome.run_id}  {outcome.state}{loss}")


def dry_run(record: RunRecord, aside: Path, files: Sequence[Path], commands: Sequence[str]) -> None:
    """Show a plan, the files that are recorded and the commands that would submit them without us."""
    plan = record.plan
    say(f"dry run of {record.run_id}; nothing was submitted")
    say(
        f"  {plan.num_parameters:,} parameters, {plan.world_size} devices, data parallel {plan.data_parallel_size}, "
        f"accumulation {plan.accumulate_grad_batches}, {plan.max_steps} steps, {plan.consumed_samples:,} samples"
    )
    for path in files:
        say(f"  {path}")
    for command in commands:
        say(f"by hand      {command}")


def summary(outcomes: Sequence[Outcome]) -> None:
    """Show one run in words, several as a table."""
    if len(outcomes) == 1:
        for line in _one_run(outcomes[0]):
            say(line)
    elif outcomes:
        _table(outcomes)


def _one_run(outcome: Outcome) -> Iterator[str]:
    results, paths = outcome.results or {}, RunPaths(outcome.run_dir)
    yield f"{outcome.state.lower()}    {outcome.run_id}"
    if outcome.val_loss is not None:
        yield f"val_loss     {outcome.val_loss:.4f}" + _unigram(results)
    yield f"directory    {outcome.run_dir}"
    for saved in (results.get("checkpoints") or [])[-1:]:
        yield f"checkpoint   {outcome.run_dir / saved['path']}"
    if results:
        yield f"results      {paths.results}"
    export = registry.newest_export(outcome.run_dir)
    if export is not None:
        yield f"export       {export}"
    run = shlex.quote(str(outcome.run_dir))
    if outcome.state in events.ENDED:
        yield f"logs         trainwright logs {run}"
    else:
        yield f"follow       trainwright logs --follow {run}"
        yield f"status       trainwright status {run}"
        yield f"cancel       trainwright cancel {run}"
    if outcome.state in events.ENDED and outcome.state != events.SUCCEEDED:
        yield f"again        trainwright retry {run}"
    yield f"tensorboard  trainwright tensorboard {run}"


def _unigram(results: Mapping[str, Any]) -> str:
    unigram = results.get("unigram_loss")
    return "" if unigram is None else f" (unigram model {unigram:.4f}, margin {unigram - results['val_loss']:.4f})"


def _table(outcomes: Sequence[Outcome]) -> None:
    from rich.console import Console
    from rich.table import Table

    values = [dict(_assignment(override) for override in outcome.overrides) for outcome in outcomes]
    keys = list(dict.fromkeys(key for assignments in values for key in assignments))
    differing = [key for key in keys if len({assignments.get(key) for assignments in values}) > 1]
    table = Table("run", *differing, "state", "val_loss", "time", box=None, header_style="bold", pad_edge=False)
    for outcome, assignments in zip(outcomes, values, strict=True):
        loss = "" if outcome.val_loss is None else f"{outcome.val_loss:.4f}"
        seconds = (outcome.results or {}).get("wall_s")
        table.add_row(
            outcome.run_id,
            *(assignments.get(key, "") for key in differing),
            outcome.state,
            loss,
            "" if seconds is None else f"{seconds:.0f} s",
        )
    # A table that is piped must not be cut at a width that nobody sees.
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _assignment(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key.lstrip("+"), value
