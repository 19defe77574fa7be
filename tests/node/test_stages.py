"""Stages in one job, on one node and on two; jobs that are started again in place; run directories in a bucket."""

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import bucket_mount
from tests.node.test_worker import DEADLINE_S, STOPPABLE, wait_for
from trainwright.node import events, growing
from trainwright.node.run_paths import RunPaths
from trainwright.node.run_state import fold
from trainwright.worker_zip import build_worker

FINE, BAD = "print('fine')", "print('oh no'); raise SystemExit(7)"
STAYS = "import signal; print('ready'); signal.pause()"


class Job:
    """A recorded run whose stages lead on to each other, and the containers that run them on nodes of Vertex AI."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.paths = folder, RunPaths(folder / "run")
        self.containers: list[subprocess.Popen[bytes]] = []

    def write(self, scripts: dict[str, str], nodes: dict[str, int] | None = None, **job: Any) -> "Job":
        self.paths.jobs.mkdir(parents=True)
        self.paths.record(1).write_text("attempt: 1\n")
        for stage, following in itertools.pairwise([*scripts, None]):
            program = self.folder / f"{stage}.py"
            program.write_text(textwrap.dedent(scripts[str(stage)]))
            content = {
                "schema_version": 1,
                "launch": "plain",
                "command": [sys.executable, str(program)],
                "python": sys.executable,
                "env": {},
                "num_nodes": (nodes or {}).get(str(stage), 1),
                "devices": 1,
                "grace_s": 20.0,
                "next_stage": following,
                **job,
            }
            self.paths.job(1, str(stage)).write_text(json.dumps(content))
        self.first = next(iter(scripts))
        self.num_nodes = max((nodes or {}).values(), default=1)
        build_worker(self.paths.worker)
        return self

    def start(self, node: int = 0, **environ: str) -> subprocess.Popen[bytes]:
        """Start a container as Vertex AI does, the same way each time."""
        hosts = [f"127.0.0.1:{2222 + number}" for number in range(self.num_nodes)]
        cluster = {"chief": hosts[:1], **({"worker": hosts[1:]} if hosts[1:] else {})}
        task = {"type": "worker", "index": node - 1} if node else {"type": "chief", "index": 0}
        vertex = {
            "CLOUD_ML_JOB_ID": "1234",
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": task, "environment": "cloud", "job": "{}"}),
            "RANK": str(node),
            "WORLD_SIZE": str(self.num_nodes),
        }
        argv = [sys.executable, self.paths.worker, self.paths.run_dir, "--stage", self.first, "--attempt", "1"]
        with open(self.folder / f"said-{len(self.containers)}", "wb") as said:
            container = subprocess.Popen(
                [str(word) for word in argv], stdout=said, stderr=said, env={**os.environ, **vertex, **environ}
            )
        self.containers.append(container)
        return container

    def run(self, **environ: str) -> list[int]:
        """Run all nodes to their end, the last one started first, and return their exit codes in order."""
        containers = [self.start(node, **environ) for node in reversed(range(self.num_nodes))]
        return [container.wait(DEADLINE_S) for container in reversed(containers)]

    def said(self, number: int) -> str:
        return (self.folder / f"said-{number}").read_text()

    def told(self) -> list[str]:
        """Return what the nodes told, in order: `a1-node0 train RUNNING`."""
        history = events.read_events(self.paths)
        assert history.unreadable == ()
        return [f"{event.who} {event.stage} {event.state}" for event in history.events if event.node is not None]

    def state(self) -> str:
        return fold(events.read_events(self.paths).events).state

    def log(self, stage: str, attempt: int = 1, rank: int = 0) -> Path:
        return self.paths.rank_log(stage, attempt, rank)

    def await_ready(self, stage: str, attempt: int = 1, ranks: tuple[int, ...] = (0,)) -> None:
        logs = [self.log(stage, attempt, rank) for rank in ranks]
        wait_for(lambda: all(log.exists() and b"ready" in log.read_bytes() for log in logs))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    for container in job.containers:
        container.kill()
        container.wait()


def test_a_stage_goes_on_with_the_next_in_the_same_process(job: Job) -> None:
    assert job.write({"prepare": FINE, "train": "print('trains')", "export": FINE}).run() == [0]
    assert job.told() == [
        f"a1-node0 {stage} {state}" for stage in ("prepare", "train", "export") for state in ("RUNNING", "SUCCEEDED")
    ]
    assert job.log("train").read_text() == "trains\n"
    workers = {event.extra["process"]["pid"] for event in events.find(job.paths, ["a1-node0"], ["RUNNING"])}
    assert len(workers) == 1


def test_a_stage_that_fails_ends_the_job(job: Job) -> None:
    assert job.write({"prepare": FINE, "train": BAD, "export": FINE}).run() == [7]
    assert job.told()[-2:] == ["a1-node0 train RUNNING", "a1-node0 train FAILED"]


def test_a_job_that_is_told_to_stop_begins_no_other_stage(job: Job) -> None:
    container = job.write({"prepare": STOPPABLE.replace("75", "0"), "train": FINE}).start()
    job.await_ready("prepare")
    container.terminate()
    assert container.wait(DEADLINE_S) == 143
    assert job.told() == ["a1-node0 prepare RUNNING", "a1-node0 prepare CANCELLED"]


def test_a_stage_that_was_found_to_be_done_is_passed_over(job: Job) -> None:
    job.write({"prepare": FINE, "train": BAD, "export": FINE})
    events.append(job.paths, "SUCCEEDED", who="submit", stage="train", attempt=1, reason="skipped: it is there")
    assert job.run() == [0]
    assert [line for line in job.told() if "train" in line] == []
    assert job.state() == "SUCCEEDED"


def test_nodes_that_a_stage_does_not_use_wait_for_its_end(job: Job) -> None:
    prepare = "import pathlib, sys; pathlib.Path(sys.argv[0]).with_suffix('.out').write_text('ready')"
    train = """
        import os, pathlib, sys
        print(os.environ["NODE_RANK"], pathlib.Path(sys.argv[0]).with_name("prepare.out").read_text())
    """
    job.write({"prepare": prepare, "train": train, "export": FINE}, {"prepare": 1, "train": 2, "export": 1})
    assert job.run() == [0, 0]
    assert [job.log("train", rank=rank).read_text() for rank in (0, 1)] == ["0 ready\n", "1 ready\n"]
    assert [line for line in job.told() if "train" not in line] == [
        "a1-node0 prepare RUNNING",
        "a1-node0 prepare SUCCEEDED",
        "a1-node0 export RUNNING",
        "a1-node0 export SUCCEEDED",
    ]
    assert job.state() == "SUCCEEDED"


def test_a_node_that_waits_for_a_stage_ends_as_that_does(job: Job) -> None:
    assert job.write({"prepare": BAD, "train": FINE}, {"prepare": 1, "train": 2}).run() == [7, 7]
    assert job.told() == ["a1-node0 prepare RUNNING", "a1-node0 prepare FAILED"]
    assert "node 0 was FAILED at prepare: rank 0 ended with exit code 7" in job.said(0)


def test_a_node_that_waits_can_be_told_to_stop(job: Job) -> None:
    job.write({"prepare": STAYS, "train": FINE}, {"prepare": 1, "train": 2})
    first, second = job.start(0), job.start(1)
    job.await_ready("prepare")
    second.terminate()
    assert second.wait(DEADLINE_S) in (143, -signal.SIGTERM)  # the second where it was told before it could wait
    first.terminate()
    assert first.wait(DEADLINE_S) == 143


def test_a_container_that_is_started_again_goes_on_as_the_next_attempt(job: Job) -> None:
    job.write({"prepare": FINE, "train": STAYS + "\n", "export": FINE})
    container = job.start()
    job.await_ready("train")
    container.kill()
    container.wait()
    (job.folder / "train.py").write_text("print('again')")
    assert job.run() == [0]
    assert job.told() == [
        "a1-node0 prepare RUNNING",
        "a1-node0 prepare SUCCEEDED",
        "a1-node0 train RUNNING",
        "a2-node0 train RUNNING",
        "a2-node0 train SUCCEEDED",
        "a2-node0 export RUNNING",
        "a2-node0 export SUCCEEDED",
    ]
    assert (job.log("train").read_text(), job.log("train", 2).read_text()) == ("ready\n", "again\n")
    assert job.paths.record(2).read_text() == "attempt: 2\n"
    assert job.state() == "SUCCEEDED"


def test_nodes_meet_again_after_one_of_them_was_started_again(job: Job) -> None:
    job.write({"train": STAYS}, {"train": 2})
    left, lost = job.start(0), job.start(1)
    job.await_ready("train", ranks=(0, 1))
    lost.kill()
    lost.wait()
    (job.folder / "train.py").write_text("print('again')")
    back = job.start(1)
    assert left.wait(DEADLINE_S) == 75
    assert "node 1 was PREEMPTED: it was started again" in job.said(0)
    assert job.start(0).wait(DEADLINE_S) == 0
    assert back.wait(DEADLINE_S) == 0
    assert job.state() == "SUCCEEDED"


def test_a_plain_command_is_told_of_nodes_and_not_of_ranks(job: Job) -> None:
    names = ("NODE_RANK", "NNODES", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    script = f"import os; print(*(os.environ.get(name, '-') for name in {names}))"
    job.write({"prepare": script, "train": script}, {"prepare": 1, "train": 2})
    assert job.run(MASTER_ADDR="chief", MASTER_PORT="2222", LOCAL_RANK="0") == [0, 0]
    assert job.log("prepare").read_text() == "0 1 - - - - -\n"
    assert job.log("train", rank=1).read_text() == "1 2 2222 - - - 127.0.0.1\n"


def test_a_node_says_what_it_was_told_of_the_cluster_and_no_secret(job: Job) -> None:
    assert job.write({"train": FINE}).run(TRAINWRIGHT_DEBUG="1", HF_TOKEN="hunter2", AIP_MODEL_DIR="gs://b/model/") == [
        0
    ]
    assert "worker: CLOUD_ML_JOB_ID=1234\n" in job.said(0)
    assert "worker: AIP_MODEL_DIR=gs://b/model/\n" in job.said(0)
    assert '"task": {"type": "chief", "index": 0}' in job.said(0)
    assert "hunter2" not in job.said(0)


def test_a_job_that_was_submitted_by_hand_as_recorded_lacks_its_secrets(job: Job) -> None:
    assert job.write({"train": FINE}, env_from=["HF_TOKEN"]).run(HF_TOKEN="<HF_TOKEN>") == [2]
    (event,) = events.find(job.paths, ["a1-node0"], ["FAILED"])
    assert event.extra["reason"] == "variables of launcher.env_from did not reach this node: HF_TOKEN"


@pytest.mark.parametrize(("script", "code"), [(FINE, 0), (BAD, 7)])
def test_in_a_bucket_all_that_grows_is_there_when_the_last_event_is(job: Job, script: str, code: int) -> None:
    job.write({"train": script}, {"train": 2}, scratch=str(job.folder / "scratch"))
    bucket = bucket_mount.environment(job.paths.run_dir, job.folder)
    codes = job.run(**bucket, **{growing.PERIOD: "3600"})
    assert codes[0] == code or codes[1] == code
    assert bucket_mount.refused(bucket) == []
    assert job.state() == ("FAILED" if code else "SUCCEEDED")
    assert not (job.folder / "scratch" / "run").exists()  # a machine that lives on does not fill up
    logs = {rank: job.log("train", rank=rank) for rank in (0, 1)}
    spoke = [rank for rank, log in logs.items() if log.exists() and log.read_text()]  # one may stop the other early
    assert spoke if code else spoke == [0, 1]
    records = [json.loads(job.paths.rank_record("train", 1, rank).read_text()) for rank in spoke]
    assert code in [record["exit_code"] for record in records]
    for event in events.read_events(job.paths).events:
        if event.state == "FAILED":
            assert event.extra["last_lines"] == ["oh no"]
            assert (job.paths.run_dir / event.extra["log"]).read_text() == "oh no\n"


def test_in_a_bucket_a_log_is_seen_while_it_grows_and_a_restart_keeps_it(job: Job) -> None:
    job.write({"train": STAYS}, scratch=str(job.folder / "scratch"))
    bucket = bucket_mount.environment(job.paths.run_dir, job.folder)
    container = job.start(**bucket, **{growing.PERIOD: "0.1"})
    job.await_ready("train")
    container.kill()
    container.wait()
    (job.folder / "train.py").write_text("print('again')")
    assert job.run(**bucket) == [0]
    assert bucket_mount.refused(bucket) == []
    assert (job.log("train").read_text(), job.log("train", 2).read_text()) == ("ready\n", "again\n")
    assert job.paths.record(2).read_text() == "attempt: 2\n"
    assert not growing.parts(job.log("train", 3))
