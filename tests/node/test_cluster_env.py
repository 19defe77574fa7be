from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from trainwright.node.address import reachable
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


CHIEF, WORKER_1 = "cmle-training-workerpool0-5f-0:2222", "cmle-training-workerpool1-5f-1:2222"
JOB = json.dumps({"python_module": "", "package_uris": [], "job_args": []})  # text within text


def spec(cluster: dict[str, list[str]] | None, task: tuple[str, Any] | None) -> str:
    """Return TF_CONFIG or CLUSTER_SPEC as Vertex AI writes it."""
    tree: dict[str, Any] = {"environment": "cloud", "job": JOB}
    if cluster is not None:
        tree["cluster"] = cluster
    if task is not None:
        tree["task"] = {"type": task[0], "index": task[1], "trial": ""}
    return json.dumps(tree)


ROLES = {"chief": [CHIEF], "worker": ["w0:2222", WORKER_1]}
POOLS = {"workerpool0": [CHIEF], "workerpool1": ["w0:2222", WORKER_1]}
NO_PORTS = {"chief": ["c"], "worker": ["w"]}
SERVERS = {**ROLES, "ps": ["p0:2222", "p1:2222"]}
REDUCERS = {**POOLS, "workerpool2": ["r0:2222"], "workerpool10": ["e0:2222"]}
# What Vertex AI sets besides, all of it about nodes.
OF_NODE_2 = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "cmle-training-workerpool0-5f-0", "MASTER_PORT": "2222"}
NODE_2 = ClusterEnv(2, 3, "cmle-training-workerpool0-5f-0", 2222)


