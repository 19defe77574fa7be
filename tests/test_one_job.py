"""Stages that share one job: how they are linked, submitted and settled."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from tests.test_stages import chain
from trainwright import dispatch, registry, stages
from trainwright.config import RunConfig
from trainwright.errors import UserError
from trainwright.follow import overview
from trainwright.follow.observe import _with_word
from trainwright.job import JobSpec
from trainwright.node import events
from trainwright.node.run_paths import RunPaths
from trainwright.plan import make_plan
from trainwright.registry import RunRecord
from trainwright.scheduler import Ended, JobState, NotSubmittedError, Scheduler

Parsed = Callable[..., RunConfig]
NAMES = ("fetch", "train", "export")


@dataclass
class Taker:
    """A scheduler as far as `dispatch.submit` uses one."""

    refuses: bool = False
    stopped_at: str | None = None  # the stage at whose submission the user presses Ctrl-C
    taken: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)

    def submit(self, job: JobSpec, *, after: tuple[str, ...]) -> str:
        if self.refuses:
            raise NotSubmittedError("no quota")
        if job.stage == self.stopped_at:
            raise KeyboardInterrupt
        self.taken.append((job.stage, after))
        return f"job-{job.stage}"

    def look_up(self, job_ids: Collection[str]) -> dict[str, JobState]:
        return {}


@pytest.fixture
def record(parsed: Parsed, tmp_path: Path) -> Callable[..., RunRecord]:
    """Return a function that gives a planned run of three stages in one job on Vertex AI, or as `overrides` have it."""

    def make(*overrides: str, jobs: Sequence[JobSpec] = tuple(chain(*NAMES))) -> RunRecord:
        config = parsed("launcher=vertex", f"exp_manager.exp_dir={tmp_path}", *overrides)
        linked = stages.chain(jobs) if stages.share_a_job(config) else tuple(jobs)
        made = RunRecord(
            run_id="r",
            attempt=1,
            config=config,
            plan=make_plan(config),
            findings=(),
            jobs=linked,
            overrides=(),
        )
        registry.note(made, events.PLANNED, stages=list(NAMES), num_nodes=1)
        return made

    return make


def submit(record: RunRecord, taker: Taker) -> dict[str, list[str]]:
    submitted = dispatch.submit(record, cast(Scheduler, taker), after=())
    return {job_id: [job.stage for job in jobs] for job_id, jobs in submitted.items()}


def states(record: RunRecord) -> list[str]:
    return [stage.state for stage in registry.refresh(record.run_dir).stages]


def tell(record: RunRecord, stage: str, *told: str, attempt: int = 1) -> None:
    """Have the first node tell how it does."""
    for state in told:
        who = events.node_who(attempt, 0)
        events.append(RunPaths(record.run_dir), state, who=who, stage=stage, attempt=attempt, num_nodes=1)


def test_stages_lead_on_to_each_other_in_a_job_for_the_largest_of_those_to_come() -> None:
    sizes: dict[str, Any] = {"fetch": 1, "train": 4, "export": 1}
    jobs = [JobSpec(**{**vars(job), "num_nodes": sizes[job.stage]}) for job in chain(*NAMES)]
    linked = stages.chain(jobs)
    assert [(job.stage, job.next_stage, job.job_nodes) for job in linked] == [
        ("fetch", "train", 4),
        ("train", "export", 4),
        ("export", None, 1),
    ]
    assert [JobSpec.from_json(job.to_json()) for job in linked] == list(linked)


def test_a_job_of_several_stages_is_submitted_once_as_the_first(record: Callable[..., RunRecord]) -> None:
    taker = Taker()
    run = record()
    assert submit(run, taker) == {"job-fetch": ["fetch", "train", "export"]}
    assert taker.taken == [("fetch", ())]
    assert states(run) == ["SUBMITTED"] * 3


def test_stages_that_are_jobs_of_their_own_are_submitted_each_behind_the_one_before(
    record: Callable[..., RunRecord],
) -> None:
    taker = Taker()
    submit(record("launcher.stages=jobs"), taker)
    assert taker.taken == [("fetch", ()), ("train", ("job-fetch",)), ("export", ("job-train",))]


def test_ctrl_c_between_two_jobs_names_the_one_that_goes_on(
    record: Callable[..., RunRecord], capfd: pytest.CaptureFixture[str]
) -> None:
    run = record("launcher.stages=jobs")
    with pytest.raises(KeyboardInterrupt):
        submit(run, Taker(stopped_at="train"))
    assert capfd.readouterr().out == "job job-fetch  r fetch\n"
    assert states(run) == ["SUBMITTED", "PLANNED", "PLANNED"]


def test_stages_that_are_done_are_noted_before_the_job_that_passes_them_over(record: Callable[..., RunRecord]) -> None:
    run, taker = record(), Taker()
    tell(run, "fetch", events.RUNNING, events.SUCCEEDED)
    tell(run, "train", events.RUNNING, events.FAILED)
    resumed = RunRecord(**{**vars(run), "attempt": 2})
    assert submit(resumed, taker) == {"job-train": ["train", "export"]}
    assert states(run) == ["SUCCEEDED", "SUBMITTED", "SUBMITTED"]


def test_a_job_that_is_refused_is_refused_for_all_its_stages(record: Callable[..., RunRecord]) -> None:
    run = record()
    assert submit(run, Taker(refuses=True)) == {}
    assert states(run) == ["NOT_SUBMITTED"] * 3


@pytest.mark.parametrize(
    ("told", "ended", "expected"),
    [
        (
            {"fetch": ("RUNNING", "SUCCEEDED"), "train": ("RUNNING", "FAILED")},
            Ended(job_id="j", exit_code=1, state="FAILED"),
            ["SUCCEEDED", "FAILED", "NOT_SUBMITTED"],
        ),
        (  # the node left no word on the stage at which it was
            {"fetch": ("RUNNING", "SUCCEEDED"), "train": ("RUNNING",)},
            Ended(job_id="j", exit_code=137),
            ["SUCCEEDED", "FAILED", "NOT_SUBMITTED"],
        ),
        (
            {"fetch": ("RUNNING", "CANCELLED")},
            Ended(job_id="j", exit_code=143, state="TIMEOUT"),
            ["TIMEOUT", "NOT_SUBMITTED", "NOT_SUBMITTED"],
        ),
        ({}, Ended(job_id="j", exit_code=None), ["NOT_SUBMITTED"] * 3),
        ({}, Ended(job_id="j", exit_code=1), ["FAILED", "NOT_SUBMITTED", "NOT_SUBMITTED"]),
        (
            dict.fromkeys(NAMES, ("RUNNING", "SUCCEEDED")),
            Ended(job_id="j", exit_code=0, state="SUCCEEDED"),
            ["SUCCEEDED"] * 3,
        ),
    ],
)
def test_the_end_of_a_job_is_that_of_the_stage_at_which_it_was(
    record: Callable[..., RunRecord], told: dict[str, tuple[str, ...]], ended: Ended, expected: list[str]
) -> None:
    run = record()
    submit(run, Taker())
    for stage, of_stage in told.items():
        tell(run, stage, *of_stage)
    dispatch.settle(run, NAMES, ended)
    assert states(run) == expected


def test_the_end_of_a_job_that_was_started_again_is_that_of_its_newest_attempt(
    record: Callable[..., RunRecord],
) -> None:
    run = record()
    submit(run, Taker())
    tell(run, "fetch", events.RUNNING, events.FAILED)
    tell(run, "fetch", events.RUNNING, attempt=2)
    dispatch.settle(run, NAMES, Ended(job_id="j", exit_code=1, state="TIMEOUT", reason="its time is over"))
    assert states(run) == ["TIMEOUT", "NOT_SUBMITTED", "NOT_SUBMITTED"]
    assert registry.refresh(run.run_dir).attempt == 2


def test_stages_in_jobs_of_their_own_need_a_command_that_stays(parsed: Parsed) -> None:
    jobs = chain(*NAMES)
    with pytest.raises(UserError, match=r"launcher\.stages=jobs: .* fetch, train, export .* set launcher\.wait=true"):
        stages.refuse_unguarded(jobs, parsed("launcher=vertex", "launcher.stages=jobs"))
    for allowed in (("launcher.stages=jobs", "launcher.wait=true"), ("launcher.stages=container",)):
        stages.refuse_unguarded(jobs, parsed("launcher=vertex", *allowed))
    stages.refuse_unguarded(jobs[:1], parsed("launcher=vertex", "launcher.stages=jobs"))
    stages.refuse_unguarded(jobs, parsed("launcher=slurm"))


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("QUEUED", ["SUCCEEDED", "RUNNING", "SUBMITTED"]),  # started again: its nodes have spoken before
        ("RUNNING", ["SUCCEEDED", "RUNNING", "SUBMITTED"]),
        ("FAILED", ["SUCCEEDED", "FAILED", "NOT_SUBMITTED"]),
        ("SUCCEEDED", ["SUCCEEDED", "UNKNOWN", "SUCCEEDED"]),  # the nodes know better whether they did
    ],
)
def test_what_the_scheduler_says_of_a_job_concerns_the_stage_at_which_it_is(
    record: Callable[..., RunRecord], state: str, expected: list[str]
) -> None:
    run = record()
    submit(run, Taker())
    tell(run, "fetch", events.RUNNING, events.SUCCEEDED)
    tell(run, "train", events.RUNNING)
    seen = _with_word(overview.look(run.run_dir), {"job-fetch": JobState(state=state, reason=None, exit_code=None)})
    assert [stage.state for stage in seen.state.stages] == expected


def test_a_job_that_failed_at_one_stage_never_came_to_the_others(record: Callable[..., RunRecord]) -> None:
    run = record()
    submit(run, Taker())
    tell(run, "fetch", events.RUNNING, events.SUCCEEDED)
    tell(run, "train", events.RUNNING, events.FAILED)
    seen = _with_word(overview.look(run.run_dir), {"job-fetch": JobState(state="FAILED", reason=None, exit_code=1)})
    assert [stage.state for stage in seen.state.stages] == ["SUCCEEDED", "FAILED", "NOT_SUBMITTED"]
    assert states(run)[-1] == "NOT_SUBMITTED", "since schedulers forget"
