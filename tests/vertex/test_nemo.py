"""The first article's run on Vertex AI without a cloud: four nodes of two ranks, one killed and then resumed.

A small script plays NeMo's: it trains on the data, logs and saves as NeMo does. All else is what runs in earnest.
"""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.conftest import Result
from tests.fakes import Containers, VertexServer
from tests.nemo_checkpoints import distributed, name_of
from tests.slurm.cluster import wait_for
from tests.vertex.cloud import START_S, Cloud, write_data

RUN_ID, MANY_STEPS, SAVE_EVERY, BATCH = "article-1", 2000, 5, 16
TINY = (
    "model=gpt_small",
    "hardware=t4",
    f"backend.script={Path(__file__).with_name('nemo_script.py')}",
    "model.hidden_size=32",
    "model.ffn_hidden_size=64",
    "data.seq_length=16",
    "model.max_position_embeddings=16",
    "data.micro_batch_size=1",
    f"data.global_batch_size={BATCH}",
    "data.splits_string='90,10,0'",
    f"trainer.max_steps={MANY_STEPS}",
    f"trainer.val_check_interval={SAVE_EVERY}",
    "trainer.limit_val_batches=1",
    "optim.sched.warmup_steps=2",
    "backend.optim.constant_steps=0",
    "optim.lr=1e-3",
    "+launcher.env.GLOO_SOCKET_IFNAME=lo",
)


@pytest.fixture
def cloud(train: Callable[..., Result], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Cloud]:
    with VertexServer(containers=Containers(logs=tmp_path / "containers")) as server:
        cloud = Cloud(tmp_path, server, train, capfd, "megatron_gpt", RUN_ID)
        write_data(cloud.bucket / "training-data" / "text")
        yield cloud


def test_the_articles_run_is_killed_and_goes_on(cloud: Cloud) -> None:
    prefix = cloud.bucket / "training-data" / "text"
    submitted = cloud.submit(
        *TINY,
        f"data.data_prefix=[1.0,{prefix}]",
        f"data.index_mapping_dir={cloud.bucket}/index_mapping",
        f"backend.data_cache_dir={cloud.folder}/ssd",
    )
    assert submitted.code == 0, submitted.err
    assert "bf16-on-t4" in submitted.err
    (job,) = cloud.server.jobs.values()
    pools = job.job_spec.worker_pool_specs
    assert [(pool.replica_count, pool.machine_spec.machine_type) for pool in pools] == [
        (1, "n1-highmem-4"),
        (3, "n1-highmem-4"),
    ]
    assert {pool.machine_spec.accelerator_count for pool in pools} == {2}

    paths = cloud.paths
    wait_for(lambda: any(paths.checkpoints.glob("*-last/metadata.json")), "it saves", START_S)
    os.kill(cloud.trainer(rank=5), signal.SIGKILL)
    assert cloud.end_of_job() == "FAILED"
    told = cloud.status()
    assert (told["state"], told["first_failing_rank"]) == ("FAILED", 5)
    assert told["reason"] == "rank 5 was killed by SIGKILL"
    assert "[NeMo I] rank 5 of 8 begins after step 0" in told["last_lines"]
    assert told["step"] >= SAVE_EVERY
    logs = node_logs(cloud, attempt=1)
    assert sum("data: copying" in log for log in logs) == 1  # these four nodes share the disk of this machine
    assert sum("is there already" in log for log in logs) == 3

    saved = max((file.parent for file in paths.checkpoints.glob("*/metadata.json")), key=age)
    step, _ = age(saved)
    cut_short = distributed(paths.checkpoints, name_of(step + 1, suffix="-last"), is_whole=False)
    last = step + 2 * SAVE_EVERY
    resumed = cloud("resume", RUN_ID, f"trainer.max_steps={last}")
    assert resumed.code == 0, resumed.err
    assert cloud.end_of_job() == "SUCCEEDED"
    assert not cut_short.exists()
    logs = node_logs(cloud, attempt=2)
    assert f"janitor: removed {cut_short.name}" in logs[0]
    assert all(f"train: resume: from {saved.name}, step {step}" in log for log in logs)
    assert all("is there already" in log for log in logs)
    (config,) = paths.nemo(2).glob("config-a*.yaml")
    told_nemo = yaml.safe_load(config.read_text())["exp_manager"]
    assert told_nemo["resume_from_checkpoint"] == str(saved)
    assert not told_nemo["resume_if_exists"]
    assert f"rank 0 of 8 begins after step {step}" in cloud("logs", RUN_ID).out

    told = cloud.status()
    assert (told["state"], told["step"], told["max_steps"], told["attempt"]) == ("SUCCEEDED", last, last, 2)
    steps = [json.loads(line) for line in paths.metrics(2).read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(step + 1, last + 1))
    assert [step["step"] for step in steps if step["val_loss"] is not None] == [last - SAVE_EVERY, last]
    results = json.loads(paths.results.read_text())
    assert (results["steps"], results["consumed_samples"], results["stop_reason"]) == (last, last * BATCH, "max_steps")
    assert results["batch"]["world_size"] == 8
    assert results["train_loss"] == steps[-1]["train_loss"] < 10.8  # the logarithm of the vocabulary's size
    assert results["checkpoints"][-1]["step"] == last
    assert f"{last}/{last}" in cloud("results", RUN_ID).out
    (row,) = json.loads(cloud("ps", "--json").out)["runs"]
    assert (row["run_id"], row["state"], row["val_loss"]) == (RUN_ID, "SUCCEEDED", results["val_loss"])


def age(checkpoint: Path) -> tuple[int, bool]:
    """Sort older before newer: by step, and of one step the `-last` is written last."""
    return int(checkpoint.name.partition("-step=")[2].partition("-")[0]), checkpoint.name.endswith("-last")


def node_logs(cloud: Cloud, attempt: int) -> list[str]:
    return [cloud.paths.node_log("train", attempt, node).read_text() for node in range(4)]
