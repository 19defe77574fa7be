"""launcher=vertex with Google's own client, against a server of this machine that answers as Vertex AI does."""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml
from google.cloud.aiplatform_v1 import CustomJob, CustomJobSpec, JobState
from google.protobuf import json_format
from hydra_plugins.trainwright_launcher._vertex import VertexScheduler
from hydra_plugins.trainwright_launcher._vertex_client import VertexClient
from hydra_plugins.trainwright_launcher._vertex_states import job_state

from tests.conftest import Result
from tests.fakes import Failure, VertexServer, quota
from trainwright import cli, dispatch, registry
from trainwright.config import RunConfig
from trainwright.errors import UserError
from trainwright.job import JobSpec
from trainwright.node import events
from trainwright.node.run_paths import RunPaths
from trainwright.plan import make_plan
from trainwright.registry import RunRecord
from trainwright.scheduler import Ended, NotSubmittedError

Parsed = Callable[..., RunConfig]
Train = Callable[..., Result]
UNAVAILABLE = Failure(code="UNAVAILABLE")


@pytest.fixture
def server() -> Iterator[VertexServer]:
    with VertexServer() as running:
        yield running


VERTEX = ("launcher=vertex", "debug=fast", "launcher.machine=n1-standard-8", "launcher.image=i")
SITE = ("site.vertex.project=my-project", "site.vertex.bucket=b")


@pytest.fixture
def places(server: VertexServer, tmp_path: Path) -> dict[str, str]:
    """Return the values of launcher for that server, whose bucket is a folder."""
    return {"api_endpoint": server.endpoint, "bucket_mount": f"{tmp_path}/gcs", "bucket_url": f"{tmp_path}/gcs"}


@pytest.fixture
def arguments(places: Mapping[str, str]) -> tuple[str, ...]:
    """Return the overrides of a run for that server."""
    exp_dir = f"exp_manager.exp_dir={places['bucket_mount']}/b/experiments"
    return (*VERTEX, *SITE, exp_dir, *(f"launcher.{key}={value}" for key, value in places.items()))


@pytest.fixture(scope="module")
def parsed_once(parsed: Parsed) -> Parsed:
    return functools.cache(parsed)


class Runs:
    """Makes recorded runs for the server."""

    def __init__(self, parsed: Parsed, places: Mapping[str, str]) -> None:
        self._parsed, self._places = parsed, places

    def make(self, *overrides: str, num_stages: int = 1, attempt: int = 1, run_id: str = "r1", **job: Any) -> RunRecord:
        composed = self._parsed(*VERTEX, *SITE, *overrides)
        exp_dir = f"{self._places['bucket_mount']}/b/experiments"
        config = composed.model_copy(
            update={
                "launcher": composed.launcher.model_copy(update=self._places),
                "exp_manager": composed.exp_manager.model_copy(update={"exp_dir": exp_dir}),
            }
        )
        fields: dict[str, Any] = {
            "launch": "plain",
            "command": ("true",),
            "python": "python3",
            "env": {},
            "num_nodes": 1,
            "devices": 1,
            "image": None,
            "time_limit_s": 3600,
            "grace_s": 5.0,
            "files": {},
        }
        jobs = tuple(
            JobSpec(
                run_id=run_id,
                run_dir=str(registry.run_dir(config, run_id)),
                stage=f"s{number}",
                attempt=attempt,
                **{**fields, **job},
            )
            for number in range(num_stages)
        )
        record = RunRecord(
            run_id=run_id,
            attempt=attempt,
            config=config,
            plan=make_plan(config),
            findings=(),
            jobs=jobs,
            overrides=(f"run={run_id}",),
        )
        (arranged,) = dispatch.arrange([record])
        registry.create(arranged)
        return arranged


@pytest.fixture
def runs(parsed_once: Parsed, places: Mapping[str, str]) -> Runs:
    return Runs(parsed_once, places)


def submitted(record: RunRecord) -> str:
    return VertexScheduler(record.config).submit(record.jobs[0], after=())


# ---- submission


