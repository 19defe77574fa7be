"""Which stages of a run are run: those asked for, less those that are done."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from trainwright import storage
from trainwright.config import RunConfig
from trainwright.errors import UserError
from trainwright.job import JobSpec
from trainwright.node import commit, events


def select(jobs: Sequence[JobSpec], config: RunConfig) -> tuple[JobSpec, ...]:
    """Return the jobs that `stages` or `stages_from` name, in the order of the run. Raises UserError on other names."""
    names = [job.stage for job in jobs]
    for key, wanted in (("stages", config.stages or ()), ("stages_from", (config.stages_from or names[0],))):
        unknown = [name for name in wanted if name not in names]
        if unknown:
            raise UserError(f"{key}: {unknown[0]} is no stage of this run; use {', '.join(names)}")
    if config.stages_from is not None:
        return tuple(jobs[names.index(config.stages_from) :])
    return tuple(job for job in jobs if config.stages is None or job.stage in config.stages)


def share_a_job(config: RunConfig) -> bool:
    """Return whether the stages of a run follow each other in one job's container, so that it is set up only once."""
    return config.launcher.kind == "vertex" and config.launcher.stages == "container"


def chain(jobs: Sequence[JobSpec]) -> tuple[JobSpec, ...]:
    """Return `jobs`, each leading on to the next in the same job, which has nodes for the largest of those to come."""
    stages = [job.stage for job in jobs]
    return tuple(
        replace(job, next_stage=following, most_nodes=max(later.num_nodes for later in jobs[number:]))
        for number, (job, following) in enumerate(zip(jobs, [*stages[1:], None], strict=False))
    )


def refuse_unguarded(jobs: Sequence[JobSpec], config: RunConfig) -> None:
    """Raise UserError where nobody would start the second of several stages when the first has succeeded."""
    launcher = config.launcher
    if len(jobs) > 1 and launcher.kind == "vertex" and launcher.stages == "jobs" and not launcher.wait:
        raise UserError(
            f"launcher.stages=jobs: Vertex AI starts no job behind another, so this command must stay to submit "
            f"{', '.join(job.stage for job in jobs)} one by one; set launcher.wait=true or launcher.stages=container"
        )


def done(
    jobs: Sequence[JobSpec], config: RunConfig, earlier: Mapping[str | None, str], *, goes_on: bool = False
) -> dict[str, str]:
    """Return, for each stage that needs no run, why. `earlier` is the state of each stage before this attempt.

    A broken chain goes on where it broke; one that was whole is repeated, since a resume shall do something. What is
    asked for by name is run, unless its outputs are complete: these never change. `goes_on`: the names were given to
    an attempt before, whose chain goes on.
    """
    reasons = {}
    if goes_on or (config.stages is None and config.stages_from is None):
        succeeded = list(itertools.takewhile(lambda job: earlier.get(job.stage) == events.SUCCEEDED, jobs))
        if len(succeeded) < len(jobs):
            reasons = {job.stage: f"it is done; stages_from={job.stage} repeats it" for job in succeeded}
    for job in jobs:
        places = [storage.seen_from_here(config, output) for output in job.outputs]
        if places and all(commit.read_commit(place) is not None for place in places):
            reasons[job.stage] = f"complete already: {', '.join(job.outputs)}"
    return reasons
