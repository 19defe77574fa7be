"""Jobs on a Slurm cluster: one recorded batch script per run and stage, submitted once whatever happens."""

import dataclasses
import difflib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from hydra_plugins.trainwright_launcher import _slurm_script
from hydra_plugins.trainwright_launcher._following import FORGOTTEN, follow
from hydra_plugins.trainwright_launcher._slurm_reasons import in_words

from trainwright import report
from trainwright.config import RunConfig
from trainwright.config_launcher import SlurmLauncher
from trainwright.exp_manager import fixed_run_id
from trainwright.job import JobSpec
from trainwright.node import events
from trainwright.node.run_paths import RunPaths
from trainwright.scheduler import Ended, JobState, NotSubmittedError

# Slurm's states, as events name them. Source: man squeue, JOB STATE CODES (Slurm 22.05).
_STATES = {
    "PENDING": events.QUEUED,
    "CONFIGURING": events.QUEUED,
    "REQUEUED": events.REQUEUED,
    "REQUEUE_FED": events.REQUEUED,
    "REQUEUE_HOLD": events.REQUEUED,
    "SPECIAL_EXIT": events.REQUEUED,
    "RESV_DEL_HOLD": events.QUEUED,
    "RUNNING": events.RUNNING,
    "COMPLETING": events.RUNNING,
    "RESIZING": events.RUNNING,
    "SIGNALING": events.RUNNING,
    "STAGE_OUT": events.RUNNING,
    "STOPPED": events.RUNNING,
    "SUSPENDED": events.RUNNING,
    "COMPLETED": events.SUCCEEDED,
    "FAILED": events.FAILED,
    "BOOT_FAIL": events.FAILED,
    "NODE_FAIL": events.FAILED,
    "OUT_OF_MEMORY": events.FAILED,
    "REVOKED": events.FAILED,
    "TIMEOUT": events.TIMEOUT,
    "DEADLINE": events.TIMEOUT,
    "PREEMPTED": events.PREEMPTED,
    "CANCELLED": events.CANCELLED,
}
# What the controller says when the same request may work later. Source: slurm_errno.c, Slurm 22.05.
_TEMPORARY = re.compile(
    "Unable to contact slurm controller|Socket timed out|Zero Bytes were transmitted|temporarily unable to accept job"
    "|Transport endpoint|Connection (refused|reset|timed out)|Resource temporarily unavailable"
    "|Slurm backup controller in standby mode|try again"
)
_RETRY_AFTER_S = (1, 2, 4, 8, 15)  # pauses between tries; each try itself waits up to MessageTimeout


