"""A real Slurm of four nodes on this machine: munged, slurmctld and four slurmd, with a directory and ports of its own.

Debian packages: slurm-wlm, munge.
"""

import contextlib
import os
import platform
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

NODES = ("n1", "n2", "n3", "n4")
DEADLINE_S = 60  # for conditions that must come true; a machine under load is slow, not wrong

_CONFIG = """
ClusterName=trainwright
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmctldPort={ports[0]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=10
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=short Nodes=n4 MaxTime=00:10:00 State=UP
"""


@dataclass
class Cluster:
    """The daemons, and what a test does to a cluster."""

    folder: Path
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def config(self) -> Path:
        return self.folder / "slurm.conf"

    def ask(self, *command: str) -> str:
        """Run a client command and return what it prints."""
        asked = subprocess.run(command, capture_output=True, text=True, env=self._environment())
        assert asked.returncode == 0, f"{command}: {asked.stderr}"
        return asked.stdout

    def job(self, job_id: str) -> dict[str, str]:
        """Return what scontrol knows of a job."""
        line = self.ask("scontrol", "show", "job", "--oneliner", job_id)
        return dict(word.partition("=")[::2] for word in line.split())

    def jobs(self, run_id: str) -> list[str]:
        """Return the ids of all jobs of a run that Slurm remembers, in order."""
        lines = self.ask("squeue", "--all", "--states=all", "--noheader", "--format=%i %k").splitlines()
        return sorted((line.split()[0] for line in lines if f":{run_id}:" in line), key=int)

    def lose(self, node: str) -> None:
        """Have Slurm give a node up and take it back at once."""
        self.ask("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        resume = ("scontrol", "update", f"nodename={node}", "state=resume")
        asked = subprocess.run(resume, capture_output=True, text=True, env=self._environment())
        # With ReturnToService=2 the node may have come back by itself meanwhile: then there is nothing to resume.
        assert asked.returncode == 0 or "Invalid node state" in asked.stderr, asked.stderr

    def start_controller(self) -> None:
        self._start("slurmctld", "slurmctld", "-D", "-f", str(self.config))

    def stop(self, name: str) -> None:
        daemon = self.daemons.pop(name)
        daemon.terminate()
        daemon.wait(DEADLINE_S)

    def _start(self, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self.daemons[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment()
            )

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.config)}

    def _is_running(self) -> bool:
        ended = {name: daemon.returncode for name, daemon in self.daemons.items() if daemon.poll() is not None}
        logs = [f"{name}:\n{(self.folder / f'{name}.log').read_text()}" for name in ended]
        assert not ended, f"ended with {ended}\n" + "\n".join(logs)
        return True

    def start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        munge = {name: f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "log", "pid", "seed")}
        munged = ("munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *munge.values())
        self._start("munged", *munged)
        wait_for(lambda: self._is_running() and (self.folder / "munge.socket").exists(), "munged makes its socket")
        self.start_controller()
        for node in NODES:
            self._start(node, "slurmd", "-D", "-f", str(self.config), "-N", node)
        wait_for(lambda: self._is_running() and self._idle() == len(NODES), "all four nodes are idle")

    def _idle(self) -> int:
        asked = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%T"],
            capture_output=True,
            text=True,
            env=self._environment(),
        )
        return asked.stdout.split().count("idle")

    def write_config(self) -> None:
        (self.folder / "state").mkdir()
        host = platform.node().partition(".")[0]
        ports = _free_ports(1 + len(NODES))
        nodes = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=1000 State=UNKNOWN"
            for node, port in zip(NODES, ports[1:], strict=True)
        ]
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        text = _CONFIG.format(host=host, user=user, folder=self.folder, ports=ports, nodes="\n".join(nodes))
        self.config.write_text(text)

    def close(self) -> None:
        """End all jobs, then the daemons; a job that does not end is told to by its step daemon's end."""
        if "slurmctld" in self.daemons and self.daemons["slurmctld"].poll() is None:
            with contextlib.suppress(AssertionError):
                self.ask("scancel", "--me")
                wait_for(lambda: not self.ask("squeue", "--noheader"), "no job is left")
        for name in reversed(list(self.daemons)):
            self.stop(name)


def wait_for(condition: object, what: str, deadline_s: float = DEADLINE_S) -> None:
    """Return once `condition()` is true."""
    assert callable(condition)
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.05)


def _free_ports(number: int) -> Sequence[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(number)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Start a cluster in `folder` and stop it at the end. Raises AssertionError when a service does not start."""
    started = Cluster(folder)
    started.write_config()
    try:
        started.start()
        yield started
    finally:
        started.close()