def test_a_job_is_what_was_recorded_and_can_be_found_by_its_labels(runs: Runs, server: VertexServer) -> None:
    record = runs.make(num_nodes=3, env={"B": "2", "A": "$(B)"})
    name = submitted(record)
    job = server.jobs[name]
    assert name == "projects/1234567890/locations/us-central1/customJobs/1001"
    assert dict(job.labels) == {"trainwright_run": "r1", "trainwright_stage": "s0", "trainwright_attempt": "1"}
    recorded = yaml.safe_load((record.run_dir / "run" / "jobs" / "a1-s0.yaml").read_text())
    expected = CustomJobSpec()
    json_format.ParseDict(recorded, CustomJobSpec.pb(expected))
    assert job.job_spec == expected
    assert [pool.replica_count for pool in job.job_spec.worker_pool_specs] == [1, 2]


def test_a_crash_between_create_and_our_event_leads_to_no_second_job(runs: Runs, server: VertexServer) -> None:
    record = runs.make()
    first = submitted(record)  # and here the command died
    dispatch.submit_and_follow([record])
    assert list(server.jobs) == [first]
    assert registry.refresh(record.run_dir).state == "SUBMITTED"


@pytest.mark.parametrize("code", ["UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL"])
@pytest.mark.parametrize("is_taken", [True, False], ids=["taken all the same", "not taken"])
def test_an_answer_that_is_lost_leads_to_one_job(code: str, is_taken: bool, runs: Runs, server: VertexServer) -> None:
    server.fail("CreateCustomJob", Failure(code=code, message="Socket closed", is_taken=is_taken))
    name = submitted(runs.make())
    assert list(server.jobs) == [name]
    assert server.count("CreateCustomJob") == (1 if is_taken else 2)


def test_the_last_of_many_answers_may_be_lost_too(runs: Runs, server: VertexServer) -> None:
    server.fail("CreateCustomJob", *[UNAVAILABLE] * 5, Failure(code="DEADLINE_EXCEEDED", is_taken=True))
    name = submitted(runs.make())
    assert (list(server.jobs), server.count("CreateCustomJob")) == ([name], 6)


def test_a_region_that_has_no_host_is_named(runs: Runs, server: VertexServer) -> None:
    server.fail("ListCustomJobs", *[Failure(code="UNAVAILABLE", message="DNS resolution failed for us-mars1-a")] * 6)
    ((_, remedy),) = VertexScheduler(runs.make("launcher.location=us-mars1").config).problems()
    assert remedy == "correct launcher.location=us-mars1, or look whether this machine has a network"


@pytest.mark.parametrize("method", ["ListCustomJobs", "CreateCustomJob"])
def test_a_server_that_is_not_available_is_asked_again(
    method: str, runs: Runs, server: VertexServer, capfd: pytest.CaptureFixture[str]
) -> None:
    server.fail(method, *[UNAVAILABLE] * 4)
    name = submitted(runs.make())
    assert list(server.jobs) == [name]
    assert server.count(method) == 5
    assert "Vertex AI in us-central1 says UNAVAILABLE" in capfd.readouterr().err


def test_a_server_that_stays_away_is_told_in_the_record(runs: Runs, server: VertexServer) -> None:
    server.fail("CreateCustomJob", *[UNAVAILABLE] * 6)
    record = runs.make(num_stages=2)
    (outcome,) = dispatch.submit_and_follow([record])
    assert (outcome.state, outcome.exit_code, server.jobs) == ("NOT_SUBMITTED", 1, {})
    assert "says UNAVAILABLE: The service is currently unavailable." in str(outcome.reason)
    assert {stage.state for stage in registry.refresh(record.run_dir).stages} == {"NOT_SUBMITTED"}


def test_too_many_requests_a_minute_are_waited_for_as_long_as_the_server_says(
    runs: Runs, server: VertexServer, capfd: pytest.CaptureFixture[str]
) -> None:
    message = "Quota exceeded for quota metric 'Resource management (CRUD) requests' and limit 'requests per minute'"
    server.fail("CreateCustomJob", Failure(code="RESOURCE_EXHAUSTED", message=message, retry_after_s=0.02))
    name = submitted(runs.make())
    assert list(server.jobs) == [name]
    assert "trying again in 0.02 s" in capfd.readouterr().err


