"""A run on Vertex AI from the command to its results, no cloud needed: two nodes of two ranks, all of them processes.

The service answers over gRPC and starts the containers' command lines here, the bucket is a folder in which the nodes
may do no more than a mounted bucket allows. One run goes through three jobs: cancelled, killed, and brought to its end.
"""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import bucket_mount
from tests.backends.native.runs import losses, scalar_steps
from tests.conftest import Result
from tests.fakes import Containers, VertexServer
from tests.slurm.cluster import wait_for
from tests.slurm.runs import processes
from tests.vertex.cloud import START_S, Cloud, write_data
from trainwright.backends.native.retention import saved_checkpoints

ENDLESS, SAVE_EVERY = 1_000_000, 5
TWO_BY_TWO = (
    "model=llama_tiny",
    "launcher=vertex",
    "launcher.machine=n1-standard-8",
    "hardware.num_nodes=2",
    "hardware.devices=2",
    "model.vocab_size=100",
    "model.hidden_size=32",
    "model.ffn_hidden_size=48",
    "data.tokenizer.vocab_size=100",
    "data.text=null",
    "data.splits_string='90,10,0'",
    "data.seq_length=16",
    "data.micro_batch_size=1",
    "data.global_batch_size=4",
    f"trainer.max_steps={ENDLESS}",
    f"trainer.val_check_interval={SAVE_EVERY}",
    "trainer.limit_val_batches=1",
    "trainer.log_every_n_steps=1",
    "trainer.num_threads=1",
    f"exp_manager.checkpoint_callback_params.every_n_train_steps={SAVE_EVERY}",
    "+launcher.env.PYTHONFAULTHANDLER='1'",
)


@pytest.fixture
def cloud(train: Callable[..., Result], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Cloud]:
    (tmp_path / "site").mkdir()
    with VertexServer() as server:
        cloud = Cloud(tmp_path, server, train, capfd, "llama_tiny", "chain-1")
        write_data(cloud.bucket / "text")
        environment = bucket_mount.environment(cloud.paths.run_dir, tmp_path / "site")
        server.containers = Containers(logs=tmp_path / "containers", environment=environment)
        yield cloud


def saved(cloud: Cloud) -> list[int]:
    """Return the steps of which there is a complete checkpoint."""
    return [checkpoint.step for checkpoint in saved_checkpoints(cloud.paths.checkpoints)]


def await_save(cloud: Cloud, attempt: int, newest_before: int) -> None:
    """Return when an attempt has saved and told of steps."""

    def has_saved() -> bool:
        return cloud.num_steps(attempt) > SAVE_EVERY and saved(cloud)[-1] > newest_before

    wait_for(has_saved, f"attempt {attempt} saves", START_S)


def test_a_run_is_cancelled_then_killed_and_comes_to_its_end(cloud: Cloud) -> None:
    submitted = cloud.submit(*TWO_BY_TWO, f"data.data_prefix=[{cloud.bucket}/text]")
    assert submitted.code == 0, submitted.err
    await_save(cloud, attempt=1, newest_before=0)
    (run,) = json.loads(cloud("ps", "--json").out)["runs"]
    assert (run["run_id"], run["state"], run["launcher"], run["max_steps"]) == ("chain-1", "RUNNING", "vertex", ENDLESS)
    assert run["step"] > SAVE_EVERY
    assert run["train_loss"] > 0
    assert len(processes("chain-1")) >= 2 * 2 + 4 * 2  # worker and torchrun a node, wrapper and trainer a rank

    assert cloud("cancel", "chain-1", "--yes").out == "chain-1  CANCELLED\n"
    assert cloud.end_of_job() == "CANCELLED"
    assert cloud.status()["state"] == "CANCELLED"
    first = saved(cloud)[-1]

    resumed = cloud("resume", "chain-1")
    assert resumed.code == 0, resumed.err
    await_save(cloud, attempt=2, newest_before=first)
    os.kill(cloud.trainer(rank=3), signal.SIGABRT)
    assert cloud.end_of_job() == "FAILED"
    told = cloud.status()
    assert (told["state"], told["attempt"], told["first_failing_rank"]) == ("FAILED", 2, 3)
    assert told["reason"] == "rank 3 was killed by SIGABRT"
    assert any("backends/native/train.py" in line for line in told["last_lines"]), told["last_lines"]
    assert "Fatal Python error: Aborted" in cloud("logs", "chain-1").out  # of the rank that failed
    second = saved(cloud)[-1]

    last = second + 2 * SAVE_EVERY
    resumed = cloud("resume", "chain-1", f"trainer.max_steps={last}", "launcher.wait=true")
    assert resumed.code == 0, resumed.err
    assert "succeeded" in resumed.out
    told = cloud.status()
    assert (told["state"], told["step"], told["attempt"]) == ("SUCCEEDED", last, 3)
    assert saved(cloud)[-1] == last
    run_dir = cloud.paths.run_dir
    assert [next(iter(losses(run_dir, attempt))) for attempt in (1, 2, 3)] == [1, first + 1, second + 1]
    assert list(losses(run_dir, 3)) == list(range(second + 1, last + 1))
    assert scalar_steps(run_dir)["train_loss"] == list(range(1, last + 1))
    results = json.loads(cloud.paths.results.read_text())
    assert (results["steps"], results["batch"]["world_size"], results["stop_reason"]) == (last, 4, "max_steps")
    assert f"{last}/{last}" in cloud("results", "chain-1").out
    assert f"step {last}/{last}" in cloud("logs", "chain-1").out
    assert not (cloud.folder / "site" / "refused").exists()
