"""What a scheduler is to dispatch, and how one is found: by the launcher's kind, among the installed entry points."""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Protocol

from trainwright.config import RunConfig
from trainwright.errors import EXIT_FAILED, UserError
from trainwright.job import JobSpec

ENTRY_POINTS = "trainwright.schedulers"

# What a scheduler of Vertex AI takes from its launcher for all jobs alike; the rest stands in each job.
_OF_A_PLACE = {
    "project", "location", "locations", "api_endpoint", "labels", "encryption_key", "bucket_mount", "bucket_url",
    "wait",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A job that is over."""

    job_id: str
    exit_code: int | None  # None: it never started, since an earlier one failed or the user stopped
    state: str | None = None  # why it ended, where the scheduler knows more than a code; None: it does not
    reason: str | None = None  # in words; None: nothing to explain


@dataclass(frozen=True, kw_only=True)
class JobState:
    """What a scheduler says of a job at this moment."""

    state: str  # one of node.events
    reason: str | None  # why it waits or ended, with what helps; None: nothing to explain
    exit_code: int | None  # as a shell shows it; None: not ended, or never started


class NotSubmittedError(UserError):
    """A scheduler does not take a job. The message is the scheduler's own, with the key to change where it is known."""

    exit_code = EXIT_FAILED


class Scheduler(Protocol):
    """Takes jobs to where they run. Attached ones end with the command that submitted them."""

    is_attached: bool

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (what is wrong, what to do) for each reason why no job could be submitted now."""

    def arrange(self, job: JobSpec) -> JobSpec:
        """Return `job` with what it is submitted as among its files. Values in, values out."""

    def by_hand(self, job: JobSpec, own: Path) -> str | None:
        """Return the command that submits `job`, recorded below `own`, without us; None where there is none."""

    def submit(self, job: JobSpec, *, after: tuple[str, ...]) -> str:
        """Hand `job` over and return its id; it starts once all jobs in `after` have succeeded.

        A job that was handed over before, but not noted, is found and not submitted twice. Raises NotSubmittedError.
        """

    def look_up(self, job_ids: Collection[str]) -> Mapping[str, JobState]:
        """Return what is known now of those jobs that the scheduler remembers."""

    def cancel(self, job_ids: Collection[str]) -> None:
        """End these jobs, whatever command submitted them; those that are over or forgotten are left alone.

        Raises UserError when they cannot be reached from here.
        """

    def wait(
        self,
        on_start: Callable[[str], None],
        on_end: Callable[[Ended], None],
        on_wait: Callable[[str, str], None],
    ) -> None:
        """Follow all submitted jobs to their end, telling of each start, end and reason to wait as it happens."""


def installed() -> frozenset[str]:
    """Return the launcher kinds that have a scheduler."""
    return frozenset(_points())


def place(config: RunConfig) -> str:
    """Return what runs have in common that one scheduler takes: their kind, on Vertex AI also project and regions."""
    launcher = config.launcher
    return launcher.model_dump_json(include=_OF_A_PLACE) if launcher.kind == "vertex" else launcher.kind


def problems(config: RunConfig) -> tuple[tuple[str, str], ...]:
    """Return (what is wrong, what to do) for each reason why the run's scheduler would not take it now."""
    return tuple(open_scheduler(config).problems()) if config.launcher.kind in installed() else ()


def open_scheduler(config: RunConfig) -> Scheduler:
    """Return the scheduler of `config.launcher.kind`, with that launcher's settings."""
    scheduler: Scheduler = _points()[config.launcher.kind].load()(config)
    return scheduler


@functools.cache  # to search all installed packages takes some milliseconds, and a sweep asks often
def _points() -> Mapping[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}
