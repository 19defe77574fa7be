"""The walk of a batch of runs: parse, plan, check, render, record, submit, follow.

    DictConfig -> RunConfig -> Plan -> [Finding] -> JobSpec per stage -> recorded run -> submitted job -> outcome

All runs of a batch are checked before the first is recorded, and all are recorded before the first is submitted.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from omegaconf import DictConfig

from trainwright import preflight, registry, report, scheduler
from trainwright.backends import RENDERERS
from trainwright.config import RunConfig
from trainwright.errors import EXIT_FAILED, EXIT_PREEMPTED, RefusedError, UserError
from trainwright.job import JobSpec
from trainwright.node import events
from trainwright.plan import make_plan
from trainwright.registry import RunRecord


@dataclass(frozen=True, kw_only=True)
class Composed:
    """One run as Hydra composed it."""

    number: int
    overrides: tuple[str, ...]
    tree: DictConfig


def dispatch(batch: Sequence[Composed]) -> list[report.Outcome]:
    """Take a batch of runs from composed config to outcome, in the batch's order.

    Raises UserError when a config does not parse, RefusedError when preflight finds errors: then nothing was recorded.
    """
    records = prepare(batch)
    refuse_errors(records)
    real = [record for record in records if not record.config.dry_run]
    for record in real:
        registry.create(record)
    if len(real) > 1:
        report.say(f"sweep  {registry.create_sweep(real)}")
    recorded = [record_dry_run(record) for record in records if record.config.dry_run]
    outcomes = {outcome.run_id: outcome for outcome in (*recorded, *submit_and_follow(real))}
    return [outcomes[record.run_id] for record in records]


def refuse_too_many(count: int, max_jobs: int | None) -> None:
    """Raise UserError when a sweep has more runs than `max_jobs` allows."""
    if max_jobs is not None and count > max_jobs:
        raise UserError(f"max_jobs: this sweep has {count} runs, {max_jobs} are allowed; add --yes if you mean it")


def prepare(batch: Sequence[Composed]) -> list[RunRecord]:
    """Parse, plan, check and render every run. Raises UserError with the problems of all that do not parse."""
    records: dict[str, RunRecord] = {}
    problems = []
    for job in batch:
        try:
            record = _prepare(job, Path.cwd(), taken=records.keys())
            records[record.run_id] = record
        except UserError as error:
            problems.append(f"{_label(batch, job)}{error}")
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    return list(records.values())


def _prepare(job: Composed, cwd: Path, taken: Collection[str]) -> RunRecord:
    config = RunConfig.from_hydra(job.tree).with_absolute_paths(cwd)
    plan = make_plan(config)
    if config.run_id in taken:
        raise UserError(f"run_id: {config.run_id} would be several runs of one sweep; leave run_id out")
    run_id = config.run_id or registry.new_id(config.name, lambda made: made in taken)
    run_dir = registry.run_dir(config, run_id)
    attempt = registry.last_attempt(run_dir) + 1
    facts = preflight.look(config, built_backends=RENDERERS.keys(), built_launchers=scheduler.installed())
    if attempt > 1:
        if not config.exp_manager.resume_if_exists:
            raise UserError(
                f"run_id: {run_id} exists and exp_manager.resume_if_exists=false; set it to true or give another run_id"
            )
        before = registry.read_record(run_dir, attempt - 1)["config"]
        facts = replace(facts, changed_keys=registry.changed_keys(before, config.to_dict()))
    render = RENDERERS.get(config.backend.kind)
    return RunRecord(
        run_id=run_id,
        attempt=attempt,
        config=config,
        plan=plan,
        findings=tuple(preflight.check(config, plan, facts)),
        jobs=render(config, plan, run_id=run_id, run_dir=str(run_dir), attempt=attempt) if render else (),
        overrides=job.overrides,
    )


def refuse_errors(records: Sequence[RunRecord]) -> None:
    """Print all warnings; raise RefusedError with all errors of all runs."""
    texts: dict[str, list[str]] = {"warning": [], "error": []}
    for record in records:
        for finding in record.findings:
            texts[finding.severity].append(f"{_label(records, record)}{finding}")
    for line in dict.fromkeys(texts["warning"]):
        report.warn(line)
    if texts["error"]:
        raise RefusedError("\n".join(dict.fromkeys(texts["error"])))


def record_dry_run(record: RunRecord) -> report.Outcome:
    """Record a run aside, list every file and submit nothing."""
    config = record.config
    folder = Path(config.exp_manager.dry_run_dir) / config.name
    aside = folder / registry.new_id(config.name, lambda made: (folder / made).exists())
    files = registry.create(record, at=aside)
    report.dry_run(record, aside, files)
    return report.Outcome.of(record, state=events.PLANNED, exit_code=0, run_dir=aside)


def submit_and_follow(records: Sequence[RunRecord]) -> list[report.Outcome]:
    """Submit all runs, each stage behind the one before, and follow those whose scheduler is attached."""
    submitted: dict[str, tuple[RunRecord, JobSpec]] = {}
    schedulers: dict[str, scheduler.Scheduler] = {}
    for record in records:
        kind = record.config.launcher.kind
        if kind not in schedulers:
            schedulers[kind] = scheduler.open_scheduler(record.config)
        before: tuple[str, ...] = ()
        for job in record.jobs:
            job_id = schedulers[kind].submit(job, after=before)
            registry.note(record, events.SUBMITTED, stage=job.stage, job_id=job_id)
            submitted[job_id], before = (record, job), (job_id,)

    def on_start(job_id: str) -> None:
        report.started(*submitted[job_id], records)

    def on_end(ended: scheduler.Ended) -> None:
        record, job = submitted[ended.job_id]
        settle(record, job.stage, ended)
        if len(records) > 1 and job == record.jobs[-1]:
            report.ended(outcome(record))

    for opened in schedulers.values():
        if opened.is_attached:
            opened.wait(on_start, on_end)
    outcomes = [outcome(record) for record in records]
    report.summary(outcomes)
    return outcomes


def settle(record: RunRecord, stage: str, ended: scheduler.Ended) -> None:
    """Add the scheduler's word where the nodes left none: a job that never started, a worker that was killed."""
    if ended.exit_code is None:
        registry.note(record, events.NOT_SUBMITTED, stage=stage, reason="stopped before it started")
        return
    told = {known.stage: known.state for known in registry.refresh(record.run_dir).stages}
    if told[stage] not in events.ENDED:
        state = events.FAILED if ended.exit_code else events.SUCCEEDED
        reason = f"the worker ended with exit code {ended.exit_code} and left no word"
        registry.note(record, state, stage=stage, exit_code=ended.exit_code, reason=reason)


