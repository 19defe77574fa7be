"""Runs in buckets as the submitting side records them: on a folder, fsspec's memory and a Cloud Storage server."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from fsspec.exceptions import FSTimeoutError

from tests.buckets import KINDS, ObjectStore, bucket_of_kind
from tests.conftest import Result
from trainwright import code_state, dispatch, exp_manager, registry, report, storage
from trainwright.config import RunConfig
from trainwright.errors import UserError
from trainwright.job import JobSpec
from trainwright.node import events
from trainwright.node.run_paths import RunPaths
from trainwright.plan import make_plan
from trainwright.registry import RunRecord
from trainwright.scheduler import Scheduler

Parsed = Callable[..., RunConfig]


@pytest.fixture(params=KINDS)
def bucket_url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with bucket_of_kind(request.param, tmp_path / "buckets", monkeypatch) as url:
        yield url


@pytest.fixture
def config(parsed: Parsed, bucket_url: str) -> RunConfig:
    return parsed("launcher=vertex", "site.vertex.bucket=b", f"launcher.bucket_url={bucket_url}")


def record_of(config: RunConfig, run_id: str = "one", attempt: int = 1) -> RunRecord:
    job = JobSpec(
        run_id=run_id,
        run_dir=str(exp_manager.run_dir(config, run_id)),
        stage="train",
        attempt=attempt,
        launch="plain",
        command=("true",),
        python="python3",
        env={},
        num_nodes=1,
        devices=1,
        image=None,
        time_limit_s=None,
        grace_s=1.0,
        files={f"jobs/a{attempt}-train.yaml": "workerPoolSpecs: []\n"},
    )
    return RunRecord(
        run_id=run_id, attempt=attempt, config=config, plan=make_plan(config), findings=(), jobs=(job,), overrides=()
    )


@pytest.mark.parametrize(
    ("overrides", "path", "seen"),
    [
        (("launcher=vertex",), "/gcs/b/x/run", "gs://b/x/run"),
        (("launcher=vertex",), "/gcs/b", "gs://b/"),
        (("launcher=vertex",), "/gcsfoo/b", "/gcsfoo/b"),
        (("launcher=vertex",), "/mnt/nfs/share/run", "/mnt/nfs/share/run"),
        (("launcher=vertex", "launcher.bucket_mount=/m/"), "/m/b/run", "gs://b/run"),
        (("launcher=vertex", "launcher.bucket_url=memory://"), "/gcs/b/run", "memory://b/run"),
        (("launcher=vertex", "launcher.bucket_url=gs://b/below"), "/gcs/run", "gs://b/below/run"),
        (("launcher=vertex", "launcher.bucket_url=/data/"), "/gcs/b/run", "/data/b/run"),
        (("launcher=slurm",), "/gcs/b/run", "/gcs/b/run"),
    ],
)
def test_a_path_of_the_nodes_is_seen_where_this_machine_reaches_it(
    overrides: tuple[str, ...], path: str, seen: str, parsed: Parsed
) -> None:
    place = storage.seen_from_here(parsed(*overrides), path)
    assert str(place) == seen
    assert storage.is_bucket(place) == ("://" in seen)
    assert isinstance(place, Path) != storage.is_bucket(place)


@pytest.mark.parametrize("pair", [("gpt_small", "t4"), ("gpt_small", "h100"), ("tanuki_8b", "h100")])
def test_data_of_recipes_lie_where_the_nodes_see_buckets(pair: tuple[str, str], parsed: Parsed) -> None:
    model, hardware = pair
    for overrides, mount in (((), "/gcs/"), (("launcher.bucket_mount=/m",), "/m/"), (("launcher=slurm",), "/gcs/")):
        data = parsed(f"model={model}", f"hardware={hardware}", *overrides).data
        prefixes = [part for part in data.data_prefix or () if isinstance(part, str)]
        paths = [path for path in (*prefixes, data.train_path, data.val_path) if path is not None]
        assert paths
        assert [path for path in paths if not path.startswith(mount)] == []


@pytest.mark.parametrize(
    ("url", "told"),
    [("dropbox://b/x", "pip install 'trainwright\\[vertex\\]'"), ("gss://b/x", "buckets begin with gs://")],
)
def test_a_url_that_nothing_here_can_reach_is_refused(url: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        storage.at(url)


def test_a_url_of_s3_names_the_extras_that_reach_it() -> None:
    code = (  # a process of its own: fsspec keeps a class that it has found once
        "import sys; sys.modules['s3fs'] = None\n"
        "from trainwright import errors, storage\n"
        "try: storage.at('s3://b/x')\n"
        "except errors.UserError as error: print(error)"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'trainwright[nxdt,vertex]'" in asked.stdout


@pytest.mark.parametrize("key", ["exp_dir", "explicit_log_dir"])
def test_a_url_as_exp_dir_is_refused_with_the_path_to_write(key: str, parsed: Parsed) -> None:
    with pytest.raises(UserError, match=f"exp_manager.{key}: gs://b/runs is a URL.* write /gcs/b/runs"):
        parsed("launcher=vertex", f'exp_manager.{key}="gs://b/runs"')


def test_a_run_is_recorded_where_its_nodes_find_it(config: RunConfig) -> None:
    record = record_of(config)
    files = registry.create(record)
    paths = RunPaths(record.run_dir)
    assert record.jobs[0].run_dir == "/gcs/b/nemo-experiments/gpt_small/one"
    assert str(paths.run_dir).endswith("b/nemo-experiments/gpt_small/one")
    assert [file.relative_to(paths.run_dir).as_posix() for file in files] == [
        "run/run.yaml",
        "run/jobs/a1-train.json",
        "run/jobs/a1-train.yaml",
        "run/worker.pyz",
        "run/events/0001-submit-PLANNED.json",
    ]
    assert all(file.is_file() for file in files)
    assert JobSpec.from_json(paths.job(1, "train").read_text()) == record.jobs[0]
    assert registry.last_attempt(record.run_dir) == 1
    assert registry.read_record(record.run_dir, 1)["config"] == config.to_dict()
    assert registry.refresh(record.run_dir).state == events.PLANNED
    assert registry.results(record.run_dir) is None


def test_the_next_attempt_at_a_run_lies_beside_the_first(config: RunConfig) -> None:
    for attempt in (1, 2):
        assert registry.last_attempt(record_of(config).run_dir) == attempt - 1
        record = record_of(config, attempt=attempt)
        registry.create(record)
        registry.note(record, events.FAILED, stage="train", reason=f"reason {attempt}")
    state = registry.refresh(record_of(config).run_dir)
    assert (state.state, state.attempt, state.reason) == (events.FAILED, 2, "reason 2")
    assert registry.states_before(record) == {"train": events.FAILED}


@pytest.mark.parametrize("attempt", [1, 2])
def test_of_commands_that_start_one_attempt_at_once_exactly_one_wins(attempt: int, config: RunConfig) -> None:
    for before in range(1, attempt):
        registry.create(record_of(config, attempt=before))

    def start(number: int) -> str:
        # Another directory of the command: another record, as two processes write.
        try:
            registry.create(replace(record_of(config, attempt=attempt), directory=Path(f"/{number}")))
        except UserError as refused:
            return str(refused)
        return "won"

    with ThreadPoolExecutor(4) as pool:
        told = sorted(pool.map(start, range(4)))
    assert told == ["run_id: another process is starting one at this moment; wait for it"] * 3 + ["won"]
    assert registry.last_attempt(record_of(config).run_dir) == attempt
    planned = events.find(RunPaths(record_of(config).run_dir), [events.SUBMIT], [events.PLANNED])
    assert len(planned) == attempt, "those who lost have left nothing"


def test_a_record_that_cannot_be_finished_is_not_left(config: RunConfig) -> None:
    record = record_of(config)
    jobs = (replace(record.jobs[0], files={"run.yaml": "there already"}),)
    with pytest.raises(UserError):
        registry.create(replace(record, jobs=jobs))
    assert registry.last_attempt(record.run_dir) == 0
    registry.create(record)


def test_writers_at_once_lose_no_event_and_readers_see_whole_ones(config: RunConfig) -> None:
    paths = RunPaths(record_of(config).run_dir)

    def write(number: int) -> None:
        who = events.node_who(1, number % 2)
        events.append(paths, events.RUNNING, who=who, stage="train", attempt=1, number=number)
        assert events.read_events(paths).unreadable == ()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(8)))
    told = events.read_events(paths).events
    assert sorted(event.extra["number"] for event in told) == list(range(8))
    assert len({(event.number, event.who) for event in told}) == 8


@pytest.mark.parametrize("kind", ["memory", "emulator"])
def test_an_event_whose_answer_was_lost_is_sent_again_and_not_written_twice(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bucket_of_kind(kind, tmp_path, monkeypatch) as url:
        target = storage.at(f"{url}b/0001-submit-QUEUED.json")
        for _ in range(2):
            events.publish(target, "the same")
        with pytest.raises(FileExistsError):
            events.publish(target, "another")
        assert target.read_text() == "the same"


def test_a_sweep_lists_its_runs_as_seen_from_here(config: RunConfig) -> None:
    records = [record_of(config, run_id) for run_id in ("one", "two")]
    sweep = registry.create_sweep(records)
    assert sweep.parent == record_of(config).run_dir.parent / "sweeps"
    assert [str(record.run_dir) in (sweep / "jobs.json").read_text() for record in records] == [True, True]


def test_a_snapshot_of_the_code_travels_with_the_run(config: RunConfig, tmp_path: Path) -> None:
    code = tmp_path / "code"
    (code / "pkg").mkdir(parents=True)
    (code / "pkg" / "ours.py").write_text("VALUE = 1\n")
    (code / "link.py").symlink_to("pkg/ours.py")
    subprocess.run(["git", "init", "--quiet", str(code)], check=True)
    state = code_state.look(code)
    assert state is not None
    record = replace(record_of(config.model_copy(update={"code": "snapshot"})), code=state)
    registry.create(record)
    paths = RunPaths(record.run_dir)
    for name in ("pkg/ours.py", "link.py"):
        assert (paths.code_snapshot(1) / name).read_text() == "VALUE = 1\n"
    assert '"untracked"' in (paths.code(1) / "state.json").read_text()


def test_a_bucket_that_takes_a_record_has_no_problems_and_keeps_no_trace(config: RunConfig) -> None:
    exp_dir = storage.seen_from_here(config, config.exp_manager.exp_dir)
    assert storage.problems(exp_dir) == ()
    assert not storage.is_folder(exp_dir)


def test_a_bucket_that_is_missing_is_named_before_anything_is_recorded(
    parsed: Parsed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bucket_of_kind("emulator", tmp_path, monkeypatch) as url:
        config = parsed("launcher=vertex", "site.vertex.bucket=gone", f"launcher.bucket_url={url}")
        record = record_of(config)
        ((what, remedy),) = storage.problems(record.run_dir)
        assert what == "gs://gone/nemo-experiments/gpt_small/one cannot be used: there is no gs://gone"
        assert remedy == "create the bucket or name another as site.vertex.bucket"
        with pytest.raises(UserError, match=r"exp_manager.exp_dir: .* there is no gs://gone"):
            registry.create(record)


class RefusalError(Exception):
    def __init__(self, said: str, code: int) -> None:
        super().__init__(said)
        self.code = code


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (FileNotFoundError("b/o"), "create the bucket or name another as site.vertex.bucket"),
        (
            RefusalError("Anonymous caller does not have storage.objects.create access, 401", 401),
            "application-default login",
        ),
        (OSError("Forbidden: b/o\nme@x.y does not have storage.objects.create"), "Storage Object Admin on gs://b"),
        (OSError("Connection reset"), "whether gs://b can be reached"),
        (FSTimeoutError(), "whether gs://b can be reached"),
    ],
)
def test_what_a_bucket_refuses_is_told_with_what_helps(error: Exception, remedy: str) -> None:
    told, helps = storage.in_words(storage.at("gs://b/runs"), error)
    assert told.startswith("gs://b/runs cannot be used: ")
    assert remedy in helps


def test_a_job_that_a_bucket_does_not_let_us_note_is_named(
    parsed: Parsed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Taker:
        def submit(self, job: JobSpec, *, after: tuple[str, ...]) -> str:
            monkeypatch.setattr(ObjectStore, "pipe_file", self._refuse)
            return "customJobs/7"

        def _refuse(self, *_: object, **__: object) -> None:
            raise OSError("Connection reset")

    with bucket_of_kind("memory", tmp_path, monkeypatch) as url:
        record = record_of(parsed("launcher=vertex", "site.vertex.bucket=b", f"launcher.bucket_url={url}"))
        registry.create(record)
        with pytest.raises(
            UserError, match=r"job customJobs/7 of one was submitted, but not noted: .* Connection reset"
        ):
            dispatch.submit(record, cast(Scheduler, Taker()), after=())


def test_who_is_waited_for_long_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    told = ""
    with report.patience("gs://b", patience_s=0.0):
        while not told.endswith("\n"):  # however long it takes here
            told += capfd.readouterr().err
    assert told == "waiting for an answer from gs://b\n"
    with report.patience("gs://b", patience_s=600.0):
        pass
    assert capfd.readouterr().err == ""


def test_a_bucket_that_says_nothing_is_not_waited_for_without_end() -> None:
    place = storage.at("gs://b/runs")
    limits = place.storage_options["requests_timeout"]  # type: ignore[attr-defined]
    assert None not in (limits.sock_connect, limits.sock_read)
    assert "no answer" in storage.in_words(place, FSTimeoutError())[0]
    assert issubclass(FSTimeoutError, storage.failures(place))


def test_a_dry_run_asks_no_bucket(
    train: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bucket_of_kind("memory", tmp_path, monkeypatch) as url:
        monkeypatch.setattr(ObjectStore, "ls", None)  # whoever asks fails
        monkeypatch.setattr(ObjectStore, "info", None)
        on_vertex = ("launcher=vertex", "launcher.machine=n1-standard-8", "site.vertex.bucket=b")
        ran = train(*on_vertex, f"launcher.bucket_url={url}", "dry_run=true", "run_id=x")
        assert (ran.code, "dry run of x" in ran.out) == (0, True), ran.err
        assert train(*on_vertex, f"launcher.bucket_url={url}", "dry_run=true", "run_id=x").code == 0
        assert sum(folder.name.startswith("x") for folder in tmp_path.glob("dry_runs/*/*")) == 2
        assert not ObjectStore.store


def test_each_request_goes_to_cloud_storage_alone_whoever_imported_gcsfs_before() -> None:
    code = (
        "import fsspec, gcsfs; fsspec.get_filesystem_class('gs')\n"
        "from trainwright import storage; print(type(storage.at('gs://b/x').fs) is gcsfs.core.GCSFileSystem)"
    )
    anonymous = {**os.environ, "FSSPEC_GS_TOKEN": "anon"}  # else it looks for credentials, for a quarter of a minute
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=anonymous)
    assert asked.stdout == "True\n"
