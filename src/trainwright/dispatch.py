"""The walk of a batch of runs: parse, plan, check, render, record, submit, follow.

    DictConfig -> RunConfig -> Plan -> [Finding] -> JobSpec per stage -> recorded run -> submitted job -> outcome

All runs of a batch are checked before the first is recorded, and all are recorded before the first is submitted.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from trainwright import code_state, exp_manager, preflight, registry, report, scheduler, stages, storage
from trainwright.backends import RENDERERS
from trainwright.code_state import CodeState
from trainwright.config import RunConfig
from trainwright.errors import EXIT_FAILED, EXIT_PREEMPTED, RefusedError, UserError
from trainwright.job import JobSpec
from trainwright.node import events
from trainwright.node.run_paths import RunPaths
from trainwright.node.run_state import StageState
from trainwright.plan import make_plan
from trainwright.registry import RunRecord
from trainwright.rules import Facts

_Problems = tuple[tuple[str, str], ...]  # (what is wrong, what to do)


@dataclass(frozen=True, kw_only=True)
class Composed:
    """One run as Hydra composed it."""

    number: int
    overrides: tuple[str, ...]
    tree: DictConfig
    directory: Path = field(default_factory=Path.cwd)  # where its relative paths start
    goes_on: bool = False  # a retry: of the stages that it names, those that are done are not repeated


def dispatch(batch: Sequence[Composed], *, is_new_sweep: bool = True) -> list[report.Outcome]:
    """Take a batch of runs from composed config to outcome, in the batch's order.

    Several runs are listed as a sweep, unless they belong to one already.
    Raises UserError when a config does not parse, RefusedError when preflight finds errors: then nothing was recorded.
    """
    records = prepare(batch)
    refuse_errors(records)
    records = arrange(records)
    real = [record for record in records if not record.config.dry_run]
    for record in real:
        registry.create(record)
    if len(real) > 1 and is_new_sweep:
        report.sweep(registry.create_sweep(real))
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
    look_at_code = functools.cache(code_state.look)  # once for all runs that start from the same place
    look_at_bucket = functools.cache(storage.problems)
    ask_scheduler = _asked_once(scheduler.problems)
    for job in batch:
        try:
            record = _prepare(job, look_at_code, look_at_bucket, ask_scheduler, taken=records.keys())
            records[record.run_id] = record
        except UserError as error:
            problems.append(f"{_label(batch, job)}{error}")
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    return list(records.values())


def _prepare(
    job: Composed,
    look_at_code: Callable[..., CodeState | None],
    look_at_bucket: Callable[[Path], _Problems],
    ask_scheduler: Callable[[RunConfig], _Problems],
    taken: Collection[str],
) -> RunRecord:
    config = RunConfig.from_hydra(job.tree).with_absolute_paths(job.directory)
    plan = make_plan(config)
    fixed = exp_manager.fixed_run_id(config)
    if fixed in taken:
        raise UserError(f"run_id: {fixed} would be several runs of one sweep; leave run_id out")
    run_id = fixed or registry.new_id(config.name, lambda made: made in taken)
    run_dir = exp_manager.run_dir(config, run_id)
    seen = _seen_from_here(config, run_dir)
    with report.patience(seen):
        bucket_problems = look_at_bucket(seen.parent) if seen is not None else ()
    may_exist = fixed is not None and not bucket_problems
    attempt = 1 + (registry.last_attempt(seen) if may_exist and seen is not None else 0)
    outputs = (config.exp_manager.exp_dir, config.exp_manager.dry_run_dir)
    code = look_at_code(job.directory, leave_out=outputs, hidden=config.launcher.env_from)
    with report.patience(f"launcher={config.launcher.kind}"):
        scheduler_problems = ask_scheduler(config)
    facts = preflight.look(
        config,
        code=code,
        built_backends=RENDERERS.keys(),
        built_launchers=scheduler.installed(),
        scheduler_problems=scheduler_problems,
        bucket_problems=bucket_problems,
    )
    if attempt > 1 and seen is not None:
        facts = _with_attempt_before(facts, config, seen, attempt - 1)
    render = RENDERERS.get(config.backend.kind)
    jobs = render(config, plan, run_id=run_id, run_dir=str(run_dir), attempt=attempt) if render else ()
    jobs = stages.select(jobs, config) if jobs else ()
    stages.refuse_unguarded(jobs, config)
    return RunRecord(
        run_id=run_id,
        attempt=attempt,
        config=config,
        plan=plan,
        findings=tuple(preflight.check(config, plan, facts)),
        jobs=surround(jobs, config, code),
        overrides=job.overrides,
        directory=job.directory,
        code=code,
        goes_on=job.goes_on,
    )


def _with_attempt_before(facts: Facts, config: RunConfig, run: Path, attempt: int) -> Facts:
    if not config.exp_manager.resume_if_exists:
        raise UserError(
            f"run_id: {run.name} exists and exp_manager.resume_if_exists=false; set it to true or give another run_id"
        )
    before = registry.read_record(run, attempt)["config"]
    changed = registry.changed_keys(before, config.to_dict())
    return replace(facts, changed_keys=changed, holder=registry.holder(run, attempt))


def _asked_once(ask: Callable[[RunConfig], _Problems]) -> Callable[[RunConfig], _Problems]:
    """Return `ask` for the runs of a sweep: a scheduler says the same of all that have one launcher and no id yet."""
    answers: dict[tuple[str, str | None, bool], _Problems] = {}

    def answer(config: RunConfig) -> _Problems:
        key = (config.launcher.model_dump_json(), exp_manager.fixed_run_id(config), config.dry_run)
        if key not in answers:
            answers[key] = ask(config)
        return answers[key]

    return answer


def _seen_from_here(config: RunConfig, run_dir: Path) -> Path | None:
    """Return where a run's directory is to be looked at; None: nowhere, for a dry run asks no bucket."""
    if config.launcher.kind == "vertex" and (config.dry_run or "<site." in str(run_dir)):
        return None
    return storage.seen_from_here(config, str(run_dir))


