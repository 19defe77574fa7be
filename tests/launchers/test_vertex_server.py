"""The server that stands for Vertex AI: containers as processes, with the environment that they would have."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hydra_plugins.trainwright_launcher._vertex_client import VertexClient

from tests.fakes import Containers, VertexServer

LOCATION = "us-central1"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[VertexServer]:
    how = Containers(
        logs=tmp_path / "logs", environment={"OF_THE_IMAGE": "yes"}, paths={"/gcs": str(tmp_path)}, grace_s=0.2
    )
    with VertexServer(containers=how) as running:
        yield running


@pytest.fixture
def create(server: VertexServer) -> Callable[..., str]:
    """Return a function that starts `sh -c SCRIPT` on as many replicas as it is told and returns the job's name."""

    def create(script: str, *, replicas: Sequence[int] = (1,), env: Mapping[str, str] | None = None) -> str:
        container: dict[str, Any] = {"imageUri": "i", "command": ["sh", "-c"], "args": [script, "/gcs/b"]}
        container["env"] = [{"name": name, "value": value} for name, value in (env or {}).items()]
        pools = [
            {"machineSpec": {"machineType": "n1-standard-4"}, "replicaCount": count, "containerSpec": container}
            for count in replicas
        ]
        output = {"outputUriPrefix": "gs://b/out"}
        spec = {"workerPoolSpecs": pools, "baseOutputDirectory": output}
        return VertexClient("p", server.endpoint).create(LOCATION, {"displayName": "d", "jobSpec": spec})

    return create


def output(tmp_path: Path) -> dict[str, str]:
    return {path.stem.partition("-")[2]: path.read_text() for path in (tmp_path / "logs").iterdir()}


def test_a_job_whose_chief_ends_well_has_succeeded(
    server: VertexServer, create: Callable[..., str], tmp_path: Path
) -> None:
    name = create("echo $OF_THE_IMAGE $0")
    assert server.wait_for_end(name) == "SUCCEEDED"
    assert server.jobs[name].start_time is not None
    assert output(tmp_path) == {"workerpool0-0": f"yes {tmp_path}/b\n"}


def test_the_first_replica_that_fails_ends_the_job_and_is_named(
    server: VertexServer, create: Callable[..., str]
) -> None:
    name = create("case $RANK in 1) exit 7;; *) exec sleep 100;; esac", replicas=(1, 2))
    assert server.wait_for_end(name) == "FAILED"
    assert server.jobs[name].error.message.startswith("The replica workerpool1-0 exited with a non-zero status of 7.")


def test_a_job_that_is_cancelled_is_asked_and_then_killed(
    server: VertexServer, create: Callable[..., str], tmp_path: Path
) -> None:
    stubborn = "trap 'echo asked' TERM; while :; do sleep 0.05; done"
    name = create(stubborn, replicas=(1, 1))
    VertexClient("p", server.endpoint).cancel(name)
    assert server.wait_for_end(name) == "CANCELLED"


def test_each_replica_is_told_of_the_cluster_as_vertex_ai_does(
    server: VertexServer, create: Callable[..., str], tmp_path: Path
) -> None:
    name = create("env -0 | tr '\\0\\n' '\\n ' | grep '='", replicas=(1, 2))
    assert server.wait_for_end(name) == "SUCCEEDED"
    told = dict(line.partition("=")[::2] for line in output(tmp_path)["workerpool0-0"].splitlines())
    tf_config, cluster_spec = json.loads(told["TF_CONFIG"]), json.loads(told["CLUSTER_SPEC"])
    assert {role: len(hosts) for role, hosts in tf_config["cluster"].items()} == {"chief": 1, "worker": 2}
    assert tf_config["task"] == {"type": "chief", "index": 0}
    assert cluster_spec["cluster"]["workerpool0"] == tf_config["cluster"]["chief"]
    assert cluster_spec["cluster"]["workerpool1"] == tf_config["cluster"]["worker"]
    assert cluster_spec["task"] == {"type": "workerpool0", "index": 0, "trial": ""}
    assert tf_config["environment"] == "cloud"
    assert f"{told['MASTER_ADDR']}:{told['MASTER_PORT']}" == tf_config["cluster"]["chief"][0]
    assert (told["RANK"], told["WORLD_SIZE"]) == ("0", "3")
    assert told["CLOUD_ML_JOB_ID"] == name.rpartition("/")[2]
    assert told["AIP_TENSORBOARD_LOG_DIR"] == "gs://b/out/logs/"


def test_one_replica_alone_is_told_of_no_master(
    server: VertexServer, create: Callable[..., str], tmp_path: Path
) -> None:
    name = create("echo ${MASTER_ADDR-none} ${RANK-none} ${TF_CONFIG-none}")
    assert server.wait_for_end(name) == "SUCCEEDED"
    words = output(tmp_path)["workerpool0-0"].split(" ", 2)
    assert words[:2] == ["none", "none"]
    assert list(json.loads(words[2])["cluster"]) == ["chief"]


def test_variables_in_values_are_expanded_unless_they_are_escaped(
    server: VertexServer, create: Callable[..., str], tmp_path: Path
) -> None:
    env = {"A": "1", "B": "$(A)2", "C": "$$(A)", "D": "$(NONE) $A"}
    name = create('echo "$B|$C|$D"', env=env)
    assert server.wait_for_end(name) == "SUCCEEDED"
    assert output(tmp_path)["workerpool0-0"] == "12|$(A)|$(NONE) $A\n"
