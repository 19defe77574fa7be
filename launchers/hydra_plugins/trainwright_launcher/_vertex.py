"""Jobs on Vertex AI custom training: one recorded spec per run and stage, submitted once whatever happens."""

import dataclasses
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import yaml
from hydra_plugins.trainwright_launcher import _vertex_spec
from hydra_plugins.trainwright_launcher._following import FORGOTTEN, follow
from hydra_plugins.trainwright_launcher._vertex_client import (
    INSTALL,
    VertexClient,
    is_installed,
    patiently,
    refuse_invalid,
)
from hydra_plugins.trainwright_launcher._vertex_errors import NoCapacityError, TemporaryError, VertexError
from hydra_plugins.trainwright_launcher._vertex_states import job_state
from hydra_plugins.trainwright_launcher._vertex_tensorboard import VertexTensorBoards

from trainwright import report
from trainwright.config import RunConfig
from trainwright.config_launcher import VertexLauncher
from trainwright.exp_manager import fixed_run_id
from trainwright.job import JobSpec
from trainwright.node import events
from trainwright.scheduler import Ended, JobState, NotSubmittedError


class VertexScheduler:
    """The user's jobs on Vertex AI. They outlive the command, unless `launcher.wait` makes it follow them."""

    def __init__(self, config: RunConfig) -> None:
        assert isinstance(config.launcher, VertexLauncher)
        self._config, self._launcher = config, config.launcher
        self.is_attached = config.launcher.wait
        self._client = VertexClient(config.launcher.project, config.launcher.api_endpoint)
        self._submitted: dict[str, JobSpec] = {}
        self._complaint: str | None = None  # why Vertex AI did not answer when it was asked last; None: it always has

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield what is wrong with client, credentials, project or regions, and whether the run is still there.

        A dry run asks nobody.
        """
        if not is_installed():
            yield "launcher=vertex: google-cloud-aiplatform is not installed here", INSTALL
            return
        launcher = self._launcher
        if self._config.dry_run or "<site." in launcher.project + "".join(launcher.all_locations):
            return
        for location in launcher.all_locations:
            try:
                yield from patiently(lambda where=location: self._problems_in(where))  # type: ignore[misc]
            except VertexError as error:
                yield f"launcher=vertex: {error.what}", error.remedy

    def arrange(self, job: JobSpec) -> JobSpec:
        """Return `job` with its spec for Vertex AI. Raises UserError where Google's own parser refuses that."""
        text = _vertex_spec.render(job, self._config)
        refuse_invalid(yaml.safe_load(text))
        files = {**job.files, _spec_name(job): text}
        return dataclasses.replace(job, files=files, scratch=self._launcher.scratch_dir)

    def by_hand(self, job: JobSpec, own: Path) -> str:
        """Return the commands of gcloud that bring the record, in `own`, to the bucket and submit the file in it."""
        copy = _vertex_spec.gcloud_copy(job, self._launcher, own)
        return f"{copy} && {_vertex_spec.gcloud(job, self._launcher, own / _spec_name(job))}"

    def submit(self, job: JobSpec, *, after: tuple[str, ...]) -> str:
        """Create the job. Vertex AI knows no dependencies: this waits until the jobs of `after` have succeeded."""
        self._await_success(after)
        refusals = []
        for location in self._launcher.all_locations:
            try:
                job_id = self._find_or_create(job, location)
            except NoCapacityError as error:
                refusals.append(error)
                report.warn(error.what)
                continue
            self._submitted[job_id] = job
            return job_id
        whats = dict.fromkeys(error.what for error in refusals)
        raise NotSubmittedError("\n".join([*whats, refusals[-1].remedy]))

    def look_up(self, job_ids: Collection[str]) -> Mapping[str, JobState]:
        """Return what Vertex AI remembers; UNKNOWN with the reason for all of which it does not answer."""
        known: dict[str, JobState] = {}
        refusal: VertexError | None = None
        for job_id in job_ids if is_installed() else ():
            if refusal is None:  # else each of many jobs would wait for its own time-out
                try:
                    job = self._client.get(job_id)
                except VertexError as error:
                    refusal = error
                else:
                    known.update({job_id: job_state(job)} if job is not None else {})
            if refusal is not None:
                known[job_id] = JobState(state=events.UNKNOWN, reason=str(refusal), exit_code=None)
        return known

    def cancel(self, job_ids: Collection[str]) -> None:
        """End these jobs; their workers are given SIGTERM and some seconds. Raises VertexError."""
        for job_id in job_ids:
            patiently(lambda name=job_id: self._client.cancel(name))  # type: ignore[misc]

    def wait(
        self,
        on_start: Callable[[str], None],
        on_end: Callable[[Ended], None],
        on_wait: Callable[[str, str], None],
    ) -> None:
        """Follow all submitted jobs to their end. Ctrl-C (KeyboardInterrupt) ends the following, not the jobs."""

        def end(job_id: str, known: JobState) -> None:
            reason = f"Vertex AI says {known.reason or known.state}"
            on_end(Ended(job_id=job_id, exit_code=known.exit_code, state=known.state, reason=reason))

        follow(self._config, self._submitted, self._look_up_or_forget, on_start, end, on_wait)

    def tensorboards(self) -> VertexTensorBoards:
        """Return the run's instance of Vertex AI TensorBoard, for `trainwright tensorboard`."""
        return VertexTensorBoards(self._launcher)

    def _problems_in(self, location: str) -> list[tuple[str, str]]:
        run_id = fixed_run_id(self._config)
        if run_id is None:
            self._client.refuse_unreachable(location)
            return []
        of_run = {_vertex_spec.OWN_LABELS[0]: _vertex_spec.label(run_id)}
        found = [(job.name, job.state.name, job_state(job)) for job in self._client.find(location, of_run)]
        return [
            (f"run_id={run_id} is still in Vertex AI: {name} is {state}", "wait for its end, or trainwright cancel it")
            for name, state, known in found
            if known.state not in events.ENDED
        ]

    def _find_or_create(self, job: JobSpec, location: str) -> str:
        try:
            return patiently(lambda: self._find(job) or self._create(job, location))
        except TemporaryError:
            found = self._find(job)  # the last answer may be lost, too
            if found is None:
                raise
            return found

    def _find(self, job: JobSpec) -> str | None:
        """Return the job that an earlier try has made: an answer may be lost when the job is not."""
        labels = _vertex_spec.own_labels(job)
        for location in self._launcher.all_locations:
            for found in self._client.find(location, labels):
                return str(found.name)
        return None

    def _create(self, job: JobSpec, location: str) -> str:
        unset = [name for name in job.env_from if name not in os.environ]
        if unset:
            raise NotSubmittedError(f"launcher.env_from: {', '.join(unset)} is not set here; export it or leave it out")
        recorded = yaml.safe_load(job.files[_spec_name(job)])
        revealed = _vertex_spec.with_secrets(recorded, job.env_from, os.environ)
        try:
            return self._client.create(location, _vertex_spec.custom_job(job, revealed, self._launcher))
        except VertexError as error:  # it may quote what it does not like, and will be written down
            for name in job.env_from:
                error.mask(os.environ[name], f"<{name}>")
            raise

    def _await_success(self, job_ids: tuple[str, ...]) -> None:
        before = {job_id: self._submitted[job_id] for job_id in job_ids if job_id in self._submitted}
        failed: list[str] = []

        def end(job_id: str, known: JobState) -> None:
            if known.state != events.SUCCEEDED:
                failed.append(f"{job_id} {known.state}: {known.reason}")

        follow(self._config, before, self._look_up_or_forget, lambda job_id: None, end, report.waits)
        if failed:
            raise NotSubmittedError(f"the stage before it did not succeed: {'; '.join(failed)}")

    def _look_up_or_forget(self, job_ids: Collection[str]) -> Mapping[str, JobState]:
        known = self.look_up(job_ids)
        unanswered = {job_id: state.reason for job_id, state in known.items() if state.state == events.UNKNOWN}
        for reason in dict.fromkeys(unanswered.values()):
            if reason != self._complaint:
                report.warn(f"{reason}; the jobs go on, asking again")
            self._complaint = reason
        return {job_id: known.get(job_id, FORGOTTEN) for job_id in job_ids if job_id not in unanswered}


def _spec_name(job: JobSpec) -> str:
    return f"jobs/a{job.attempt}-{job.stage}.yaml"
