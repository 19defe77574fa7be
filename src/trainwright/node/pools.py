"""What Vertex AI tells a node of its job: TF_CONFIG and CLUSTER_SPEC, lists of hosts by worker pool.

    TF_CONFIG     {"cluster": {"chief": ["h0:2222"], "worker": ["h1:2222", "h2:2222"]}, "task": {"type": "worker",
                  "index": 1, "trial": ""}, "environment": "cloud", "job": "{...}"}
    CLUSTER_SPEC  the same with pools called workerpool0, workerpool1, ...

A job of one replica may have neither, no worker list, or no cluster at all. An evaluator is a task, but in no list.
Sources: Vertex AI, "Distributed training" and "Environment variables for special Cloud Storage directories";
GiGL, vertex_ai_context.py; tfx issue 4587.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Mapping

ON_VERTEX = "CLOUD_ML_JOB_ID"  # Vertex sets it on every node of a job, and nobody else does

_VARIABLES = ("TF_CONFIG", "CLUSTER_SPEC")
_TOLD = re.compile("TF_CONFIG|CLUSTER_SPEC|HOSTNAME|RANK|WORLD_SIZE|MASTER_(ADDR|PORT)|(CLOUD_ML|AIP)_.*")
_NUMBER = {"chief": 0, "master": 0, "worker": 1}  # of pools that have a role for a name
_POOL = re.compile(r"workerpool(\d+)")
_ALWAYS_TRAIN = 2  # pools 0 and 1; what is behind them may be parameter servers, reducers or evaluators


class ClusterEnvError(ValueError):
    """The arguments and the environment do not say, or contradict each other about, which node this is."""


@dataclass(frozen=True)
class Cluster:
    """The nodes that train, in the order of their pools, as one variable lists them."""

    variable: str
    task: str  # how the variable calls this node
    node_rank: int | None  # None: it does not say which node this is
    num_nodes: int
    master_addr: str
    master_port: int | None  # None: the first node is listed without a port


def read(environ: Mapping[str, str], num_nodes: int) -> list[Cluster]:
    """Return what the variables list, for a job of `num_nodes`; nothing of those that list no node.

    Raises ClusterEnvError for a variable that cannot be read, and on a node that is none of those that train.
    """
    trees = {name: _tree(name, environ[name]) for name in _VARIABLES if environ.get(name)}
    clusters = [_cluster(name, tree, num_nodes) for name, tree in trees.items()]
    return [cluster for cluster in clusters if cluster is not None]


def seen(environ: Mapping[str, str]) -> list[str]:
    """Return all that Vertex AI says of a job and its nodes, as lines; no other variable, since some are secrets."""
    return [f"{name}={environ[name]}" for name in sorted(environ) if _TOLD.fullmatch(name)]


def _tree(variable: str, text: str) -> Mapping[str, Any]:
    try:
        tree = json.loads(text)
    except ValueError as error:
        raise ClusterEnvError(f"{variable}={text} is no JSON: {error}") from None
    if not isinstance(tree, dict):
        raise ClusterEnvError(f"{variable}={text} is no JSON object")
    return tree


def _cluster(variable: str, tree: Mapping[str, Any], num_nodes: int) -> Cluster | None:
    try:
        pools = _training_pools(tree.get("cluster") or {}, num_nodes)
        if not pools:
            return None
        rank, task = _place(variable, tree.get("task") or {}, pools)
        address, _, port = next(iter(pools.values()))[0].rpartition(":")
        number = int(port) if address else None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ClusterEnvError):
            raise
        raise ClusterEnvError(f"{variable}={json.dumps(tree)} is not as Vertex AI writes it: {error!r}") from None
    count = sum(map(len, pools.values()))
    return Cluster(variable, f"{variable} task {task}", rank, count, address or port, number)


def _training_pools(cluster: Mapping[str, list[str]], num_nodes: int) -> dict[str, list[str]]:
    """Return the pools that train, in order: as many as the job has nodes for, roles that do not train left out."""
    numbers = {name: _number(name) for name, hosts in cluster.items() if hosts}
    pools: dict[str, list[str]] = {}
    for number, name in sorted((number, name) for name, number in numbers.items() if number is not None):
        if number < _ALWAYS_TRAIN or sum(map(len, pools.values())) < num_nodes:
            pools[name] = cluster[name]
    return pools


def _number(pool: str) -> int | None:
    match = _POOL.fullmatch(pool)
    return int(match.group(1)) if match else _NUMBER.get(pool)


def _place(variable: str, task: Mapping[str, Any], pools: Mapping[str, list[str]]) -> tuple[int | None, str]:
    """Return this node's rank among the nodes that train, and how the variable calls it."""
    if not task:
        return None, ""
    name, index = str(task["type"]), int(task.get("index") or 0)
    called = f"{name}[{index}]"
    if not index < len(pools.get(name, ())):
        sizes = ", ".join(f"{pool}: {len(hosts)}" for pool, hosts in pools.items())
        raise ClusterEnvError(f"{variable}: task {called} is none of the nodes that train ({sizes})")
    before = list(pools)[: list(pools).index(name)]
    return sum(len(pools[pool]) for pool in before) + index, called
