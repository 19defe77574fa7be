"""Which node of the job this is and where the nodes meet, from arguments and environment alone."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Mapping, Tuple

from . import pools
from .pools import ClusterEnvError as ClusterEnvError

LOOPBACK = "127.0.0.1"

# Slurm ports: below Linux's ephemeral ports (32768 and up), above the services. Eight steps of a job get a port each.
_FIRST_PORT, _NUM_PORTS, _STEPS_PER_JOB = 20000, 12000, 8

# Where each fact is looked for, the most telling name first. A step's view counts, not that of its whole allocation.
_NUM_NODES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
_NODE_LIST = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")


@dataclass(frozen=True)
class ClusterEnv:
    """One node's place in the job."""

    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int | None  # None: a single node, which may take any free port


def resolve(
    environ: Mapping[str, str],
    num_nodes: int,
    *,
    node_rank: int | None = None,
    told_num_nodes: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> ClusterEnv:
    """Return the place of this node in a job of `num_nodes`.

    The keyword arguments are the worker's command line and win. TRAINWRIGHT_* variables come next, then NODE_RANK,
    NNODES and MASTER_*, then Vertex AI's TF_CONFIG and CLUSTER_SPEC (see `pools`), then Slurm's. Where the nodes meet,
    Vertex's list of all nodes comes before MASTER_*, which Vertex sets on each of them.
    RANK and WORLD_SIZE are those of processes, but for Vertex, where they count nodes: used only where nothing better
    is there. Raises ClusterEnvError naming the variables and values that do not fit.
    """
    rank_said = _deliberate(environ, "--node-rank", node_rank, "TRAINWRIGHT_NODE_RANK")
    count_said = _deliberate(environ, "--num-nodes", told_num_nodes, "TRAINWRIGHT_NUM_NODES")
    if rank_said:
        ranks, counts = [rank_said], [count_said] if count_said else []
    else:  # nobody named the node on purpose: what lies around must agree
        _check_one_task_per_node(environ)
        vertex_ranks, vertex_counts = _of_vertex(environ, num_nodes)
        ranks = [*_found(environ, ("NODE_RANK",)), *vertex_ranks, *_found(environ, ("SLURM_NODEID",))]
        counts = [*_found(environ, ("NNODES",)), *vertex_counts, *_found(environ, _NUM_NODES)[:1]]
        counts = [count_said] if count_said else counts
    _check_counts(counts, num_nodes)
    rank = _agreed_rank(ranks, num_nodes)
    address = master_addr or environ.get("TRAINWRIGHT_MASTER_ADDR")
    port = _deliberate(environ, "--master-port", master_port, "TRAINWRIGHT_MASTER_PORT")
    if num_nodes > 1:  # a single node meets nobody: a stray MASTER_PORT would only make two jobs clash
        address = address or _master_addr(environ, num_nodes)
        port = port or _master_port(environ, num_nodes)
    if port and not 0 < port[1] < 65536:
        raise ClusterEnvError(f"{_say([port])} is no port; use 1 to 65535")
    return ClusterEnv(rank, num_nodes, address or LOOPBACK, port[1] if port else None)


def expand_hostlist(text: str) -> list[str]:
    """Return the hosts of a Slurm node list: `a[01-03,7],b1` is a01, a02, a03, a7, b1."""
    parts = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text)
    return [host for part in parts for host in _expand(part)]


def slurm_port(job_id: int, step_id: int) -> int:
    """Return a rendezvous port that neighbouring jobs, and steps of one job, do not share."""
    return _FIRST_PORT + (job_id * _STEPS_PER_JOB + step_id % _STEPS_PER_JOB) % _NUM_PORTS


_Fact = Tuple[str, int]  # a number and the name it was found under: (name, value)


def _deliberate(environ: Mapping[str, str], option: str, value: int | None, variable: str) -> _Fact | None:
    """A number given on purpose: by the option, else by our own variable."""
    if value is not None:
        return option, value
    return next(iter(_found(environ, (variable,))), None)