def test_a_quota_is_named_with_what_helps(runs: Runs, server: VertexServer) -> None:
    server.fail("CreateCustomJob", quota("custom_model_training_nvidia_t4_gpus"))
    with pytest.raises(NotSubmittedError) as refused:
        submitted(runs.make())
    assert "quota custom_model_training_nvidia_t4_gpus of project my-project" in str(refused.value)
    assert "request more of custom_model_training_nvidia_t4_gpus" in str(refused.value)
    assert "launcher.locations, or lower hardware.num_nodes" in str(refused.value)
    assert server.count("CreateCustomJob") == 1


def test_a_region_without_quota_or_machines_is_followed_by_the_next(runs: Runs, server: VertexServer) -> None:
    stockout = Failure(code="RESOURCE_EXHAUSTED", message="Resources are insufficient in region: us-east4.")
    server.fail("CreateCustomJob", quota(location="us-central1"), stockout)
    record = runs.make("launcher.locations=[us-east4,europe-west4]")
    name = submitted(record)
    assert name.split("/")[3] == "europe-west4"
    again = VertexScheduler(record.config).submit(record.jobs[0], after=())  # though us-central1 would take it now
    assert (again, list(server.jobs)) == (name, [name])


def test_when_no_region_takes_it_all_of_them_are_named(runs: Runs, server: VertexServer) -> None:
    server.fail("CreateCustomJob", quota(), quota())
    with pytest.raises(NotSubmittedError) as refused:
        submitted(runs.make("launcher.locations=[us-east4]"))
    assert "Vertex AI in us-central1 says" in str(refused.value)
    assert "Vertex AI in us-east4 says" in str(refused.value)
    assert server.jobs == {}


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (
            Failure(code="PERMISSION_DENIED", message="Vertex AI API has not been used", reason="SERVICE_DISABLED"),
            "run gcloud services enable aiplatform.googleapis.com --project=my-project",
        ),
        (
            Failure(code="PERMISSION_DENIED", message="You do not have permission to act as service account: x@y"),
            "roles/iam.serviceAccountUser",
        ),
        (
            Failure(code="PERMISSION_DENIED", message="Permission 'aiplatform.customJobs.create' denied"),
            "ask for roles/aiplatform.user in project my-project",
        ),
        (Failure(code="NOT_FOUND", message="Persistent resource m not found"), "or what the message names"),
        (Failure(code="INVALID_ARGUMENT", message="Machine type n1-x is not supported"), "change the key"),
        (Failure(code="UNIMPLEMENTED", message="Not here"), "see what the message names"),
        (Failure(code="UNAUTHENTICATED", message="Request had invalid credentials"), "gcloud auth application-default"),
        (
            Failure(code="UNAVAILABLE", message="Getting metadata from plugin failed with error: invalid_grant"),
            "gcloud auth application-default",
        ),
    ],
    ids=lambda value: value.message[:30] if isinstance(value, Failure) else "",
)
def test_a_refusal_is_told_at_once_with_what_helps(
    failure: Failure, told: str, runs: Runs, server: VertexServer
) -> None:
    server.fail("CreateCustomJob", failure)
    with pytest.raises(NotSubmittedError) as refused:
        submitted(runs.make())
    assert failure.message in str(refused.value)
    assert told in str(refused.value)
    assert server.count("CreateCustomJob") == 1


def test_the_next_attempt_is_another_job(runs: Runs, server: VertexServer) -> None:
    names = [submitted(runs.make(attempt=attempt)) for attempt in (1, 2)]
    assert list(server.jobs) == names


def test_each_run_of_a_sweep_goes_where_its_own_launcher_says(runs: Runs, server: VertexServer) -> None:
    sweep = [
        runs.make(run_id="a"),
        runs.make("launcher.location=us-east4", "+launcher.labels.team=speech", run_id="b"),
    ]
    dispatch.submit_and_follow(sweep)
    told = {
        job.labels["trainwright_run"]: (name.split("/")[3], job.labels.get("team")) for name, job in server.jobs.items()
    }
    assert told == {"a": ("us-central1", None), "b": ("us-east4", "speech")}
    assert [registry.refresh(run.run_dir).state for run in sweep] == ["SUBMITTED"] * 2


