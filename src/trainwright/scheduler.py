"""What a scheduler is to dispatch, and how one is found: by the launcher's kind, among the installed entry points."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Protocol

from trainwright.config import RunConfig
from trainwright.job import JobSpec

ENTRY_POINTS = "trainwright.schedulers"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A job that is over."""

    job_id: str
    exit_code: int | None  # None: it never started, since an earlier one failed or the user stopped


class Scheduler(Protocol):
    """Takes jobs to where they run. Attached ones end with the command that submitted them."""

    is_attached: bool

    def submit(self, job: JobSpec, *, after: tuple[str, ...]) -> str:
        """Hand `job` over and return its id; it starts once all jobs in `after` have succeeded."""

    def wait(self, on_start: Callable[[str], None], on_end: Callable[[Ended], None]) -> None:
        """Follow all submitted jobs to their end, telling of each start and end as it happens."""


def installed() -> frozenset[str]:
    """Return the launcher kinds that have a scheduler."""
    return frozenset(point.name for point in entry_points(group=ENTRY_POINTS))


def open_scheduler(config: RunConfig) -> Scheduler:
    """Return the scheduler of `config.launcher.kind`, with that launcher's settings."""
    (point,) = entry_points(group=ENTRY_POINTS, name=config.launcher.kind)
    scheduler: Scheduler = point.load()(config)
    return scheduler
