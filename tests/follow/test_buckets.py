"""Runs on Vertex AI as seen from here: submitted, followed, cancelled, retried and resumed through a bucket."""

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.buckets import KINDS, ObjectStore, bucket_of_kind
from tests.conftest import Result
from tests.vertex_server import VertexServer
from trainwright import cli, registry, storage
from trainwright.follow import find, listing, logs
from trainwright.node import events, growing
from trainwright.node.run_paths import RunPaths

Train = Callable[..., Result]
IN_FOLDER = "b/nemo-experiments"


@dataclass
class Cloud:
    """A bucket, Vertex AI, and a command line here that knows both."""

    bucket_url: str
    server: VertexServer
    train: Train
    capfd: pytest.CaptureFixture[str]
    told: list[str] = field(default_factory=list)

    @property
    def exp_dir(self) -> Path:
        url = self.bucket_url if self.bucket_url.endswith("//") else f"{self.bucket_url}/"
        return storage.at(f"{url}{IN_FOLDER}")

    def paths(self, run_id: str) -> RunPaths:
        return RunPaths(self.exp_dir / "gpt_small" / run_id)

    def submit(self, *overrides: str) -> Result:
        return self.train(
            "launcher=vertex",
            "launcher.machine=n1-standard-8",
            "launcher.image=here/image:1",
            "site.vertex.project=p",
            "site.vertex.bucket=b",
            f"launcher.bucket_url={self.bucket_url}",
            f"launcher.api_endpoint={self.server.endpoint}",
            *overrides,
        )

    def __call__(self, name: str, *arguments: str) -> Result:
        """Run `trainwright NAME ...` on the runs in the bucket."""
        self.capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--exp-dir", str(self.exp_dir), *arguments])
        return Result(int(ended.value.code or 0), *self.capfd.readouterr())

    def node_says(self, run_id: str, state: str, attempt: int = 1, **extra: Any) -> None:
        who = events.node_who(attempt, 0)
        events.append(self.paths(run_id), state, who=who, stage="train", attempt=attempt, num_nodes=1, **extra)

    def node_writes(self, path: Path, content: bytes) -> None:
        storage.write_all({path: content})

    def end_jobs(self, state: str) -> None:
        for name in self.server.jobs:
            self.server.end(name, state)