def test_all_pages_of_a_listing_are_read(runs: Runs, server: VertexServer, parsed: Parsed) -> None:
    server.longest_page = 2
    names = [submitted(runs.make(run_id="many", attempt=attempt)) for attempt in range(1, 6)]
    submitted(runs.make(run_id="other"))
    found = VertexClient("my-project", server.endpoint).find("us-central1", {"trainwright_run": "many"})
    assert [job.name for job in found] == names[::-1]


def test_a_secret_reaches_the_job_and_no_file(
    runs: Runs, server: VertexServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    name = submitted(runs.make(env_from=("HF_TOKEN",), num_nodes=2))
    for pool in server.jobs[name].job_spec.worker_pool_specs:
        assert [(one.name, one.value) for one in pool.container_spec.env] == [("HF_TOKEN", "hf_verysecret")]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 4
    assert not [path for path in files if b"hf_verysecret" in path.read_bytes()]


def test_a_refusal_that_quotes_a_secret_is_told_without_it(
    runs: Runs, server: VertexServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    server.fail(
        "CreateCustomJob", Failure(code="INVALID_ARGUMENT", message="env[0].value: 'hf_verysecret' is too long")
    )
    with pytest.raises(NotSubmittedError) as refused:
        submitted(runs.make(env_from=("HF_TOKEN",)))
    assert "env[0].value: '<HF_TOKEN>' is too long; change the key" in str(refused.value)


def test_a_secret_that_is_gone_at_the_submit_is_named(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(NotSubmittedError, match=r"launcher\.env_from: HF_TOKEN is not set here"):
        submitted(runs.make(env_from=("HF_TOKEN",)))


# ---- states


@pytest.mark.parametrize(
    ("state", "message", "code", "expected", "told"),
    [
        ("QUEUED", "", 0, ("QUEUED", None), "QUEUED: it waits for quota or for machines"),
        ("PENDING", "", 0, ("QUEUED", None), "PENDING: its machines are made ready"),
        ("RUNNING", "", 0, ("RUNNING", None), "None"),
        ("CANCELLING", "", 0, ("RUNNING", None), "it is being cancelled"),
        ("PAUSED", "", 0, ("QUEUED", None), "it is paused"),
        ("SUCCEEDED", "", 0, ("SUCCEEDED", 0), "None"),
        ("CANCELLED", "", 0, ("CANCELLED", 143), "it was cancelled"),
        ("EXPIRED", "", 0, ("TIMEOUT", 1), "raise launcher.time"),
        ("PARTIALLY_SUCCEEDED", "", 0, ("FAILED", 1), "it succeeded in part only"),
        (
            "FAILED",
            "The replica workerpool1-2 exited with a non-zero status of 137. To find out more",
            3,
            ("FAILED", 137),
            "node 3 (workerpool1-2) ended with exit code 137; its output: gcloud ai custom-jobs stream-logs 1001 "
            "--region=us-central1 --project=1234567890",
        ),
        ("FAILED", "Replica exited with a non-zero status.", 3, ("FAILED", 1), "a replica ended with exit code 1"),
        ("FAILED", "Deadline", 4, ("TIMEOUT", 1), "raise launcher.time"),
        ("FAILED", "The job exceeded its timeout of 432000s", 3, ("TIMEOUT", 1), "raise launcher.time"),
        ("FAILED", "The worker was preempted", 14, ("PREEMPTED", 1), "trainwright retry"),
        ("FAILED", "Resources are insufficient in region: us-central1.", 8, ("FAILED", 1), "another launcher.location"),
        ("FAILED", "Failed to pull image i: not found", 5, ("FAILED", 1), "correct launcher.image"),
        ("FAILED", "Internal error", 13, ("FAILED", 1), "Internal error; its output: gcloud"),
    ],
)
def test_a_state_of_vertex_ai_is_one_of_ours_with_its_reason(
    state: str, message: str, code: int, expected: tuple[str, int | None], told: str
) -> None:
    job = CustomJob(
        name="projects/1234567890/locations/us-central1/customJobs/1001",
        state=f"JOB_STATE_{state}",
        start_time=datetime(2026, 11, 30, tzinfo=timezone.utc),
        error={"code": code, "message": message},
    )
    known = job_state(job)
    assert (known.state, known.exit_code) == expected
    assert told in str(known.reason)


def test_every_state_of_vertex_ai_has_a_meaning() -> None:
    unknown = {
        state.name for state in JobState if job_state(CustomJob(name="p/1/l/2/c/3", state=state)).state == "UNKNOWN"
    }
    assert unknown == {"JOB_STATE_UNSPECIFIED"}


def test_a_job_that_ended_before_it_started_has_no_exit_code(runs: Runs, server: VertexServer) -> None:
    record = runs.make()
    name = submitted(record)
    server.end(name, "CANCELLED")
    assert VertexScheduler(record.config).look_up([name])[name].exit_code is None


def test_what_vertex_ai_does_not_remember_is_left_out_and_what_it_does_not_tell_is_unknown(
    runs: Runs, server: VertexServer
) -> None:
    opened = VertexScheduler(runs.make().config)
    gone = "projects/p/locations/us-central1/customJobs/9"
    assert opened.look_up([gone]) == {}
    server.fail("GetCustomJob", UNAVAILABLE)
    told = opened.look_up([gone, "projects/p/locations/us-central1/customJobs/8"])
    assert {known.state for known in told.values()} == {"UNKNOWN"}
    assert "says UNAVAILABLE" in str(told[gone].reason)
    assert server.count("GetCustomJob") == 2  # not once more for each of many jobs


def test_a_run_that_is_waited_for_tells_what_it_waits_for_and_ends(
    runs: Runs, server: VertexServer, capfd: pytest.CaptureFixture[str]
) -> None:
    server.fail("GetCustomJob", UNAVAILABLE, UNAVAILABLE)  # which is none of the jobs' business
    record = runs.make("launcher.wait=true")
    dispatch.submit_and_follow([record])
    told, warned = capfd.readouterr()
    assert warned.count("says UNAVAILABLE: The service is currently unavailable.; try again later; the jobs go on") == 1
    assert "waits  PENDING: its machines are made ready" in told
    assert "run  r1  run=r1" in told
    # The nodes of this job never were: the scheduler's success alone is not believed.
    assert registry.refresh(record.run_dir).state in ("UNKNOWN", "SUCCEEDED")


REPLICA = "The replica workerpool0-0 exited with a non-zero status of 1. To find out more about why"


def test_the_cause_that_a_node_told_is_not_hidden_by_vertex_ais_message(runs: Runs, server: VertexServer) -> None:
    server.course, server.error = ("RUNNING", "FAILED"), REPLICA
    record = runs.make("launcher.wait=true")
    events.append(
        RunPaths(record.run_dir),
        events.FAILED,
        who=events.node_who(1, 0),
        stage="s0",
        attempt=1,
        exit_code=1,
        reason="rank 5 ended with exit code 1",
        first_failing_rank=5,
        last_lines=["CUDA out of memory"],
    )
    (outcome,) = dispatch.submit_and_follow([record])
    state = registry.refresh(record.run_dir)
    assert (outcome.state, outcome.reason) == ("FAILED", "rank 5 ended with exit code 1")
    assert (state.first_failing_rank, state.last_lines) == (5, ("CUDA out of memory",))


def test_where_no_node_told_the_cause_the_node_and_its_output_are_named(runs: Runs, server: VertexServer) -> None:
    server.course, server.error = ("RUNNING", "FAILED"), REPLICA
    (outcome,) = dispatch.submit_and_follow([runs.make("launcher.wait=true")])
    assert (outcome.state, outcome.exit_code) == ("FAILED", 1)
    assert "Vertex AI says node 0 (workerpool0-0) ended with exit code 1; its output: gcloud" in str(outcome.reason)


def test_ctrl_c_ends_the_waiting_and_not_the_job(runs: Runs, server: VertexServer) -> None:
    record = runs.make()
    opened = VertexScheduler(record.config)
    name = opened.submit(record.jobs[0], after=())

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        opened.wait(interrupt, interrupt, interrupt)
    assert server.count("CancelCustomJob") == 0
    assert server.jobs[name].state.name == "JOB_STATE_PENDING"


def test_a_job_that_was_deleted_meanwhile_is_over_for_those_who_wait(runs: Runs, server: VertexServer) -> None:
    record = runs.make()
    opened = VertexScheduler(record.config)
    name = opened.submit(record.jobs[0], after=())
    server.jobs.clear()
    ends: list[Ended] = []
    opened.wait(lambda job_id: None, ends.append, lambda job_id, reason: None)
    assert [(end.job_id, end.state) for end in ends] == [(name, "UNKNOWN")]
    assert "does not remember the job" in str(ends[0].reason)


def test_a_detached_run_returns_at_once_and_says_what_it_waits_for(
    runs: Runs, server: VertexServer, capfd: pytest.CaptureFixture[str]
) -> None:
    record = runs.make()
    (outcome,) = dispatch.submit_and_follow([record])
    (name,) = server.jobs
    assert (outcome.state, outcome.exit_code) == ("SUBMITTED", 0)
    told = capfd.readouterr().out
    assert f"job {name}  r1 s0" in told
    assert f"job {name} waits  PENDING" in told


def test_a_stage_behind_another_is_submitted_after_its_success(runs: Runs, server: VertexServer) -> None:
    record = runs.make(num_stages=2)
    opened = VertexScheduler(record.config)
    first = opened.submit(record.jobs[0], after=())
    second = opened.submit(record.jobs[1], after=(first,))
    assert server.jobs[first].state.name == "JOB_STATE_SUCCEEDED"
    assert list(server.jobs) == [first, second]


def test_no_stage_is_submitted_behind_a_failed_one(runs: Runs, server: VertexServer) -> None:
    server.course, server.error = ("FAILED",), REPLICA
    record = runs.make("launcher.stages=jobs", num_stages=3)
    (outcome,) = dispatch.submit_and_follow([record])
    assert len(server.jobs) == 1
    told = {stage.stage: stage.state for stage in registry.refresh(record.run_dir).stages}
    assert (told["s1"], told["s2"]) == ("NOT_SUBMITTED", "NOT_SUBMITTED")
    assert "the stage before it did not succeed" in str(outcome.reason)


# ---- cancel


def test_cancel_may_be_asked_for_twice_and_of_what_is_over(runs: Runs, server: VertexServer) -> None:
    record = runs.make()
    name = submitted(record)
    opened = VertexScheduler(record.config)
    server.fail("CancelCustomJob", UNAVAILABLE)
    for _ in range(2):
        opened.cancel([name, "projects/p/locations/us-central1/customJobs/9"])
    assert opened.look_up([name])[name].state == "CANCELLED"
    opened.cancel([name])
    assert opened.look_up([name])[name].state == "CANCELLED"


def test_a_cancellation_that_is_not_allowed_is_told(runs: Runs, server: VertexServer) -> None:
    record = runs.make()
    name = submitted(record)
    server.fail("CancelCustomJob", Failure(code="PERMISSION_DENIED", message="no"))
    with pytest.raises(UserError, match=r"says PERMISSION_DENIED: no; ask for roles/aiplatform\.user"):
        VertexScheduler(record.config).cancel([name])


# ---- the command line


def test_a_run_goes_from_the_command_line_to_vertex_ai(
    train: Train, arguments: tuple[str, ...], server: VertexServer
) -> None:
    result = train(*arguments, f"launcher.python={sys.executable}")
    assert result.code == 0, result.err
    (job,) = server.jobs.values()
    command = list(job.job_spec.worker_pool_specs[0].container_spec.command)
    assert command[0] == sys.executable
    assert command[1] == f"{command[2]}/run/worker.pyz"
    assert Path(command[1]).is_file()
    assert f"job {job.name}" in result.out


def test_a_sweep_asks_once_whether_it_may_and_looks_for_each_of_its_jobs(
    train: Train, arguments: tuple[str, ...], server: VertexServer
) -> None:
    assert train("-m", "seed=1,2", *arguments).code == 0
    assert len(server.jobs) == 2
    assert server.count("ListCustomJobs") == 1 + 2


@pytest.mark.parametrize("model", ["gpt_small", "tanuki_8b"])
def test_a_dry_run_writes_what_gcloud_takes_and_prints_the_command(
    model: str, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere")  # nobody is asked
    result = train(f"model={model}", "hardware=h100", "dry_run=true", "site.vertex.project=p", "site.vertex.bucket=b")
    assert result.code == 0, result.err
    (file,) = tmp_path.glob("dry_runs/*/*/run/jobs/a1-train.yaml")
    assert f"dry run of {file.parents[2].name}; nothing was submitted" in result.out  # one id for all
    assert f"gcloud ai custom-jobs create --project=p --region=us-central1 --display-name={model}-" in result.out
    assert f" --config={file}" in result.out
    message = CustomJobSpec()
    json_format.ParseDict(yaml.safe_load(file.read_text()), CustomJobSpec.pb(message))
    (pool,) = message.worker_pool_specs
    assert (pool.machine_spec.machine_type, pool.machine_spec.accelerator_count) == ("a3-highgpu-8g", 8)
    run_dir = pool.container_spec.command[2]
    assert run_dir.startswith(f"/gcs/b/nemo-experiments/{model}/{model}-")
    in_bucket = f"gs://{run_dir.removeprefix('/gcs/')}/run"
    assert f"gcloud storage rsync --recursive {file.parents[1]} {in_bucket} && gcloud ai" in result.out


def test_a_project_that_is_closed_to_us_is_refused_before_anything_is_recorded(
    train: Train, arguments: tuple[str, ...], server: VertexServer, tmp_path: Path
) -> None:
    server.fail("ListCustomJobs", Failure(code="PERMISSION_DENIED", message="denied", reason="SERVICE_DISABLED"))
    result = train(*arguments)
    assert result.code == 3
    assert "error [scheduler] launcher=vertex: Vertex AI in us-central1 says PERMISSION_DENIED: denied" in result.err
    assert "gcloud services enable aiplatform.googleapis.com" in result.err
    assert not list(tmp_path.glob("gcs/b/experiments/*/*"))


def test_missing_credentials_are_told_before_anything_is_recorded(
    train: Train, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    result = train(*arguments, "launcher.api_endpoint=null")
    assert result.code == 3
    assert "launcher=vertex: no credentials for Google Cloud" in result.err
    assert "gcloud auth application-default login" in result.err
    assert not list(tmp_path.glob("gcs/b/experiments/*/*"))


def test_a_client_that_is_not_installed_is_told(
    train: Train, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "google.cloud.aiplatform_v1", None)
    result = train(*arguments)
    assert result.code == 3
    assert "google-cloud-aiplatform is not installed here; pip install 'trainwright[vertex]'" in result.err


def test_a_run_that_vertex_ai_still_has_is_not_resumed(
    train: Train, arguments: tuple[str, ...], runs: Runs, server: VertexServer
) -> None:
    name = submitted(runs.make("name=gpt_small"))
    result = train(*arguments, "run_id=r1")
    assert result.code == 3
    assert f"run_id=r1 is still in Vertex AI: {name} is JOB_STATE_QUEUED" in result.err


def test_a_run_is_known_by_its_version_too(
    train: Train, arguments: tuple[str, ...], runs: Runs, server: VertexServer
) -> None:
    submitted(runs.make("name=gpt_small"))
    result = train(*arguments, "exp_manager.version=r1")
    assert result.code == 3
    assert "run_id=r1 is still in Vertex AI" in result.err


@pytest.fixture
def trainwright(places: Mapping[str, str], capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Return `trainwright COMMAND ...` as a function that looks for the runs of this test."""

    def command(name: str, *words: str) -> Result:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--exp-dir", f"{places['bucket_mount']}/b/experiments", *words])
        return Result(int(ended.value.code or 0), *capfd.readouterr())

    return command


def test_the_commands_that_follow_runs_ask_vertex_ai(
    train: Train, arguments: tuple[str, ...], server: VertexServer, trainwright: Callable[..., Result]
) -> None:
    assert train(*arguments, "run_id=r1").code == 0
    (name,) = server.jobs
    server.course = ()  # the job stays as it is
    status = trainwright("status", "r1")
    assert "QUEUED" in status.out
    assert "PENDING: its machines are made ready" in status.out
    assert trainwright("cancel", "r1").code == 0
    assert server.count("CancelCustomJob") == 2
    assert server.jobs[name].state.name == "JOB_STATE_CANCELLING"
    assert "CANCELLED" in trainwright("ps").out
