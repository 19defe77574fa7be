"""The launcher section: where a run goes, and what it asks for there."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from trainwright.config_types import Count, Directive, Duration, EnvName, Section

LauncherKind = Literal["local", "slurm", "vertex"]


class _Launcher(Section):
    grace_s: Annotated[float, Field(gt=0)]
    env: dict[str, str]
    env_from: tuple[EnvName, ...]


class LocalLauncher(_Launcher):
    kind: Literal["local"]
    python: str | None  # None: the interpreter of the command
    max_parallel: Count


class SlurmLauncher(_Launcher):
    kind: Literal["slurm"]
    python: str
    # Directives; for all of them None leaves the choice to the cluster.
    partition: Directive | None
    cpu_partition: Directive | None  # None: `partition`
    account: Directive | None
    qos: Directive | None
    time: Duration
    gres: Directive | None
    constraint: Directive | None
    exclusive: bool
    cpus_per_task: Count | None
    mem: Directive | None
    nodelist: Directive | None
    exclude: Directive | None
    reservation: Directive | None
    mail_type: Directive | None
    mail_user: Directive | None
    comment: Directive | None
    signal_s: Count
    max_requeues: Annotated[int, Field(ge=0)]
    extra: tuple[Directive, ...]
    setup: tuple[str, ...]
    srun_args: tuple[str, ...]
    container_image: Directive | None  # None: the backend's image, or the bare host
    container_mounts: tuple[Directive, ...]
    max_parallel: Count | None  # None: all runs of a sweep at once
    wait: bool

    def disagreements(self) -> Iterator[str]:
        if not self.grace_s < self.signal_s < self.time:
            yield (
                f"launcher.signal_s: {self.signal_s} s before the end of launcher.time={self.time} s, with "
                f"launcher.grace_s={self.grace_s:g} s to save; use grace_s < signal_s < time"
            )
        bare = [line for line in self.extra if not line.startswith("--")]
        if bare:
            yield f"launcher.extra: {bare[0]!r} is no directive; write --NAME or --NAME=VALUE"


class VertexLauncher(_Launcher):
    kind: Literal["vertex"]
    python: str
    project: str
    location: str
    locations: tuple[str, ...]
    bucket_mount: str
    bucket_url: str
    image: str | None  # None: the backend's
    machine: str | None  # None: hardware of no cloud, which preflight refuses
    boot_disk_type: str | None  # None: the machine's default
    boot_disk_size_gb: Count
    service_account: str | None  # None: the project's default
    network: str | None  # None: none of the user's
    labels: dict[str, str]
    strategy: Literal["STANDARD", "SPOT", "FLEX_START"]
    max_wait_s: Annotated[int, Field(ge=0)] | None  # None: Vertex AI's default, 24 hours; 0: for ever
    time: Duration
    restart_on_worker_restart: bool
    disable_retries: bool
    persistent_resource: str | None  # None: machines of the job's own
    reservation: str | None  # None: no reservation
    tensorboard: str | None  # None: not streamed
    enable_web_access: bool
    encryption_key: str | None  # None: Google's keys
    stages: Literal["container", "jobs"]
    scratch_dir: str | None  # None: files that grow are written to the run directory itself
    api_endpoint: str | None  # None: Google's, of each location
    wait: bool
    debug: bool

    @property
    def all_locations(self) -> tuple[str, ...]:
        """The regions in which a job may run, in the order in which they are tried."""
        return tuple(dict.fromkeys((self.location, *self.locations)))


Launcher = Annotated[LocalLauncher | SlurmLauncher | VertexLauncher, Field(discriminator="kind")]
