"""`trainwright tensorboard` as a user types it: TensorBoard itself here, Vertex AI's played by a server here."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from tests.buckets import bucket_of_kind
from tests.conftest import Result
from tests.fakes import Failure, VertexServer
from trainwright import cli, storage
from trainwright.follow import event_files
from trainwright.node.tfevents import Point

Train = Callable[..., Result]
URL = "https://us-central1.tensorboard.googleusercontent.com/experiment/"
PARENT = "projects/p/locations/us-central1"
FIRST = {1: 3.5, 2: 3.25, 3: 3.0}


def write_events(folder: Path, curves: dict[str, dict[int, float]], *, since: float = 1.7e9) -> Path:
    """Write scalars as frameworks do, a second a step; return the file."""
    before = set(folder.glob("*tfevents*"))
    writer = EventFileWriter(str(folder), filename_suffix=f".{len(before)}")
    for tag, points in curves.items():
        for step, value in points.items():
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(step=step, wall_time=since + step, summary=summary))
    writer.close()
    (file,) = set(folder.glob("*tfevents*")) - before
    return file


@dataclass
class Cloud:
    """A bucket, Vertex AI, and a command line here that knows both."""

    bucket_url: str
    server: VertexServer
    train: Train
    capfd: pytest.CaptureFixture[str]
    tmp_path: Path

    @property
    def exp_dir(self) -> Path:
        return storage.at(f"{self.bucket_url.rstrip('/')}{'//' if '://' in self.bucket_url else '/'}b/nemo-experiments")

    def run_dir(self, run_id: str) -> Path:
        return self.exp_dir / "gpt_small" / run_id

    def submit(self, run_id: str, *overrides: str) -> None:
        submitted = self.train(
            "launcher=vertex",
            "launcher.machine=n1-standard-8",
            "launcher.image=here/image:1",
            "site.vertex.project=p",
            "site.vertex.bucket=b",
            f"launcher.bucket_url={self.bucket_url}",
            f"launcher.api_endpoint={self.server.endpoint}",
            f"run_id={run_id}",
            *overrides,
        )
        assert submitted.code == 0, submitted.err

    def write(self, run_id: str, curves: dict[str, dict[int, float]], below: str = "", *, since: float = 1.7e9) -> None:
        folder = self.tmp_path / "written" / run_id / below
        file = write_events(folder, curves, since=since)
        target = self.run_dir(run_id) / below / file.name if below else self.run_dir(run_id) / file.name
        storage.write_all({target: file.read_bytes()})

    def __call__(self, *arguments: str) -> Result:
        """Run `trainwright tensorboard ...` on the runs in the bucket."""
        self.capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(["tensorboard", "--exp-dir", str(self.exp_dir), *arguments])
        return Result(int(ended.value.code or 0), *self.capfd.readouterr())


@pytest.fixture
def kind() -> str:
    return "folder"


@pytest.fixture
def cloud(
    kind: str, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Cloud]:
    with (
        bucket_of_kind(kind, tmp_path / "buckets", monkeypatch) as url,
        VertexServer(course=["RUNNING"]) as server,
    ):
        yield Cloud(url, server, train, capfd, tmp_path)


# ---- on Vertex AI


@pytest.mark.parametrize("kind", ["folder", "memory", "emulator"])
def test_an_upload_makes_instance_experiment_and_curves(cloud: Cloud) -> None:
    cloud.submit("one")
    cloud.write("one", {"train_loss": FIRST, "val_loss": {3: 3.125}})
    cloud.write("one", {"noise": {1: 1.0}}, "extra")
    done = cloud("one", "--upload", "--json")
    assert done.code == 0, done.err
    service = cloud.server.tensorboard
    assert service.curves() == {
        "one/default/train_loss": FIRST,
        "one/default/val_loss": {3: 3.125},
        "one/extra/noise": {1: 1.0},
    }
    (instance,) = service.instances.values()
    assert (instance.display_name, dict(instance.labels)) == ("trainwright", {"trainwright": "runs"})
    (row,) = json.loads(done.out)["runs"]
    assert (row["num_points"], row["num_new"], row["tensorboard"]) == (5, 5, instance.name)
    assert row["url"] == URL + f"{instance.name}/experiments/one".replace("/", "+")


def test_a_second_upload_adds_only_what_is_new(cloud: Cloud) -> None:
    cloud.submit("one")
    cloud.write("one", {"train_loss": FIRST})
    assert "3 new of 3 points" in cloud("one", "--upload").out
    assert "0 new of 3 points" in cloud("one", "--upload").out
    # A resumed run logs its step 3 once more, later and with another value; NeMo has moved the first file away.
    (first,) = cloud.run_dir("one").glob("*tfevents*")
    (cloud.run_dir("one") / "run_0").mkdir()
    first.rename(cloud.run_dir("one") / "run_0" / first.name)
    cloud.write("one", {"train_loss": {3: 2.875, 4: 2.5}}, since=1.8e9)
    assert "2 new of 4 points" in cloud("one", "--upload").out
    service = cloud.server.tensorboard
    assert service.curves() == {"one/default/train_loss": {1: 3.5, 2: 3.25, 3: 2.875, 4: 2.5}}
    assert (len(service.instances), len(service.experiments), len(service.series)) == (1, 1, 1)
    assert service.sent == [3, 2]


def test_runs_share_an_instance_and_long_curves_take_several_requests(cloud: Cloud) -> None:
    cloud.submit("one")
    cloud.submit("Two_2")
    cloud.write("one", {f"tag{number}": dict.fromkeys(range(600), 0.5) for number in range(3)})
    cloud.write("Two_2", {"train_loss": FIRST})
    cloud.server.tensorboard.longest_page = 2
    assert cloud("one", "Two_2", "--upload").code == 0
    service = cloud.server.tensorboard
    assert service.sent == [1000, 800, 3]
    assert len(service.instances) == 1
    shown = {one.display_name: name.rpartition("/")[2] for name, one in service.experiments.items()}
    assert shown["one"] == "one"
    assert re.fullmatch(r"two-2-[0-9a-f]{8}", shown["Two_2"])
    assert "0 new of 1,800 points" in cloud("one", "--upload").out


@pytest.mark.parametrize("is_taken", [False, True], ids=["busy", "answer lost"])
def test_what_may_work_later_is_tried_again_and_nothing_is_made_twice(is_taken: bool, cloud: Cloud) -> None:
    cloud.submit("one")
    cloud.write("one", {"train_loss": FIRST})
    methods = (
        "ListTensorboards",
        "CreateTensorboard",
        "CreateTensorboardExperiment",
        "CreateTensorboardRun",
        "BatchCreateTensorboardTimeSeries",
        "WriteTensorboardExperimentData",
    )
    for method in methods:
        cloud.server.fail(method, Failure(code="UNAVAILABLE", is_taken=is_taken))
    too_often = "Quota exceeded for quota metric 'Tensorboard data write requests'"
    cloud.server.fail("WriteTensorboardExperimentData", Failure(code="RESOURCE_EXHAUSTED", message=too_often))
    done = cloud("one", "--upload")
    assert done.code == 0, done.err
    assert done.err.count("trying again") == len(methods) + 1
    service = cloud.server.tensorboard
    assert service.curves() == {"one/default/train_loss": FIRST}
    assert (len(service.instances), len(service.experiments), len(service.runs)) == (1, 1, 1)


@pytest.mark.parametrize(
    ("method", "failure", "told"),
    [
        ("ListTensorboards", Failure(code="PERMISSION_DENIED", message="no"), "ask for roles/aiplatform.user"),
        ("ListTensorboards", Failure(code="PERMISSION_DENIED", reason="SERVICE_DISABLED"), "gcloud services enable"),
        ("CreateTensorboard", Failure(code="INVALID_ARGUMENT", message="key"), "INVALID_ARGUMENT: key"),
    ],
)
def test_refusals_are_told_with_a_remedy(method: str, failure: Failure, told: str, cloud: Cloud) -> None:
    cloud.submit("one")
    cloud.write("one", {"train_loss": FIRST})
    cloud.server.fail(method, failure)
    refused = cloud("one", "--upload")
    assert (refused.code, refused.out) == (1, "")
    assert told in refused.err


@pytest.mark.parametrize("kind", ["emulator"])
def test_an_instance_of_the_users_is_used(cloud: Cloud) -> None:
    from google.cloud.aiplatform_v1 import Tensorboard

    name = f"{PARENT}/tensorboards/99"
    account = "launcher.service_account=me@p.iam.gserviceaccount.com"
    cloud.submit("one", f"launcher.tensorboard={name}", account)
    cloud.write("one", {"train_loss": FIRST}, "logs")  # what Vertex AI watches
    missing = cloud("one", "--upload")
    assert missing.code == 1
    assert "NOT_FOUND" in missing.err
    cloud.server.tensorboard.instances[name] = Tensorboard(name=name, display_name="mine")
    assert cloud("one", "--upload").code == 0
    assert cloud.server.tensorboard.curves() == {"one/default/train_loss": FIRST}
    assert list(cloud.server.tensorboard.instances) == [name]
    kept = cloud("one", "--delete", "--yes")
    assert kept.code == 1
    assert "was not made by trainwright; add --force" in kept.err
    assert cloud("one", "--delete", "--yes", "--force").out == f"deleted {name}\n"


def test_deleting_spares_what_belongs_to_other_runs(cloud: Cloud) -> None:
    for run_id in ("one", "two"):
        cloud.submit(run_id)
        cloud.write(run_id, {"train_loss": FIRST})
    assert cloud("one", "two", "--upload").code == 0
    unasked = cloud("one", "two", "--delete")
    assert unasked.code == 2
    assert "Add --yes if you mean it" in unasked.err
    refused = cloud("one", "--delete", "--yes")
    assert refused.code == 1
    assert "holds experiments of other runs, too: two; name these runs as well, or add --force" in refused.err
    assert len(cloud.server.tensorboard.experiments) == 2
    (name,) = cloud.server.tensorboard.instances
    deleted = cloud("one", "two", "--delete", "--yes", "--json")
    assert json.loads(deleted.out) == {"schema_version": 1, "deleted": [name]}
    assert cloud.server.tensorboard.curves() == {}
    assert "nothing to delete" in cloud("one", "--delete", "--yes").out


@pytest.mark.parametrize(("answer", "code"), [("n\n", 1), ("\x03", 130), ("y\n", 0)])
def test_a_terminal_is_asked_before_anything_is_deleted(answer: str, code: int, cloud: Cloud) -> None:
    cloud.submit("one")
    cloud.write("one", {"train_loss": FIRST})
    cloud("one", "--upload")
    main = "from trainwright.cli import main; main()"
    command = [sys.executable, "-c", main, "tensorboard", str(cloud.run_dir("one")), "--delete"]
    ours, theirs = pty.openpty()
    take_terminal = (  # Ctrl-C is for the terminal's own session
        "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", take_terminal, *command], stdin=theirs, stderr=subprocess.PIPE, text=True
    ) as asked:
        assert asked.stderr is not None
        said = ""
        while not said.endswith("[y/N] "):
            said += asked.stderr.read(1) or pytest.fail(said)
        os.write(ours, answer.encode())
        assert asked.wait() == code
    os.close(ours)
    os.close(theirs)
    assert len(cloud.server.tensorboard.instances) == (0 if code == 0 else 1)


def test_a_run_without_scalars_is_told(cloud: Cloud) -> None:
    cloud.submit("one")
    refused = cloud("one", "--upload")
    assert refused.code == 2
    assert "one: has no scalars yet" in refused.err
    assert cloud.server.tensorboard.instances == {}


def test_a_local_run_goes_to_the_sites_project(train: Train, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert train("debug=fast", "run_id=here", "trainer.max_steps=1", "dry_run=true").code == 0
    (record,) = tmp_path.glob("dry_runs/**/run.yaml")
    write_events(record.parents[1], {"train_loss": FIRST})
    (record.parent / "events").mkdir(exist_ok=True)
    with pytest.raises(SystemExit) as ended:
        cli.main(["tensorboard", str(record.parents[1]), "--upload"])
    assert ended.value.code == 2
    assert "site.vertex.project=<site.vertex.project> is not set" in capfd.readouterr().err


# ---- here


@pytest.mark.parametrize("kind", ["emulator"])
def test_a_copy_of_a_bucket_grows_by_what_is_new(cloud: Cloud, tmp_path: Path) -> None:
    cloud.submit("one")
    file = write_events(tmp_path / "w", {"train_loss": FIRST})
    whole = file.read_bytes()
    target = cloud.run_dir("one") / file.name
    copy = event_files.LocalCopy(cloud.run_dir("one"), tmp_path / "copy")
    copy.refresh()
    assert event_files.read(tmp_path / "copy") == {}
    for size in (len(whole) - 30, len(whole), len(whole)):
        storage.write_all({target: whole[:size]})
        copy.refresh()
        assert (tmp_path / "copy" / file.name).read_bytes() == whole[:size]
    points = event_files.read(tmp_path / "copy")["default"]["train_loss"]
    assert points[0] == Point("train_loss", 1, 1.7e9 + 1, 3.5)
    assert [point.step for point in points] == [1, 2, 3]


def test_tensorboard_shows_two_runs_until_it_is_interrupted(tmp_path: Path) -> None:
    for run_id in ("one", "two"):
        (tmp_path / run_id / "run" / "events").mkdir(parents=True)
        write_events(tmp_path / run_id, {"train_loss": FIRST})
    command = [sys.executable, "-c", "from trainwright.cli import main; main()", "tensorboard", "--port", "0"]
    with subprocess.Popen(
        [*command, f"{tmp_path}/one", f"{tmp_path}/two"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as started:
        assert started.stderr is not None
        timer = threading.Timer(60, os.killpg, (started.pid, signal.SIGKILL))
        timer.start()
        lines = iter(started.stderr.readline, "")
        address = next(found.group() for line in lines if (found := re.search(r"http://localhost:\d+/", line)))
        shown: list[str] = []
        while len(shown) < 2:
            with urllib.request.urlopen(f"{address}data/runs") as answer:
                shown = json.load(answer)
        assert sorted(shown) == ["one", "two"]
        started.send_signal(signal.SIGTERM)
        started.stderr.read()  # both it and TensorBoard have ended
        assert started.wait() == 0
        timer.cancel()