def outcome(record: RunRecord) -> report.Outcome:
    """Return how a run stands: state, exit code for the shell, last metric."""
    state = registry.refresh(record.run_dir)
    exit_code = {events.PREEMPTED: EXIT_PREEMPTED}.get(state.state, EXIT_FAILED)
    is_fine = state.state in (events.SUCCEEDED, events.SUBMITTED, events.QUEUED, events.RUNNING)
    return report.Outcome.of(
        record,
        state=state.state,
        exit_code=0 if is_fine else exit_code,
        run_dir=record.run_dir,
        reason=state.reason,
        results=registry.results(record.run_dir),
    )


def run_here(job: Composed) -> float | None:
    """Train in this process and return the last validation loss. Recorded like any run, but one rank only.

    Raises UserError where the run needs more than one process or another backend or launcher.
    """
    (record,) = prepare([job])
    if record.plan.world_size > 1 or record.config.launcher.kind != "local" or record.config.backend.kind != "native":
        raise UserError(
            "hydra.mode=RUN trains in this process: use launcher=local backend=native and a world size of 1"
        )
    refuse_errors([record])
    if record.config.dry_run:
        record_dry_run(record)
        return None
    from trainwright.backends.native.train import train

    registry.create(record)
    registry.note(record, events.RUNNING, stage="train")
    try:
        train(record.config, record.run_dir, record.attempt)
    except BaseException as error:
        registry.note(record, events.FAILED, stage="train", exit_code=1, reason=repr(error))
        raise
    registry.note(record, events.SUCCEEDED, stage="train", exit_code=0)
    final = outcome(record)
    report.summary([final])
    return final.val_loss


def _label(all_of_them: Sequence[object], one: Composed | RunRecord) -> str:
    """Return what tells one run of a sweep from the others, ahead of a message."""
    return f"[{' '.join(one.overrides)}] " if len(all_of_them) > 1 and one.overrides else ""
