"""What a Neuron node lacks that train_setup.sh of NxDT sets up as root. We have no root: what is missing is said.

Source: neuronx-distributed-training, examples/train_setup.sh.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MAX_DIRTY_MB = 64  # what train_setup.sh gives Lustre's clients; less slows the writing of checkpoints down
_LCTL_TIMEOUT_S = 10


@dataclass(frozen=True)
class NodeFinding:
    """One thing that a node lacks."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"finding: {self.what}; {self.remedy}"

    def to_json(self) -> dict[str, Any]:
        """Return it as a tree of JSON."""
        return asdict(self)


def raise_open_files(wanted: int) -> list[NodeFinding]:
    """Let this process and its children open `wanted` files, or as many as the hard limit allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == wanted:
        return []
    return [
        NodeFinding(
            f"a process may open {allowed} files here, NxDT wants {wanted}",
            f"as root: `LimitNOFILE={wanted}` for slurmd, and PropagateResourceLimitsExcept=NOFILE in slurm.conf",
        )
    ]


def check(
    *, num_nodes: int, master_port: int | None, reserved_port: int | None, root: Path = Path("/")
) -> list[NodeFinding]:
    """Return what this node lacks. `root` is where its file system is looked at. No port: one that is free just now."""
    return [*_ports(root, master_port, reserved_port), *_lustre(), *_efa(root, num_nodes)]


def _ports(root: Path, master_port: int | None, reserved_port: int | None) -> list[NodeFinding]:
    """A port that the kernel gives to anybody who asks for any may be taken when the ranks want to meet there."""
    folder = root / "proc/sys/net/ipv4"
    try:
        first, last = (int(word) for word in (folder / "ip_local_port_range").read_text().split())
        reserved = _port_ranges((folder / "ip_local_reserved_ports").read_text())
    except (OSError, ValueError):
        return []  # in a container that hides them, nobody can set them either
    wanted = {port for port in (master_port, reserved_port) if port is not None}
    return [
        NodeFinding(
            f"port {port}, where the ranks meet, may be given to any other program",
            f"as root: `sysctl -w net.ipv4.ip_local_reserved_ports={port}`",
        )
        for port in sorted(wanted)
        if first <= port <= last and not any(low <= port <= high for low, high in reserved)
    ]


def _port_ranges(text: str) -> list[tuple[int, int]]:
    parts = [part.partition("-") for part in text.strip().split(",") if part]
    return [(int(low), int(high or low)) for low, _, high in parts]


def _lustre() -> list[NodeFinding]:
    if shutil.which("lctl") is None:
        return []
    try:
        asked = subprocess.run(
            ["lctl", "get_param", "-n", "osc.*.max_dirty_mb"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_LCTL_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    values = [word for word in asked.stdout.decode("utf-8", errors="replace").split() if word.isdigit()]
    low = min((int(word) for word in values), default=MAX_DIRTY_MB)
    if low >= MAX_DIRTY_MB:
        return []
    return [
        NodeFinding(
            f"Lustre's max_dirty_mb is {low}, NxDT sets {MAX_DIRTY_MB}: checkpoints are written slowly",
            f"as root: `lctl set_param osc.*.max_dirty_mb={MAX_DIRTY_MB}`",
        )
    ]


def _efa(root: Path, num_nodes: int) -> list[NodeFinding]:
    devices = root / "sys/class/infiniband"
    names = [path.name for path in devices.iterdir()] if devices.is_dir() else []
    if num_nodes == 1 or any(name.startswith(("efa", "rdmap")) for name in names):
        return []
    return [
        NodeFinding(
            f"no EFA device, though {num_nodes} nodes train together: collectives fall back to TCP or fail",
            "turn Efa.Enabled on for the queue (ParallelCluster), with a placement group; trn1.2xlarge has none",
        )
    ]
