"""Which stages of a run are run: those asked for, less those that are done."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

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


def done(jobs: Sequence[JobSpec], config: RunConfig, earlier: Mapping[str | None, str]) -> dict[str, str]:
    """Return, for each stage that needs no run, why. `earlier` is the state of each stage before this attempt.

    A broken chain goes on where it broke; one that was whole is repeated, since a resume shall do something. What is
    asked for by name is run, unless its output is complete: that never changes.
    """
    reasons = {}
    if config.stages is None and config.stages_from is None:
        succeeded = list(itertools.takewhile(lambda job: earlier.get(job.stage) == events.SUCCEEDED, jobs))
        if len(succeeded) < len(jobs):
            reasons = {job.stage: f"it is done; stages_from={job.stage} repeats it" for job in succeeded}
    for job in jobs:
        if job.output is not None and commit.read_commit(Path(job.output)) is not None:
            reasons[job.stage] = f"{job.output} is complete"
    return reasons
