from __future__ import annotations

import itertools
from typing import Any

import pytest

from trainwright.node.cluster_env import ClusterEnv, ClusterEnvError, expand_hostlist, resolve, slurm_port

SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_JOB_NODELIST": "n[2-3]",
}
TORCHRUN_LIKE = {"NODE_RANK": "1", "NNODES": "2", "MASTER_ADDR": "head", "MASTER_PORT": "6002"}
OURS = {
    "TRAINWRIGHT_NODE_RANK": "0",
    "TRAINWRIGHT_NUM_NODES": "2",
    "TRAINWRIGHT_MASTER_ADDR": "ours",
    "TRAINWRIGHT_MASTER_PORT": "7000",
}
ARGUMENTS = {"node_rank": 1, "told_num_nodes": 2, "master_addr": "127.0.0.1", "master_port": 5000}
BATCH_OF_FOUR = {"SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "SLURM_NNODES": "4", "SLURM_JOB_NODELIST": "n[1-4]"}


@pytest.mark.parametrize(
    ("environ", "num_nodes", "arguments", "expected"),
    [
        ({}, 1, {}, ClusterEnv(0, 1, "127.0.0.1", None)),
        ({}, 2, ARGUMENTS, ClusterEnv(1, 2, "127.0.0.1", 5000)),
        (TORCHRUN_LIKE, 2, {}, ClusterEnv(1, 2, "head", 6002)),
        (SLURM, 2, {}, ClusterEnv(1, 2, "n2", slurm_port(7, 0))),
        # who wins
        ({**SLURM, **TORCHRUN_LIKE}, 2, {}, ClusterEnv(1, 2, "head", 6002)),
        ({**SLURM, **TORCHRUN_LIKE, **OURS}, 2, {}, ClusterEnv(0, 2, "ours", 7000)),
        ({**SLURM, **TORCHRUN_LIKE, **OURS}, 2, ARGUMENTS, ClusterEnv(1, 2, "127.0.0.1", 5000)),
        ({**SLURM, "MASTER_ADDR": "10.0.0.1"}, 2, {}, ClusterEnv(1, 2, "10.0.0.1", slurm_port(7, 0))),
        # started by launcher=local inside an allocation, which says something else
        (BATCH_OF_FOUR, 2, ARGUMENTS, ClusterEnv(1, 2, "127.0.0.1", 5000)),
        (BATCH_OF_FOUR, 1, {"node_rank": 0}, ClusterEnv(0, 1, "127.0.0.1", None)),
        # a step on part of an allocation counts its own nodes
        (
            {**SLURM, "SLURM_NNODES": "4", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_STEP_NODELIST": "n[3-4]"},
            2,
            {},
            ClusterEnv(1, 2, "n3", slurm_port(7, 0)),
        ),
        # a stray address or an empty variable means nothing to a single node
        ({"MASTER_ADDR": "old", "MASTER_PORT": "29500", "NODE_RANK": ""}, 1, {}, ClusterEnv(0, 1, "127.0.0.1", None)),
    ],
)
def test_a_node_finds_its_place(
    environ: dict[str, str], num_nodes: int, arguments: dict[str, Any], expected: ClusterEnv
) -> None:
    assert resolve(environ, num_nodes, **arguments) == expected


@pytest.mark.parametrize(
    ("environ", "num_nodes", "arguments", "message"),
    [
        ({}, 2, {}, "num_nodes=2, but nothing tells which node this is"),
        ({"NODE_RANK": "2", "NNODES": "2"}, 2, {}, "NODE_RANK=2 does not fit num_nodes=2; use 0 to 1"),
        ({"NODE_RANK": "one"}, 2, {}, "NODE_RANK=one is no integer"),
        ({"NODE_RANK": "1"}, 2, {}, "nothing tells where the nodes meet"),
        ({"NODE_RANK": "1", "MASTER_ADDR": "head"}, 2, {}, "nothing tells the port"),
        ({**TORCHRUN_LIKE, "MASTER_PORT": "70000"}, 2, {}, "MASTER_PORT=70000 is no port"),
        ({**TORCHRUN_LIKE, "NNODES": "4"}, 2, {}, "made for num_nodes=2, but here NNODES=4"),
        (BATCH_OF_FOUR, 1, {}, "made for num_nodes=1, but here SLURM_NNODES=4"),
        ({**SLURM, "NODE_RANK": "0"}, 2, {}, "NODE_RANK=0, SLURM_NODEID=1 contradict each other"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "16"}, 2, {}, "SLURM_STEP_NUM_TASKS=16, SLURM_STEP_NUM_NODES=2"),
        ({}, 2, {**ARGUMENTS, "told_num_nodes": 3}, "made for num_nodes=2, but here --num-nodes=3"),
    ],
)
def test_an_environment_that_does_not_fit_is_named_with_its_values(
    environ: dict[str, str], num_nodes: int, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ClusterEnvError, match=message):
        resolve(environ, num_nodes, **arguments)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("n1", ["n1"]),
        ("a[01-03,7],b1", ["a01", "a02", "a03", "a7", "b1"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
        ("queue-dy-trn1-[1-2]", ["queue-dy-trn1-1", "queue-dy-trn1-2"]),
    ],
)
def test_a_node_list_expands_as_scontrol_does(text: str, hosts: list[str]) -> None:
    assert expand_hostlist(text) == hosts


def test_neighbouring_jobs_and_steps_have_ports_of_their_own() -> None:
    ports = [slurm_port(job, step) for job, step in itertools.product(range(100, 1600), range(8))]
    assert len(set(ports)) == len(ports)
    assert min(ports) >= 20000
    assert max(ports) < 32768