def _found(environ: Mapping[str, str], variables: tuple[str, ...]) -> list[_Fact]:
    return [(name, _integer(name, environ[name])) for name in variables if environ.get(name)]


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ClusterEnvError(f"{name}={text} is no integer") from None


def _say(facts: list[_Fact]) -> str:
    return ", ".join(f"{name}={value}" for name, value in facts)


def _check_counts(counts: list[_Fact], num_nodes: int) -> None:
    wrong = [fact for fact in counts if fact[1] != num_nodes]
    if wrong:
        raise ClusterEnvError(
            f"the job was made for num_nodes={num_nodes}, but here {_say(wrong)}; "
            f"start it on {num_nodes} node(s), or change hardware.num_nodes"
        )


def _agreed_rank(ranks: list[_Fact], num_nodes: int) -> int:
    if not ranks:
        if num_nodes == 1:
            return 0
        raise ClusterEnvError(
            f"num_nodes={num_nodes}, but nothing tells which node this is; "
            "give --node-rank, set NODE_RANK, or start one task per node with srun"
        )
    if len({value for _, value in ranks}) > 1:
        raise ClusterEnvError(f"{_say(ranks)} contradict each other; unset the wrong one or give --node-rank")
    name, value = ranks[0]
    if not 0 <= value < num_nodes:
        raise ClusterEnvError(f"{name}={value} does not fit num_nodes={num_nodes}; use 0 to {num_nodes - 1}")
    return value


def _check_one_task_per_node(environ: Mapping[str, str]) -> None:
    """Two workers on one node would both be that node."""
    tasks = _found(environ, ("SLURM_STEP_NUM_TASKS",))
    nodes = _found(environ, ("SLURM_STEP_NUM_NODES",))
    if tasks and nodes and tasks[0][1] != nodes[0][1]:
        raise ClusterEnvError(f"{_say(tasks + nodes)}: start one task per node (srun --ntasks-per-node=1)")


def _of_vertex(environ: Mapping[str, str], num_nodes: int) -> tuple[list[_Fact], list[_Fact]]:
    """Return what Vertex AI says of this node's rank and of the number of nodes."""
    clusters = pools.read(environ, num_nodes)
    if not clusters and environ.get(pools.ON_VERTEX):
        return _found(environ, ("RANK",)), _found(environ, ("WORLD_SIZE",))
    ranks = [(cluster.task, cluster.node_rank) for cluster in clusters if cluster.node_rank is not None]
    return ranks, [(f"{cluster.variable} nodes", cluster.num_nodes) for cluster in clusters]


def _master_addr(environ: Mapping[str, str], num_nodes: int) -> str:
    for cluster in pools.read(environ, num_nodes):
        return cluster.master_addr
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    for name in _NODE_LIST:
        hosts = expand_hostlist(environ.get(name, ""))
        if hosts:
            return hosts[0]
    raise ClusterEnvError("nothing tells where the nodes meet; give --master-addr or set MASTER_ADDR")


def _master_port(environ: Mapping[str, str], num_nodes: int) -> _Fact:
    for cluster in pools.read(environ, num_nodes):
        if cluster.master_port is not None:
            return cluster.variable, cluster.master_port
    given = _found(environ, ("MASTER_PORT",))
    if given:
        return given[0]
    job = _found(environ, ("SLURM_JOB_ID",))
    if not job:
        raise ClusterEnvError("nothing tells the port where the nodes meet; give --master-port or set MASTER_PORT")
    step = _found(environ, ("SLURM_STEP_ID",)) or [("SLURM_STEP_ID", 0)]
    return "SLURM_JOB_ID", slurm_port(job[0][1], step[0][1])


def _expand(part: str) -> list[str]:
    """Expand the first bracket of one comma-free part, then what follows it."""
    match = re.match(r"([^\[]*)\[([^\]]*)\](.*)$", part)
    if not match:
        return [part]
    prefix, ranges, rest = match.groups()
    numbers = [number for item in ranges.split(",") for number in _range(item)]
    return [prefix + number + tail for number in numbers for tail in _expand(rest)]


def _range(item: str) -> list[str]:
    first, dash, last = item.partition("-")
    if not dash:
        return [first]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