def surround(jobs: Sequence[JobSpec], config: RunConfig, code: CodeState | None) -> tuple[JobSpec, ...]:
    """Add to jobs what does not follow from the config alone: secrets by name, the code of this moment."""
    arranged = []
    for job in jobs:
        snapshot = code_state.snapshot_env(code, RunPaths(job.run_dir), job.attempt) if code is not None else {}
        env = {**snapshot, **job.env} if config.code == "snapshot" else job.env
        arranged.append(replace(job, env=env, env_from=config.launcher.env_from))
    return tuple(arranged)


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


def arrange(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Add to every job what its scheduler is given, and to those of a Slurm sweep the lane in which they queue."""
    arranged, in_slurm = [], []
    for record in records:
        jobs, launcher = record.jobs, record.config.launcher
        if launcher.kind == "slurm" and launcher.max_parallel is not None and len(records) > 1:
            in_slurm.append(record.run_id)
            lane = f"{in_slurm[(len(in_slurm) - 1) % launcher.max_parallel]}-lane"  # named for the first run in it
            jobs = tuple(replace(job, lane=lane) for job in jobs)
        if stages.share_a_job(record.config):
            jobs = stages.chain(jobs)
        if launcher.kind in scheduler.installed():
            opened = scheduler.open_scheduler(record.config)
            jobs = tuple(opened.arrange(job) for job in jobs)
        arranged.append(replace(record, jobs=jobs))
    return arranged


def record_dry_run(record: RunRecord) -> report.Outcome:
    """Record a run aside, list every file and submit nothing."""
    config = record.config
    aside = Path(config.exp_manager.dry_run_dir) / config.name / record.run_id
    if aside.exists():  # of an earlier dry run with the same run_id
        aside = aside.with_name(registry.new_id(record.run_id, lambda made: aside.with_name(made).exists()))
    files = registry.create(record, at=aside)
    opened = scheduler.open_scheduler(config) if config.launcher.kind in scheduler.installed() else None
    first_of_jobs = record.jobs[:1] if stages.share_a_job(config) else record.jobs
    commands = [opened.by_hand(job, RunPaths(aside).own) for job in first_of_jobs] if opened is not None else []
    report.dry_run(record, aside, files, [command for command in commands if command is not None])
    return report.Outcome.of(record, state=events.PLANNED, exit_code=0, run_dir=aside)


def submit_and_follow(records: Sequence[RunRecord]) -> list[report.Outcome]:
    """Submit all runs, each stage behind the one before, and follow those whose scheduler is attached."""
    submitted: dict[str, tuple[RunRecord, tuple[JobSpec, ...]]] = {}
    schedulers: dict[str, scheduler.Scheduler] = {}
    last_of_lane: dict[str, tuple[str, ...]] = {}
    for record in records:
        place = scheduler.place(record.config)
        if place not in schedulers:
            schedulers[place] = scheduler.open_scheduler(record.config)
        lane = record.jobs[0].lane or record.run_id
        jobs = submit(record, schedulers[place], after=last_of_lane.get(lane, ()))
        submitted.update({job_id: (record, of_job) for job_id, of_job in jobs.items()})
        if record.config.on_failure == "stop":  # else a lane goes on whatever becomes of its runs
            last_of_lane[lane] = tuple(jobs)[-1:]

    def on_start(job_id: str) -> None:
        report.started(*submitted[job_id], records)

    def on_end(ended: scheduler.Ended) -> None:
        record, jobs = submitted[ended.job_id]
        settle(record, [job.stage for job in jobs], ended)
        if len(records) > 1 and jobs[-1] == record.jobs[-1]:
            report.ended(outcome(record))
        elif len(records) == 1 and len(record.jobs) > 1:
            report.stages_ended(jobs, registry.refresh(record.run_dir))

    for place, opened in schedulers.items():
        followed = {job_id: of for job_id, of in submitted.items() if scheduler.place(of[0].config) == place}
        if not opened.is_attached:
            report.detached(followed, opened.look_up(followed))
            continue
        try:
            opened.wait(on_start, on_end, report.waits)
        except KeyboardInterrupt:  # of jobs that go on without this command
            leave(opened, followed)
    outcomes = [outcome(record) for record in records]
    report.summary(outcomes)
    return outcomes


def submit(record: RunRecord, opened: scheduler.Scheduler, *, after: tuple[str, ...]) -> dict[str, tuple[JobSpec, ...]]:
    """Submit the stages of a run that are not done, in a chain behind `after`, and return them by job id.

    Stages that lead on to each other are one job, submitted as the first of them. A refusal is noted with the
    scheduler's message, for that stage and all behind it.
    """
    submitted: dict[str, tuple[JobSpec, ...]] = {}
    done = stages.done(record.jobs, record.config, registry.states_before(record), goes_on=record.goes_on)
    for stage, reason in done.items():  # before any job begins: one that comes to such a stage passes it over
        registry.note(record, events.SUCCEEDED, stage=stage, reason=f"skipped: {reason}")
        report.skipped(record, stage, reason)
    left = tuple(job for job in record.jobs if job.stage not in done)
    in_one = stages.share_a_job(record.config) and left
    groups = [left] if in_one else [(job,) for job in left]
    for number, jobs in enumerate(groups):
        try:
            job_id = opened.submit(jobs[0], after=tuple(submitted)[-1:] or after)
        except scheduler.NotSubmittedError as error:
            for job in (job for later in groups[number:] for job in later):
                registry.note(record, events.NOT_SUBMITTED, stage=job.stage, reason=str(error))
            break
        except KeyboardInterrupt:  # while the stage before it was waited for; what is left stays PLANNED
            if submitted:
                leave(opened, {job_id: (record, of_job) for job_id, of_job in submitted.items()})
            raise
        submitted[job_id] = jobs
        try:
            for job in jobs:
                registry.note(record, events.SUBMITTED, stage=job.stage, job_id=job_id)
        except UserError as error:  # who pays for it must be able to find it
            raise UserError(f"job {job_id} of {record.run_id} was submitted, but not noted: {error}") from error
    return submitted


def leave(opened: scheduler.Scheduler, jobs: Mapping[str, tuple[RunRecord, tuple[JobSpec, ...]]]) -> None:
    """Stop following jobs: cancel them if the user at the terminal says so, else, and in scripts, let them go on."""
    if not report.asks("jobs go on without this command; cancel them all?", interrupt_says_yes=True):
        report.detached(jobs, opened.look_up(jobs))
        return
    opened.cancel(jobs)
    for record, of_job in jobs.values():
        told = {known.stage: known for known in registry.refresh(record.run_dir).stages}
        for known in (told[job.stage] for job in of_job):
            if known.state not in events.ENDED:
                _note(record, known, events.CANCELLED, reason="cancelled at the terminal by Ctrl-C")


def settle(record: RunRecord, of_job: Sequence[str], ended: scheduler.Ended) -> None:
    """Add the scheduler's word on a job to its stages: to the one at which it ended, and to those it never came to."""
    told = {known.stage: known for known in registry.refresh(record.run_dir).stages}
    broken: str | None = None  # the stage at which the job ended badly; None so far
    for stage in of_job:
        if broken is not None:
            if told[stage].state not in events.ENDED:
                _note(record, told[stage], events.NOT_SUBMITTED, reason=f"{broken} before it did not succeed")
        elif told[stage].state != events.SUCCEEDED or stage == of_job[-1]:
            broken = None if _settle(record, told[stage], ended) == events.SUCCEEDED else stage


def _settle(record: RunRecord, told: StageState, ended: scheduler.Ended) -> str:
    """Add the scheduler's word where the nodes left none, or where it alone knows why they were stopped."""
    state, reason = ended.state, ended.reason
    if ended.exit_code is None:
        state, reason = state or events.NOT_SUBMITTED, reason or "stopped before it started"
    elif told.state in events.ENDED and state not in (events.TIMEOUT, events.CANCELLED, events.PREEMPTED):
        return told.state
    elif state is None:
        state = events.FAILED if ended.exit_code else events.SUCCEEDED
        reason = f"the worker ended with exit code {ended.exit_code} and left no word"
    if told.state != state:
        _note(record, told, state, exit_code=ended.exit_code, reason=reason)
    return state


def _note(record: RunRecord, told: StageState, state: str, **extra: Any) -> None:
    """Record what was seen of a stage in its newest attempt: a job that was started again is at a later one."""
    attempt = max(record.attempt, told.attempt)
    registry.note(replace(record, attempt=attempt), state, stage=told.stage, **extra)


def outcome(record: RunRecord) -> report.Outcome:
    """Return how a run stands: state, exit code for the shell, last metric."""
    state = registry.refresh(record.run_dir)
    exit_code = {events.PREEMPTED: EXIT_PREEMPTED}.get(state.state, EXIT_FAILED)
    is_on_its_way = state.state in (events.SUBMITTED, events.QUEUED, events.RUNNING, events.REQUEUED)
    return report.Outcome.of(
        record,
        state=state.state,
        exit_code=0 if is_on_its_way or state.state == events.SUCCEEDED else exit_code,
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