class SlurmScheduler:
    """The user's jobs in Slurm. They outlive the command, unless `launcher.wait` makes it follow them."""

    def __init__(self, config: RunConfig) -> None:
        assert isinstance(config.launcher, SlurmLauncher)
        self._config, self._launcher = config, config.launcher
        self.is_attached = config.launcher.wait
        self._submitted: dict[str, JobSpec] = {}

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield what is wrong with Slurm itself, the partition, or a run that is still in the queue."""
        if shutil.which("sbatch") is None:
            yield (
                "launcher=slurm: sbatch is not on this machine",
                "go to its login node or use launcher=local",
            )
            return
        try:
            partitions = _ask("sinfo", "--noheader", "--all", "--format=%P").split()
            yield from self._partition_problems(partitions)
            yield from self._queue_problems()
        except NotSubmittedError as error:
            yield f"launcher=slurm: {error}", "try sinfo; if that fails too, ask those who run the cluster"

    def arrange(self, job: JobSpec) -> JobSpec:
        """Return `job` with its batch script and with the restarts that Slurm may make."""
        job = dataclasses.replace(job, max_requeues=self._launcher.max_requeues)
        paths = RunPaths(job.run_dir)
        name = paths.job_script(job.attempt, job.stage).relative_to(paths.own).as_posix()
        return dataclasses.replace(job, files={**job.files, name: _slurm_script.render(job, self._config)})

    def by_hand(self, job: JobSpec, own: Path) -> str | None:
        return None  # sbatch takes the script, but the jobs that it waits for are known only once they are submitted

    def submit(self, job: JobSpec, *, after: tuple[str, ...]) -> str:
        for pause_s in _RETRY_AFTER_S:
            try:
                return self._submit_once(job, after)
            except _TemporaryError as error:
                report.warn(f"{error}; trying again in {pause_s} s")
                time.sleep(pause_s)
        return self._submit_once(job, after)

    def look_up(self, job_ids: Collection[str]) -> Mapping[str, JobState]:
        """Return what Slurm remembers: ended jobs for MinJobAge (5 minutes by default), nothing while it is down."""
        if not job_ids or shutil.which("squeue") is None:
            return {}
        try:
            return _known(job_ids)
        except _TemporaryError:
            return {}

    def cancel(self, job_ids: Collection[str]) -> None:
        """End these jobs; those that have ended already, or that Slurm has forgotten, are left alone."""
        _ask("scancel", "--quiet", *job_ids)

    def wait(
        self,
        on_start: Callable[[str], None],
        on_end: Callable[[Ended], None],
        on_wait: Callable[[str, str], None],
    ) -> None:
        """Follow all submitted jobs to their end. Ctrl-C (KeyboardInterrupt) ends the following, not the jobs."""

        def end(job_id: str, known: JobState) -> None:
            on_end(self._ended(job_id, known))

        follow(self._config, self._submitted, self._look_up_or_forget, on_start, end, on_wait)

    def _partition_problems(self, partitions: Collection[str]) -> Iterator[tuple[str, str]]:
        names = [name.rstrip("*") for name in partitions]
        if self._launcher.partition is None and not any(name.endswith("*") for name in partitions):
            yield "launcher.partition=null, but the cluster has no default", f"use one of {', '.join(names)}"
        for key in ("partition", "cpu_partition"):
            for wanted in filter(None, (getattr(self._launcher, key) or "").split(",")):
                if wanted not in names and not wanted.startswith("<site."):
                    close = difflib.get_close_matches(wanted, names, n=1)
                    fits = f"did you mean {close[0]}?" if close else f"use one of {', '.join(names)}"
                    yield f"launcher.{key}={wanted} does not exist", fits

    def _queue_problems(self) -> Iterator[tuple[str, str]]:
        run_id = fixed_run_id(self._config)
        for job_id, state, words in _my_jobs() if run_id is not None else ():
            if words.startswith(f"trainwright:{run_id}:") and _STATES.get(state) not in events.ENDED:
                yield (
                    f"run_id={run_id} is still in Slurm: job {job_id} is {state}",
                    f"wait for it, or scancel {job_id}",
                )

    def _submit_once(self, job: JobSpec, after: tuple[str, ...]) -> str:
        # A try that seems to have failed may have reached the controller: look first, each time.
        job_id = self._find(job) or self._sbatch(job, after)
        self._submitted[job_id] = job
        return job_id

    def _find(self, job: JobSpec) -> str | None:
        wanted = _slurm_script.comment(job.run_id, job.stage, job.attempt)
        found = [job_id for job_id, _, words in _my_jobs() if words.split(" ")[0] == wanted]
        return found[-1] if found else None

    def _sbatch(self, job: JobSpec, after: tuple[str, ...]) -> str:
        conditions = ["singleton"] if job.lane else []
        conditions += [f"afterok:{':'.join(after)}"] if after else []
        dependency = [f"--dependency={','.join(conditions)}"] if conditions else []
        script = RunPaths(job.run_dir).job_script(job.attempt, job.stage)
        said = _ask("sbatch", "--parsable", *dependency, str(script))
        return said.strip().partition(";")[0]  # ID;CLUSTER in a federation

    def _look_up_or_forget(self, job_ids: Collection[str]) -> Mapping[str, JobState]:
        try:
            known = _known(job_ids)
        except _TemporaryError:
            return {}  # the controller restarts; jobs do not mind
        return {job_id: known.get(job_id, FORGOTTEN) for job_id in job_ids}

    def _ended(self, job_id: str, known: JobState) -> Ended:
        job = self._submitted[job_id]
        log: Path = RunPaths(job.run_dir).job_log(job.stage, job.attempt)
        reason = f"Slurm says {known.reason or known.state}" + (f"; see {log}" if log.exists() else "")
        return Ended(job_id=job_id, exit_code=known.exit_code, state=known.state, reason=reason)


class _TemporaryError(NotSubmittedError):
    """Slurm did not answer, or not yes; it may later."""


def _ask(*command: str) -> str:
    """Run one of Slurm's commands and return what it prints. Raises NotSubmittedError with what it complains of."""
    if shutil.which(command[0]) is None:
        raise NotSubmittedError(f"{command[0]} is not on this machine; go to the cluster's login node")
    asked = subprocess.run(command, capture_output=True, text=True, env=_environment())
    if asked.returncode == 0:
        return asked.stdout
    lines = [line.partition("error: ")[2] or line for line in asked.stderr.splitlines()]
    complaint = "; ".join(dict.fromkeys(lines)) or f"exit code {asked.returncode}"
    kind = _TemporaryError if _TEMPORARY.search(complaint) else NotSubmittedError
    raise kind(f"{command[0]}: {complaint}")


def _squeue(*options: str) -> list[list[str]]:
    """Return squeue's lines, split at the first two tabs; ended jobs too."""
    lines = _ask("squeue", "--all", "--states=all", "--noheader", *options).splitlines()
    return [line.split("\t", 2) for line in lines]


def _my_jobs() -> list[list[str]]:
    """Return id, Slurm's state and comment of each job of this user that Slurm remembers."""
    return _squeue("--me", "--format=%i\t%T\t%k")


def _known(job_ids: Collection[str]) -> dict[str, JobState]:
    try:
        lines = _squeue(f"--jobs={','.join(job_ids)}", "--format=%i\t%T\t%r")
    except NotSubmittedError as error:
        if "Invalid job id" in str(error):  # squeue says so of a single one, and leaves out one of several
            return {}
        raise
    return {job_id: _job_state(job_id, state, reason) for job_id, state, reason in lines}


def _job_state(job_id: str, state: str, reason: str) -> JobState:
    ours = _STATES.get(state, events.UNKNOWN)
    if ours not in events.ENDED:
        waits = ours in (events.QUEUED, events.REQUEUED) and reason != "None"  # None: Slurm has not looked at it yet
        return JobState(state=ours, reason=in_words(reason, job_id) if waits else None, exit_code=None)
    shown = _ask("scontrol", "show", "job", "--oneliner", job_id)
    code, number = map(int, re.findall(r" ExitCode=(\d+):(\d+)", shown)[0])
    has_started = re.search(r" NodeList=(?!\(null\))\S+", shown) is not None
    # NonZeroExitCode and the like say no more than the state does.
    words = in_words(reason, job_id) if reason != "None" else f"job {job_id} {state}"
    return JobState(state=ours, reason=words, exit_code=(code or (number and 128 + number)) if has_started else None)


def _environment() -> dict[str, str]:
    """Return this process's environment without what would override the script or confuse a job within a job."""
    dropped = re.compile(r"SBATCH_|SLURM_(?!CONF$)|HYDRA_FULL_ERROR$")
    return {name: value for name, value in os.environ.items() if not dropped.match(name)}
