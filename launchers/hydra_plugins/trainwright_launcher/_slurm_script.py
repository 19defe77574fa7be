"""Render the batch script of one stage: values in, text out."""

import functools
import shlex
from collections.abc import Iterator
from pathlib import Path

import jinja2

from trainwright.config import RunConfig
from trainwright.config_launcher import SlurmLauncher
from trainwright.job import JobSpec
from trainwright.node.run_paths import RunPaths

_HOST_PYTHON = "python3"  # outside of a container; the worker needs the standard library of Python 3.8 only


def render(job: JobSpec, config: RunConfig) -> str:
    """Return the script that sbatch is given for `job`."""
    launcher = config.launcher
    assert isinstance(launcher, SlurmLauncher)
    image = launcher.container_image or job.image
    worker = ["worker.pyz", job.run_dir, "--stage", job.stage, "--attempt", str(job.attempt)]
    worker[0] = str(RunPaths(job.run_dir).worker)
    return _template().render(
        job=job,
        directives=list(_directives(job, config, launcher)),
        setup=launcher.setup,
        srun=list(_srun_words(job, config, launcher, image)),
        worker=shlex.join([job.python, *worker]),
        announce=shlex.join([_HOST_PYTHON if image else job.python, *worker, "--announce-requeue"]),
    )


def comment(run_id: str, stage: str, attempt: int) -> str:
    """Return the words by which a job is found again in the queue."""
    return f"trainwright:{run_id}:{stage}:{attempt}"


def slurm_time(seconds: int) -> str:
    """Return a time limit as D-HH:MM:SS."""
    minutes, s = divmod(seconds, 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    return f"{days}-{h:02}:{m:02}:{s:02}"


def _directives(job: JobSpec, config: RunConfig, launcher: SlurmLauncher) -> Iterator[str]:
    log = str(RunPaths(job.run_dir).job_log(job.stage, job.attempt)).replace("%", "%%")
    own = comment(job.run_id, job.stage, job.attempt)
    gpus = f"gpu:{job.devices}" if config.hardware.accelerator == "gpu" and job.devices else None
    is_elsewhere = _runs_elsewhere(job, launcher)
    valued = {
        "job-name": job.lane or f"{job.run_id}-{job.stage}",
        "comment": f"{own} {launcher.comment}" if launcher.comment else own,
        "partition": launcher.cpu_partition if is_elsewhere else launcher.partition,
        "account": launcher.account,
        "qos": launcher.qos,
        "time": None if job.time_limit_s is None else slurm_time(job.time_limit_s),
        "signal": f"USR1@{launcher.signal_s}",
        "nodes": str(job.num_nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": None if launcher.cpus_per_task is None or is_elsewhere else str(launcher.cpus_per_task),
        "mem": None if is_elsewhere else launcher.mem,
        "gres": None if job.devices == 0 else launcher.gres or gpus,
        "constraint": None if is_elsewhere else launcher.constraint,
        "nodelist": None if is_elsewhere else launcher.nodelist,
        "exclude": launcher.exclude,
        "reservation": None if is_elsewhere else launcher.reservation,
        "mail-type": launcher.mail_type,
        "mail-user": launcher.mail_user,
        "output": log,
        "open-mode": "append",
        "kill-on-invalid-dep": "yes",
    }
    yield from (f"--{name}={shlex.quote(value)}" for name, value in valued.items() if value is not None)
    if launcher.exclusive:
        yield "--exclusive"
    yield "--requeue" if job.max_requeues else "--no-requeue"
    yield from launcher.extra


def _runs_elsewhere(job: JobSpec, launcher: SlurmLauncher) -> bool:
    """Return whether a stage without accelerator has nodes of its own, of which we know no sizes and features."""
    return job.devices == 0 and launcher.cpu_partition is not None


def _srun_words(job: JobSpec, config: RunConfig, launcher: SlurmLauncher, image: str | None) -> Iterator[str]:
    # Each worker stops its ranks politely when another node fails; srun must neither hurry nor interfere.
    yield "--kill-on-bad-exit=0 --wait=0 --ntasks-per-node=1 --cpu-bind=none"
    # Since Slurm 22.05 srun does not take it from sbatch.
    if launcher.cpus_per_task is not None and not _runs_elsewhere(job, launcher):
        yield f"--cpus-per-task={launcher.cpus_per_task}"
    if image is not None:
        exp_dir = config.exp_manager.exp_dir
        mounts = ",".join((f"{exp_dir}:{exp_dir}", *launcher.container_mounts))
        yield f"--container-image={shlex.quote(image)}"
        yield f"--container-mounts={shlex.quote(mounts)}"
        if launcher.env_from:  # else variables of the image would hide ours
            yield f"--container-env={','.join(launcher.env_from)}"
    yield from map(shlex.quote, launcher.srun_args)


@functools.cache
def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(Path(__file__).parent / "templates")
    environment = jinja2.Environment(
        loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    return environment.get_template("sbatch.sh.j2")