@pytest.fixture(params=KINDS)
def cloud(
    request: pytest.FixtureRequest,
    train: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Iterator[Cloud]:
    with (
        bucket_of_kind(request.param, tmp_path / "buckets", monkeypatch) as url,
        VertexServer(course=["RUNNING"]) as server,
    ):
        yield Cloud(url, server, train, capfd)


def test_a_run_is_seen_from_here_from_its_start_to_its_end(cloud: Cloud) -> None:
    submitted = cloud.submit("run_id=one", "trainer.max_steps=9")
    assert submitted.code == 0, submitted.err
    paths = cloud.paths("one")
    assert f"status       trainwright status {paths.run_dir}" in submitted.out
    (job,) = cloud.server.jobs.values()
    assert (
        job.job_spec.worker_pool_specs[0].container_spec.command[1] == f"/gcs/{IN_FOLDER}/gpt_small/one/run/worker.pyz"
    )
    (run,) = json.loads(cloud("ps", "--json").out)["runs"]
    assert (run["run_id"], run["state"], run["launcher"]) == ("one", "RUNNING", "vertex")
    assert run["run_dir"] == str(paths.run_dir)

    cloud.node_says("one", events.RUNNING)
    steps = [{"step": step, "train_loss": 5.0 - step, "val_loss": 4.5 if step == 2 else None} for step in (1, 2, 3)]
    lines = b"".join(json.dumps(step).encode() + b"\n" for step in steps)
    cloud.node_writes(paths.metrics(1), lines + b'{"step": 4, "tr')
    header, row = (line.split() for line in cloud("ps").out.splitlines())
    assert header == ["run", "state", "step", "train_loss", "val_loss", "age"]
    assert row[:5] == ["one", "RUNNING", "3/9", "2.0000", "4.5000"]

    results = {"attempt": 1, "steps": 9, "max_steps": 9, "train_loss": 1.0, "val_loss": 1.5, "wall_s": 3.0}
    cloud.node_writes(paths.results, json.dumps(results).encode())
    cloud.node_says("one", events.SUCCEEDED)
    for word in ("one", "o", "-1", str(paths.run_dir)):
        shown = cloud("status", word).out
        assert "state        SUCCEEDED" in shown
        assert f"directory    {paths.run_dir}" in shown
    assert cloud("results", "one").out.split()[-5:] == ["SUCCEEDED", "9/9", "1", "1.5", "3"]


def test_logs_are_shown_whole_though_they_are_cut_into_parts(cloud: Cloud) -> None:
    cloud.submit("run_id=one")
    assert "nothing has written a log yet" in cloud("logs", "one").err
    log = cloud.paths("one").rank_log("train", 1, 0)
    for number, content in enumerate((b"first\nsec", b"ond\nthird", b"\n")):
        cloud.node_writes(growing.part(log, number), content)
    assert cloud("logs", "one").out == "first\nsecond\nthird\n"
    assert json.loads(cloud("logs", "one", "--json").out)["lines"] == ["first", "second", "third"]
    cloud.node_says("one", events.FAILED, exit_code=7, reason="rank 0 ended with exit code 7")
    followed = cloud("logs", "one", "--follow")
    assert (followed.code, followed.out) == (1, "first\nsecond\nthird\n")
    assert "one FAILED: rank 0 ended with exit code 7" in followed.err
    refused = cloud("logs", "one", "--rank", "3")
    assert (refused.code, "has logs of ranks 0" in refused.err) == (2, True)


def test_cancelling_ends_the_job_and_says_so_in_the_bucket(cloud: Cloud) -> None:
    cloud.submit("run_id=one")
    assert cloud("cancel", "one", "--yes").out == "one  CANCELLED\n"
    assert [job.state.name for job in cloud.server.jobs.values()] == ["JOB_STATE_CANCELLING"]
    assert registry.refresh(cloud.paths("one").run_dir).state == events.CANCELLED
    assert cloud("cancel", "one", "--yes").out == "one  was over: CANCELLED\n"


def test_a_run_that_goes_on_is_refused_and_one_that_failed_is_tried_again(cloud: Cloud) -> None:
    cloud.submit("run_id=one")
    cloud.node_says("one", events.RUNNING)
    refused = cloud.submit("run_id=one")
    assert (refused.code, "run_id=one is still in Vertex AI" in refused.err) == (3, True)
    cloud.node_says("one", events.FAILED, exit_code=1)
    cloud.end_jobs("FAILED")
    again = cloud("retry", "--failed", "--json", "one")
    assert json.loads(again.out)["runs"] == [{"run_id": "one", "state": "SUBMITTED", "attempt": 2}], again.err
    assert registry.last_attempt(cloud.paths("one").run_dir) == 2
    assert [job.labels["trainwright_attempt"] for job in cloud.server.jobs.values()] == ["1", "2"]


def test_a_run_is_resumed_and_held_to_its_recorded_config(cloud: Cloud) -> None:
    cloud.submit("run_id=one", "trainer.max_steps=9")
    cloud.node_says("one", events.SUCCEEDED)
    cloud.end_jobs("SUCCEEDED")
    refused = cloud("resume", "one", "optim.lr=1")
    assert (refused.code, "was started with another config: optim.lr" in refused.err) == (3, True)
    resumed = cloud("resume", "one", "trainer.max_steps=20")
    assert resumed.code == 0, resumed.err
    assert registry.read_record(cloud.paths("one").run_dir, 2)["config"]["trainer"]["max_steps"] == 20
    assert "attempt      2" in cloud("status", "one").out


def test_a_sweep_is_followed_as_one(cloud: Cloud) -> None:
    assert cloud.submit("-m", "seed=1,2").code == 0
    (sweep,) = storage.subfolders(cloud.exp_dir / "gpt_small" / "sweeps")
    for word in (sweep.name, str(sweep)):
        header, *rows = (line.split() for line in cloud("results", word).out.splitlines())
        assert [row[header.index("seed")] for row in rows] == ["1", "2"]
    assert len(cloud("ps").out.splitlines()) == 3
    refused = cloud("status", sweep.name)
    assert (refused.code, "this is a sweep of 2 runs" in refused.err) == (2, True)


def test_a_place_in_a_bucket_where_nothing_is_is_refused(cloud: Cloud) -> None:
    refused = cloud("status", "x")
    assert (refused.code, f"--exp-dir: {cloud.exp_dir} is no directory" in refused.err) == (2, True)
    cloud.submit("run_id=one")
    for word in ("two", str(cloud.exp_dir / "gpt_small")):
        refused = cloud("status", word)
        assert (refused.code, word in refused.err) == (2, True)


def test_runs_are_looked_for_in_the_bucket_of_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket_of_kind("emulator", tmp_path, monkeypatch):
        found = find.composed_exp_dirs("site.vertex.bucket=b", "~local")
    assert [str(place) for place in found if storage.is_bucket(place)] == [f"gs://{IN_FOLDER}"]


def test_a_log_is_read_on_where_it_was_left(cloud: Cloud) -> None:
    log, shown = cloud.paths("one").rank_log("train", 1, 0), io.BytesIO()
    reader = logs.Reader(log)
    for number, content, told in (
        (0, b"one", b"one"),
        (0, b"one two", b" two"),
        (0, b"one two", b""),
        (1, b" three", b" three"),
    ):
        cloud.node_writes(growing.part(log, number), content)
        reader.copy_rest(shown)
        assert shown.getvalue().endswith(told)
    assert shown.getvalue() == b"one two three"


def test_a_bucket_full_of_runs_is_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket_of_kind("memory", tmp_path, monkeypatch):
        exp_dir = storage.at(f"memory://{IN_FOLDER}")
        for number in range(20):
            paths = RunPaths(exp_dir / "name" / f"run-{number}")
            events.append(paths, events.PLANNED, who=events.SUBMIT, stage=None, attempt=1)
            storage.write_all({paths.results: b'{"attempt": 1, "steps": 7}', paths.checkpoints / "last" / "x": b""})
        ObjectStore.listed.clear()
        found = listing.all_runs([exp_dir])
        assert len(ObjectStore.listed) == 1
    assert [(run.state.state, run.metrics.step) for run in found] == [(events.PLANNED, 7)] * 20


def test_what_another_machine_writes_is_seen_at_once(cloud: Cloud) -> None:
    cloud.submit("run_id=one")
    paths = cloud.paths("one")
    assert registry.refresh(paths.run_dir).state == events.SUBMITTED
    if storage.is_bucket(paths.run_dir):
        name = "0009-a1-node0-RUNNING.json"
        event = {"schema_version": 1, "state": "RUNNING", "time": events.timestamp(), "who": "a1-node0"}
        text = json.dumps({**event, "stage": "train", "attempt": 1, "num_nodes": 1})
        other: Any = type(paths.run_dir.fs)  # type: ignore[attr-defined]
        options = {**paths.run_dir.fs.storage_options, "skip_instance_cache": True}  # type: ignore[attr-defined]
        other(**options).pipe_file((paths.events / name).path, text.encode())  # type: ignore[attr-defined]
    else:
        cloud.node_says("one", events.RUNNING)
    assert registry.refresh(paths.run_dir).state == events.RUNNING
