"""The job of the first article on Vertex AI: its pools and machines, and where each of its variables has gone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra_plugins.trainwright_launcher import _vertex_spec
from hydra_plugins.trainwright_launcher._vertex_client import refuse_invalid

from tests.backends.nemo.test_render import ARTICLE, job_of
from trainwright.config import RunConfig
from trainwright.job import JobSpec

Parsed = Callable[..., RunConfig]
GOLDEN = Path(__file__).parents[2] / "golden" / "vertex" / "article.yaml"
DEBUG = "launcher.debug=true"


@pytest.fixture(scope="module")
def job(parsed: Parsed) -> JobSpec:
    return job_of(parsed(*ARTICLE, DEBUG))


@pytest.fixture(scope="module")
def ours(job: JobSpec, parsed: Parsed) -> dict[str, Any]:
    return _vertex_spec.spec(job, parsed(*ARTICLE, DEBUG))


def test_pools_and_machines_are_the_articles(ours: dict[str, Any]) -> None:
    theirs = yaml.safe_load(GOLDEN.read_text())
    assert len(ours["workerPoolSpecs"]) == len(theirs["workerPoolSpecs"])
    for pool, article in zip(ours["workerPoolSpecs"], theirs["workerPoolSpecs"], strict=True):
        for key in ("machineSpec", "diskSpec", "replicaCount"):
            assert pool[key] == article[key]
        assert set(pool["containerSpec"]) - set(article["containerSpec"]) == {"command"}
    refuse_invalid(ours)


# The article's variables: what they say, read from our job.
WENT_TO: dict[str, Callable[[JobSpec, dict[str, Any]], object]] = {
    "JOB_IDENTIFIER": lambda job, tree: tree["exp_manager"]["version"] == job.run_id,
    "GPUS_PER_NODE": lambda job, tree: job.devices == 2,
    "CACHING": lambda job, tree: tree["model"]["data"]["data_prefix"][1].startswith("/ssd/.cache/"),
    "BUCKET_NAME": lambda job, tree: tree["exp_manager"]["exp_dir"] == "/gcs/my-bucket/nemo-experiments",
    "NEMO_CONFIG": lambda job, tree: job.command[1].endswith("/run/nemo"),
    "DEBUG": lambda job, tree: json.loads(job.files["nemo/settings.json"])["debug"],
}


def test_each_variable_of_the_article_has_its_place(job: JobSpec) -> None:
    theirs = yaml.safe_load(GOLDEN.read_text())["workerPoolSpecs"][0]["containerSpec"]["env"]
    assert {variable["name"] for variable in theirs} == set(WENT_TO)
    tree = yaml.safe_load(job.files["nemo/config.yaml"])
    assert [name for name, is_there in WENT_TO.items() if not is_there(job, tree)] == []


# What its program sets for ranks: the cluster's variables are torchrun's and the worker's.
SET_BY_THE_WORKER = {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NNODES", "NODE_RANK", "RANK", "LOCAL_RANK"}
OF_AN_H100 = {
    "NCCL_CHECK_POINTERS", "NCCL_DYNAMIC_CHUNK_SIZE", "NCCL_P2P_NET_CHUNKSIZE", "NCCL_P2P_PCI_CHUNKSIZE",
    "NCCL_P2P_NVL_CHUNKSIZE", "NCCL_CROSS_NIC", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NET_GDR_LEVEL",
    "NCCL_P2P_PXN_LEVEL", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD",
}  # fmt: skip


def test_containers_are_given_what_plain_tcp_needs(ours: dict[str, Any]) -> None:
    for pool in ours["workerPoolSpecs"]:
        env = {variable["name"]: variable["value"] for variable in pool["containerSpec"]["env"]}
        assert env == {
            "GLOO_SOCKET_IFNAME": "eth0",
            "NCCL_SOCKET_IFNAME": "eth0",
            "NCCL_DEBUG": "VERSION",
            "OMP_NUM_THREADS": "2",  # the article's 12 are an A3 machine's
            "HYDRA_FULL_ERROR": "1",
            "TRAINWRIGHT_DEBUG": "1",
        }
        assert not (SET_BY_THE_WORKER | OF_AN_H100) & set(env)
        assert pool["containerSpec"]["imageUri"].startswith(
            "us-central1-docker.pkg.dev/my-project/container-image-repo/"
        )
