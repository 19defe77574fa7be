"""What Vertex AI, or the way to it, complains of: in words, with the key to change and what would help.

Works on the attributes of google.api_core's exceptions, so that nothing of Google's is imported here.
"""

import re
from collections.abc import Iterator
from typing import Any

from trainwright.scheduler import NotSubmittedError

LOGIN = "run gcloud auth application-default login, or let GOOGLE_APPLICATION_CREDENTIALS name a key file"
# The metric that a quota for machines is counted by, as error messages and the console name it.
_MACHINES = re.compile(r"aiplatform\.googleapis\.com/custom_model_training\w*|custom_model_training\w+")
_STOCKOUT = re.compile(r"(?i)insufficient|stockout|out of stock|not enough (resources|capacity)|no capacity")
_TEMPORARY = {"UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL", "ABORTED", "UNKNOWN", "CANCELLED"}
_NO_SUCH_HOST = re.compile(r"(?i)dns resolution failed|name resolution|domain name not found")
_NO_LOGIN = re.compile(r"Getting metadata from plugin failed|invalid_grant|Reauthentication")


class VertexError(NotSubmittedError):
    """Vertex AI does not do what it was asked for."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}; {remedy}")
        self.what, self.remedy = what, remedy

    def mask(self, secret: str, shown: str) -> None:
        """Show something else where the message holds a secret."""
        if secret:
            self.what = self.what.replace(secret, shown)
            self.args = (f"{self.what}; {self.remedy}",)


class TemporaryError(VertexError):
    """Vertex AI did not answer, or not yes; it may later."""

    def __init__(self, what: str, remedy: str, pause_s: float | None = None) -> None:
        super().__init__(what, remedy)
        self.pause_s = pause_s  # None: the server did not say when


class NoCapacityError(VertexError):
    """A region has no quota or no machines for the job; another may."""


class TakenError(VertexError):
    """What shall be made is there already."""


class OverError(VertexError):
    """The job has ended already, or nobody remembers it."""


def no_credentials(error: Exception) -> VertexError:
    """Translate what google.auth raises."""
    return VertexError(f"no credentials for Google Cloud: {_first_sentence(str(error))}", LOGIN)


def translate(error: Any, *, project: str, location: str) -> VertexError:
    """Return what a google.api_core.exceptions.GoogleAPICallError means."""
    code = getattr(error.grpc_status_code, "name", str(error.code))
    said = f"Vertex AI in {location} says {code}: {error.message}"
    if code in _TEMPORARY and not _NO_LOGIN.search(error.message):
        helps = "try again later"
        if _NO_SUCH_HOST.search(error.message):  # each region has a host of its own
            helps = f"correct launcher.location={location}, or look whether this machine has a network"
        return TemporaryError(said, helps, _retry_delay_s(error))
    if code == "RESOURCE_EXHAUSTED":
        return _exhausted(error, said, project)
    if code == "PERMISSION_DENIED":
        return VertexError(said, _permission(error, project))
    if code == "NOT_FOUND":
        return OverError(
            said, f"correct launcher.project={project}, launcher.location={location} or what the message names"
        )
    if code == "ALREADY_EXISTS":
        return TakenError(said, "see what the message names")
    if code == "FAILED_PRECONDITION":
        return OverError(said, "see what the message names")
    if code == "INVALID_ARGUMENT":
        return VertexError(
            said, "change the key that makes this field; the job as it was sent is in run/jobs of the run"
        )
    if code == "UNAUTHENTICATED" or _NO_LOGIN.search(error.message):
        return VertexError(said, LOGIN)
    return VertexError(said, "see what the message names")


def quota_metric(error: Any) -> str | None:
    """Return the metric of the quota for machines that an error names; None where it is about something else."""
    for text in (error.message, *_details(error)):
        found = _MACHINES.search(text)
        if found:
            return found.group().rpartition("/")[2]
    return None


def _exhausted(error: Any, said: str, project: str) -> VertexError:
    metric = quota_metric(error)
    if metric is not None:
        return NoCapacityError(
            f"{said} (quota {metric} of project {project})",
            f"request more of {metric} (console: IAM & Admin, Quotas), name regions in launcher.locations, or lower "
            "hardware.num_nodes",
        )
    if _STOCKOUT.search(error.message):
        return NoCapacityError(
            said, "name regions in launcher.locations, use launcher.strategy=FLEX_START, or lower hardware.num_nodes"
        )
    return TemporaryError(said, "ask less often", _retry_delay_s(error))  # requests per minute


def _permission(error: Any, project: str) -> str:
    text = f"{error.message} {error.reason or ''}"
    if "SERVICE_DISABLED" in text or "has not been used" in text or "is disabled" in text:
        return f"run gcloud services enable aiplatform.googleapis.com --project={project}"
    if "actAs" in text or "service account" in text.lower():
        return "let your account act as launcher.service_account (roles/iam.serviceAccountUser), or set it to null"
    return f"ask for roles/aiplatform.user in project {project}, or correct launcher.project"


def _details(error: Any) -> Iterator[str]:
    for detail in error.details or ():
        yield str(detail)


def _retry_delay_s(error: Any) -> float | None:
    """Return when the server wants to be asked again. Source: google.rpc.RetryInfo in the error's details."""
    for detail in error.details or ():
        if hasattr(detail, "retry_delay"):
            return float(detail.retry_delay.seconds + detail.retry_delay.nanos / 1e9)
    return None


def _first_sentence(text: str) -> str:
    return text.split(". ")[0].strip()