@pytest.mark.parametrize(
    ("environ", "num_nodes", "expected"),
    [
        ({"TF_CONFIG": spec(ROLES, ("worker", 1))}, 3, NODE_2),
        ({"CLUSTER_SPEC": spec(POOLS, ("workerpool1", 1))}, 3, NODE_2),
        ({"TF_CONFIG": spec(POOLS, ("workerpool1", 1))}, 3, NODE_2),
        ({"TF_CONFIG": spec(ROLES, ("worker", "1"))}, 3, NODE_2),
        (
            {
                "TF_CONFIG": spec(ROLES, ("worker", 1)),
                "CLUSTER_SPEC": spec(POOLS, ("workerpool1", 1)),
                "CLOUD_ML_JOB_ID": "1234",
                **OF_NODE_2,
            },
            3,
            NODE_2,
        ),
        ({"TF_CONFIG": spec(ROLES, ("chief", 0))}, 3, ClusterEnv(0, 3, NODE_2.master_addr, 2222)),
        ({"CLUSTER_SPEC": spec(POOLS, ("workerpool0", 0))}, 3, ClusterEnv(0, 3, NODE_2.master_addr, 2222)),
        ({"TF_CONFIG": spec({"master": ["m:1"], "worker": ["w:2"]}, ("worker", 0))}, 2, ClusterEnv(1, 2, "m", 1)),
        # who does not train is not counted
        ({"TF_CONFIG": spec(SERVERS, ("worker", 1))}, 3, NODE_2),
        ({"CLUSTER_SPEC": spec(REDUCERS, ("workerpool1", 1))}, 3, NODE_2),
        # pools behind the second that do train: the job has nodes for them
        ({"CLUSTER_SPEC": spec(REDUCERS, ("workerpool2", 0))}, 4, ClusterEnv(3, 4, NODE_2.master_addr, 2222)),
        ({"CLUSTER_SPEC": spec(REDUCERS, ("workerpool10", 0))}, 5, ClusterEnv(4, 5, NODE_2.master_addr, 2222)),
        # one replica, in all the ways in which it is told so
        ({"TF_CONFIG": spec({"chief": [CHIEF]}, ("chief", 0))}, 1, ClusterEnv(0, 1, "127.0.0.1", None)),
        ({"CLUSTER_SPEC": spec({"workerpool0": [CHIEF]}, ("workerpool0", 0))}, 1, ClusterEnv(0, 1, "127.0.0.1", None)),
        ({"TF_CONFIG": spec({"chief": [CHIEF], "worker": []}, None)}, 1, ClusterEnv(0, 1, "127.0.0.1", None)),
        ({"TF_CONFIG": spec({}, ("chief", 0))}, 1, ClusterEnv(0, 1, "127.0.0.1", None)),
        ({"TF_CONFIG": spec(None, None), "CLUSTER_SPEC": "{}"}, 1, ClusterEnv(0, 1, "127.0.0.1", None)),
        ({"TF_CONFIG": "", "CLOUD_ML_JOB_ID": "1234"}, 1, ClusterEnv(0, 1, "127.0.0.1", None)),
        # several, and no list at all: what counts processes elsewhere counts nodes here
        ({"CLOUD_ML_JOB_ID": "1234", **OF_NODE_2}, 3, NODE_2),
        # ranks of processes, left over from another launcher, count for nothing beside a list
        ({"TF_CONFIG": spec(ROLES, ("worker", 1)), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, 3, NODE_2),
        # the list's first node, which is the same on all nodes, comes before what each node is told
        ({"TF_CONFIG": spec(ROLES, ("worker", 1)), "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}, 3, NODE_2),
        ({"TF_CONFIG": spec(NO_PORTS, ("worker", 0)), "MASTER_PORT": "7"}, 2, ClusterEnv(1, 2, "c", 7)),
        # our own variables win
        ({"TF_CONFIG": "no JSON", **OURS}, 2, ClusterEnv(0, 2, "ours", 7000)),
    ],
)  # fmt: skip
def test_a_node_of_vertex_ai_finds_its_place(environ: dict[str, str], num_nodes: int, expected: ClusterEnv) -> None:
    assert resolve(environ, num_nodes) == expected


@pytest.mark.parametrize(
    ("environ", "num_nodes", "message"),
    [
        ({"TF_CONFIG": "{"}, 1, r"TF_CONFIG=\{ is no JSON: "),
        ({"CLUSTER_SPEC": "[1]"}, 1, r"CLUSTER_SPEC=\[1\] is no JSON object"),
        ({"TF_CONFIG": spec({"chief": [CHIEF]}, ("chief", "first"))}, 1, "TF_CONFIG=.* is not as Vertex AI writes it"),
        ({"TF_CONFIG": '{"cluster": ["a"]}'}, 1, "TF_CONFIG=.* is not as Vertex AI writes it"),
        ({"TF_CONFIG": spec(ROLES, ("worker", 1))}, 4, "made for num_nodes=4, but here TF_CONFIG nodes=3"),
        ({"TF_CONFIG": spec(ROLES, ("worker", 1))}, 1, "made for num_nodes=1, but here TF_CONFIG nodes=3"),
        ({"CLUSTER_SPEC": spec({"workerpool0": [CHIEF]}, ("workerpool0", 0))}, 2, "but here CLUSTER_SPEC nodes=1"),
        ({"CLOUD_ML_JOB_ID": "1", **OF_NODE_2}, 2, "made for num_nodes=2, but here WORLD_SIZE=3"),
        ({"TF_CONFIG": spec(ROLES, ("worker", 5))}, 3, r"task worker\[5\] is none of the nodes .*chief: 1, worker: 2"),
        ({"TF_CONFIG": spec(ROLES, ("evaluator", 0))}, 3, r"TF_CONFIG: task evaluator\[0\] is none of the nodes"),
        ({"CLUSTER_SPEC": spec(REDUCERS, ("workerpool2", 0))}, 3, r"task workerpool2\[0\] is none of the nodes"),
        (
            {"TF_CONFIG": spec(ROLES, ("worker", 1)), "CLUSTER_SPEC": spec(POOLS, ("workerpool1", 0))},
            3,
            r"TF_CONFIG task worker\[1\]=2, CLUSTER_SPEC task workerpool1\[0\]=1 contradict each other",
        ),
        (
            {"TF_CONFIG": spec(ROLES, ("worker", 1)), "NODE_RANK": "0"},
            3,
            r"NODE_RANK=0, TF_CONFIG task worker\[1\]=2 contradict each other",
        ),
        ({"TF_CONFIG": spec(ROLES, None)}, 3, "num_nodes=3, but nothing tells which node this is"),
        ({"RANK": "1", "WORLD_SIZE": "3"}, 3, "nothing tells which node this is"),  # of processes: not on Vertex AI
    ],
)  # fmt: skip
def test_what_vertex_ai_says_and_does_not_fit_is_named_with_its_values(
    environ: dict[str, str], num_nodes: int, message: str
) -> None:
    with pytest.raises(ClusterEnvError, match=message):
        resolve(environ, num_nodes)


def test_a_first_machine_that_is_still_being_made_is_waited_for() -> None:
    answers = [OSError("unknown"), OSError("unknown"), []]

    def look_up(host: str, port: None) -> object:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    assert reachable("cmle-training-workerpool0-5f-0", 600.0, look_up) == "cmle-training-workerpool0-5f-0"
    assert answers == []


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
