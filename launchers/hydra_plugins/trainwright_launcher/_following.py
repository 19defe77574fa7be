"""Follow jobs that go on without this command, by asking their scheduler again and again."""

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from trainwright import report, storage
from trainwright.config import RunConfig
from trainwright.errors import UserError
from trainwright.follow import overview
from trainwright.job import JobSpec
from trainwright.node import events
from trainwright.scheduler import JobState

FORGOTTEN = JobState(state=events.UNKNOWN, reason="that it does not remember the job", exit_code=1)
_FIRST_POLL_S, _LONGEST_POLL_S = 0.2, 15.0
_TRAINS = "train"  # the stage that makes steps


def follow(
    config: RunConfig,
    jobs: Mapping[str, JobSpec],
    look_up: Callable[[Collection[str]], Mapping[str, JobState]],
    on_start: Callable[[str], None],
    on_end: Callable[[str, JobState], None],
    on_wait: Callable[[str, str], None],
) -> None:
    """Follow `jobs` to their ends; one that `look_up` calls FORGOTTEN is over, one that it leaves out is as before.

    Ctrl-C (KeyboardInterrupt) ends the following, not the jobs.
    """
    told: dict[str, str | None] = dict.fromkeys(jobs)
    steps_told: dict[str, int] = {}
    pause_s = _FIRST_POLL_S
    is_one_run = len({job.run_dir for job in jobs.values()}) == 1
    while told:
        for job_id, known in look_up(list(told)).items():
            news = known.reason if known.state in (events.QUEUED, events.REQUEUED) else known.state
            is_over = known.state in events.ENDED or known is FORGOTTEN
            if not is_over and news is not None and news != told[job_id]:
                told[job_id] = news
                if known.state == events.RUNNING:
                    on_start(job_id)
                else:
                    on_wait(job_id, news)
            is_training = jobs[job_id].stage == _TRAINS and known.state != events.QUEUED
            if len(jobs) == 1 or (is_one_run and is_training):  # of several runs, starts and ends say enough
                _tell_progress(job_id, storage.seen_from_here(config, jobs[job_id].run_dir), steps_told)
            if is_over:
                del told[job_id]
                on_end(job_id, known)
        if told:
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.3, _LONGEST_POLL_S)


def _tell_progress(job_id: str, run_dir: Path, steps_told: dict[str, int]) -> None:
    try:
        metrics = overview.look(run_dir).metrics
    except UserError:  # a bucket that cannot be reached now: the job goes on, and the next look may succeed
        return
    if metrics.step is not None and steps_told.get(job_id) != metrics.step:
        steps_told[job_id] = metrics.step
        report.progress(job_id, metrics.step, metrics.max_steps, metrics.train_loss)
