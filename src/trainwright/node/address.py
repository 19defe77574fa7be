"""Find an address and a port under which a node can be reached."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import time
from typing import Any, Callable

from .cluster_env import LOOPBACK
from .pools import ClusterEnvError

ASK_EVERY_S = 1.0


def reachable(host: str, wait_s: float = 0.0, look_up: Callable[[str, None], Any] = socket.getaddrinfo) -> str:
    """Return `host` if it resolves, else the address that Slurm knows it by.

    In a cloud, a machine that is still being made has no name yet: `wait_s` is for how long to ask again.
    Raises ClusterEnvError when nothing helps.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            look_up(host, None)
        except OSError:
            if time.monotonic() >= deadline:
                return _from_slurm(host)
            time.sleep(ASK_EVERY_S)  # a name server tells nobody when it learns a name
        else:
            return host


def free_port() -> int:
    """Return a port of this machine that is free at this moment, for nodes that meet over loopback."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def _from_slurm(host: str) -> str:
    remedy = f"{host} is no host name here; set TRAINWRIGHT_MASTER_ADDR in launcher.env"
    if shutil.which("scontrol") is None:  # not inside most containers
        raise ClusterEnvError(f"{remedy} (scontrol is not here to ask for its address)")
    asked = subprocess.run(
        ["scontrol", "show", "node", "--oneliner", host], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    found = re.search(r"\bNodeAddr=(\S+)", asked.stdout.decode("utf-8", errors="replace"))
    if found is None:
        said = asked.stderr.decode("utf-8", errors="replace").strip()
        raise ClusterEnvError(f"{remedy} (scontrol knows no address of it: {said})")
    return found.group(1)
