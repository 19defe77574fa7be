"""Whether what the events tell still holds: schedulers are asked about jobs, this machine about processes.

What a scheduler says of a job's end is written down, since it forgets; what may change again is only shown.
"""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainwright import registry, scheduler, storage
from trainwright.config import RunConfig
from trainwright.follow import overview
from trainwright.follow.overview import Overview
from trainwright.node import events
from trainwright.node.events import Event
from trainwright.node.run_paths import RunPaths
from trainwright.node.run_state import StageState

_NEVER_BEGAN = scheduler.JobState(
    state=events.NOT_SUBMITTED, reason="a stage before it in the same job did not succeed", exit_code=None
)
_LAST = 10**9  # behind all numbers on disk


def confirm(runs: Sequence[Overview]) -> list[Overview]:
    """Return the runs as they stand at this moment, those that are not over having been asked about.

    So are jobs behind one that failed: their run is over, but the scheduler alone knows what became of them.
    """
    open_runs = {run.run_dir: run for run in runs if not run.is_over or _has_open_jobs(run)}
    local = [run for run in open_runs.values() if run.launcher == "local" and not run.is_over]
    confirmed = {run.run_dir: _confirm_local(run) for run in local}
    for kind in sorted(scheduler.installed() - {"local"}):
        detached = [run for run in open_runs.values() if run.launcher == kind and run.job_ids]
        if detached:
            confirmed.update((run.run_dir, run) for run in _confirm_jobs(detached))
    return [confirmed.get(run.run_dir, run) for run in runs]


def config_of(run: Path) -> RunConfig:
    """Return the config of a run's newest attempt, as recorded."""
    return RunConfig.from_dict(registry.read_record(run, registry.last_attempt(run))["config"])


def _confirm_local(run: Overview) -> Overview:
    """Return UNKNOWN for a run of which no process is left; of one on another machine, its events are believed."""
    is_recorded = registry.last_attempt(run.run_dir) >= run.state.attempt
    if not is_recorded or registry.holder(run.run_dir, run.state.attempt) is not None:
        return run
    now = overview.look(run.run_dir)  # it may have ended while we looked
    if now.is_over:
        return now
    reason = "no process works on it any more; `trainwright retry` starts it again"
    return overview.look(run.run_dir, [_word(stage, events.UNKNOWN, reason) for stage in _open_stages(now)])


def _confirm_jobs(runs: Sequence[Overview]) -> Sequence[Overview]:
    """Return the runs with what their scheduler says; unchanged where it does not answer."""
    opened = scheduler.open_scheduler(config_of(runs[-1].run_dir))
    known = opened.look_up(list(dict.fromkeys(job_id for run in runs for job_id in run.job_ids.values())))
    answers = bool(known) or next(opened.problems(), None) is None
    if not answers:
        return runs
    return storage.in_parallel(lambda run: _with_word(run, known), runs, [run.run_dir for run in runs])


def _with_word(run: Overview, known: Mapping[str, scheduler.JobState]) -> Overview:
    seen, spoken_for = [], set()  # jobs whose state is that of an earlier stage: several stages may be one job
    for stage in run.state.stages:
        job_id = run.job_ids.get(str(stage.stage))
        job = known.get(job_id) if job_id is not None else None
        if stage.state not in events.ENDED and job_id is not None:
            if job is None:
                seen.append(_word(stage, events.UNKNOWN, f"the scheduler has forgotten job {job_id}"))
            elif job.state in events.ENDED:
                _write_down(run, stage, _NEVER_BEGAN if job_id in spoken_for else job)
            elif job_id not in spoken_for:
                seen.append(_word(stage, job.state, job.reason))
        if stage.state != events.SUCCEEDED and (job is None or job.state != events.SUCCEEDED):
            spoken_for.add(job_id)
    return overview.look(run.run_dir, seen)


def _has_open_jobs(run: Overview) -> bool:
    return any(str(stage.stage) in run.job_ids for stage in _open_stages(run))


def _open_stages(run: Overview) -> list[StageState]:
    return [stage for stage in run.state.stages if stage.state not in events.ENDED]


def _word(stage: StageState, state: str, reason: str | None) -> Event:
    extra = {} if reason is None else {"reason": reason}
    return Event(_LAST, state, events.timestamp(), events.SUBMIT, stage.stage, stage.attempt, extra)


def _write_down(run: Overview, stage: StageState, job: scheduler.JobState) -> None:
    # Those who may only read see it as long as the scheduler knows it; a bucket's client has no word for just that.
    refusals = storage.failures(run.run_dir) if storage.is_bucket(run.run_dir) else (PermissionError,)
    with contextlib.suppress(*refusals):
        events.append(
            RunPaths(run.run_dir),
            job.state,
            who=events.SUBMIT,
            stage=stage.stage,
            attempt=stage.attempt,
            exit_code=job.exit_code,
            reason=job.reason,
        )
