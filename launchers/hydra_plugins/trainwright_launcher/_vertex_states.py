"""What Vertex AI's states mean, and its messages in words, with what helps."""

import re
from typing import Any

from trainwright.node import events
from trainwright.scheduler import JobState

# State: ours; what it waits for or why it ended where the name does not tell; what helps.
# Source: google.cloud.aiplatform.v1, job_state.proto.
_STATES: dict[str, tuple[str, str | None, str | None]] = {
    "JOB_STATE_QUEUED": (
        events.QUEUED,
        "it waits for quota or for machines",
        "the console's IAM & Admin, Quotas shows limits; launcher.location or launcher.strategy=SPOT may be quicker",
    ),
    "JOB_STATE_PENDING": (events.QUEUED, "its machines are made ready and pull the image", None),
    "JOB_STATE_RUNNING": (events.RUNNING, None, None),
    "JOB_STATE_UPDATING": (events.RUNNING, None, None),
    "JOB_STATE_CANCELLING": (events.RUNNING, "it is being cancelled", None),
    "JOB_STATE_PAUSED": (events.QUEUED, "it is paused", "resume or cancel it in the console"),
    "JOB_STATE_SUCCEEDED": (events.SUCCEEDED, None, None),
    "JOB_STATE_FAILED": (events.FAILED, None, None),
    "JOB_STATE_CANCELLED": (events.CANCELLED, None, None),
    "JOB_STATE_EXPIRED": (events.TIMEOUT, "it has expired", "raise launcher.time or launcher.max_wait_s"),
    "JOB_STATE_PARTIALLY_SUCCEEDED": (events.FAILED, "it succeeded in part only", None),
}
_REPLICA = re.compile(r"[Rr]eplica (?:workerpool(\d+)-(\d+) )?exited with a non-zero status(?: of (\d+))?")
_DEADLINE_EXCEEDED = 4  # google.rpc.Code
_SIGTERM_CODE = 128 + 15  # how a replica ends that is cancelled; Vertex AI does not tell
# What the message of a failed job means beyond FAILED, and what helps.
_CAUSES: tuple[tuple[str, str, str | None], ...] = (
    (r"(?i)preempt", events.PREEMPTED, "start the run again: trainwright retry"),
    (
        r"(?i)exceed\w* (its |the )?(timeout|deadline|max\w*)|time limit|timed out",
        events.TIMEOUT,
        "raise launcher.time",
    ),
    (
        r"(?i)insufficient|stockout|resources are not available|quota",
        events.FAILED,
        "no machines: start it again with another launcher.location, fewer hardware.num_nodes or "
        "launcher.strategy=FLEX_START",
    ),
    (
        r"(?i)image.*(not found|pull|denied|permission)|pull.*image",
        events.FAILED,
        "make it with `trainwright image build`, correct launcher.image, or let the job's account read it "
        "(roles/artifactregistry.reader)",
    ),
)


def job_state(job: Any) -> JobState:
    """Return what a google.cloud.aiplatform_v1.CustomJob says, in our states."""
    ours, meaning, remedy = _STATES.get(job.state.name, (events.UNKNOWN, None, None))
    has_started = job.start_time is not None
    if ours not in events.ENDED:
        return JobState(state=ours, reason=_words(job.state.name, meaning, remedy), exit_code=None)
    if ours == events.SUCCEEDED:
        return JobState(state=ours, reason=None, exit_code=0)
    if ours == events.CANCELLED:
        code = _SIGTERM_CODE if has_started else None
        return JobState(state=ours, reason=job.error.message or "it was cancelled", exit_code=code)
    message = job.error.message or meaning or job.state.name
    replica = _REPLICA.search(message)
    if replica is not None:
        code = int(replica.group(3) or 1)
        return JobState(state=ours, reason=f"{_node(replica)} ended with exit code {code}; {_log(job)}", exit_code=code)
    if job.error.code == _DEADLINE_EXCEEDED:
        ours, remedy = events.TIMEOUT, "raise launcher.time"
    for pattern, state, helps in _CAUSES:
        if ours == events.FAILED and re.search(pattern, message):
            ours, remedy = state, helps
            break
    reason = f"{message}; {remedy}" if remedy else f"{message}; {_log(job)}"
    return JobState(state=ours, reason=reason, exit_code=1 if has_started else None)


def _words(name: str, meaning: str | None, remedy: str | None) -> str | None:
    if meaning is None:
        return None
    return f"{name.removeprefix('JOB_STATE_')}: {meaning}" + (f"; {remedy}" if remedy else "")


def _node(replica: re.Match[str]) -> str:
    """Say which node a replica is: pool 0 is the chief, pool 1 holds the others."""
    pool, index = replica.group(1), replica.group(2)
    if pool is None:
        return "a replica"
    return f"node {int(index) + int(pool != '0')} (workerpool{pool}-{index})"


def _log(job: Any) -> str:
    _, project, _, location, _, number = job.name.split("/")
    return f"its output: gcloud ai custom-jobs stream-logs {number} --region={location} --project={project}"
