"""The calls of Vertex AI's services that we need, by Google's own client, which is imported by the first of them.

All that goes wrong comes out as a VertexError, in words.
"""

import concurrent.futures
import contextlib
import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from hydra_plugins.trainwright_launcher import _vertex_spec
from hydra_plugins.trainwright_launcher._vertex_errors import (
    OverError,
    TemporaryError,
    VertexError,
    no_credentials,
    translate,
)

from trainwright import report
from trainwright.errors import UserError

Answer = TypeVar("Answer")

INSTALL = "pip install 'trainwright[vertex]'"
_TIMEOUT_S = 60.0  # of one call; the client has none of its own
_OPERATION_S = 300.0  # of what Vertex AI does after its answer; a TensorBoard takes some seconds
_RETRY_AFTER_S = (1.0, 2.0, 4.0, 8.0, 15.0)  # pauses between tries where the server does not say how long
_LONGEST_PAUSE_S = 60.0


def is_installed() -> bool:
    """Return whether the client is there, without importing it."""
    try:
        return importlib.util.find_spec("google.cloud.aiplatform_v1") is not None
    except ModuleNotFoundError:  # not even the namespace
        return False


def refuse_invalid(spec: Mapping[str, Any]) -> None:
    """Let Google's own parser read a CustomJobSpec, where it is installed. Raises UserError naming our key."""
    if not is_installed():
        return
    from google.cloud.aiplatform_v1 import CustomJobSpec
    from google.protobuf import json_format  # type: ignore[import-untyped]

    try:
        json_format.ParseDict(spec, CustomJobSpec.pb(CustomJobSpec()))
    except json_format.ParseError as error:
        said = str(error).rpartition("Failed to parse ")[2].replace("\n", " ")
        raise UserError(f"{_vertex_spec.key_of(said)}: Vertex AI's client does not take it: {said}") from error


def patiently(ask: Callable[[], Answer]) -> Answer:
    """Return what `ask` returns, asking again with growing pauses while the answer is that it may work later."""
    for pause_s in _RETRY_AFTER_S:
        try:
            return ask()
        except TemporaryError as error:
            wait_s = min(pause_s if error.pause_s is None else error.pause_s, _LONGEST_PAUSE_S)
            report.warn(f"{error.what}; trying again in {wait_s:g} s")
            time.sleep(wait_s)
    return ask()


class ServiceClient:
    """One of Vertex AI's services, such as JobService, for one project in all its regions."""

    def __init__(self, service: str, project: str, api_endpoint: str | None) -> None:
        self._service, self._project, self._endpoint = service, project, api_endpoint
        self._clients: dict[str, Any] = {}

    def call(self, location: str, method: str, *, pages: bool = False, **request: Any) -> Any:
        """Return what a method answers; with `pages` the items of all pages. Raises VertexError."""
        client = self._client(location)
        from google.api_core.exceptions import GoogleAPICallError
        from google.auth.exceptions import GoogleAuthError

        try:
            answer = getattr(client, method)(**request, timeout=_TIMEOUT_S, retry=None)
            return list(answer) if pages else answer
        except GoogleAPICallError as error:
            raise translate(error, project=self._project, location=location) from error
        except GoogleAuthError as error:
            raise no_credentials(error) from error

    def finish(self, location: str, operation: Any) -> Any:
        """Return what a long operation, which a method has answered, ends in. Raises VertexError."""
        from google.api_core.exceptions import GoogleAPICallError

        try:
            return operation.result(timeout=_OPERATION_S)
        except GoogleAPICallError as error:
            raise translate(error, project=self._project, location=location) from error
        except concurrent.futures.TimeoutError as error:
            raise TemporaryError(
                f"Vertex AI in {location} has not finished in {_OPERATION_S:g} s", "look later"
            ) from error

    def parent(self, location: str) -> str:
        """Return the name of all that is in a region."""
        return f"projects/{self._project}/locations/{location}"

    def _client(self, location: str) -> Any:
        if location not in self._clients:
            self._clients[location] = self._connect(location)
        return self._clients[location]

    def _connect(self, location: str) -> Any:
        if not is_installed():
            raise VertexError("google-cloud-aiplatform is not installed here", INSTALL)
        import grpc
        from google.auth.exceptions import GoogleAuthError
        from google.cloud import aiplatform_v1

        connect = getattr(aiplatform_v1, f"{self._service}Client")
        if self._endpoint is not None and self._endpoint.startswith("http://"):
            channel = grpc.insecure_channel(self._endpoint.removeprefix("http://").rstrip("/"))
            return connect(transport=connect.get_transport_class("grpc")(channel=channel))
        endpoint = self._endpoint or f"{location}-aiplatform.googleapis.com"
        try:
            return connect(client_options={"api_endpoint": endpoint})
        except GoogleAuthError as error:
            raise no_credentials(error) from error


class VertexClient(ServiceClient):
    """One project's jobs. A job's name is its full one: projects/P/locations/L/customJobs/N."""

    def __init__(self, project: str, api_endpoint: str | None) -> None:
        super().__init__("JobService", project, api_endpoint)

    def create(self, location: str, job: Mapping[str, Any]) -> str:
        """Create a job and return its name. `job` is a CustomJob as a tree."""
        from google.cloud.aiplatform_v1 import CustomJob
        from google.protobuf import json_format

        message = CustomJob()
        json_format.ParseDict(job, CustomJob.pb(message))
        created = self.call(location, "create_custom_job", parent=self.parent(location), custom_job=message)
        return str(created.name)

    def find(self, location: str, labels: Mapping[str, str]) -> Iterator[Any]:
        """Yield the jobs in a region that carry all of these labels, the newest first."""
        wanted = " AND ".join(f'labels.{key}="{value}"' for key, value in labels.items())
        request = {"parent": self.parent(location), "filter": wanted}
        found = self.call(location, "list_custom_jobs", request=request, pages=True)
        yield from sorted(found, key=lambda job: job.create_time, reverse=True)

    def refuse_unreachable(self, location: str) -> None:
        """Ask for one job, whichever. Raises VertexError where that is not allowed or not possible."""
        self.call(location, "list_custom_jobs", request={"parent": self.parent(location), "page_size": 1})

    def get(self, name: str) -> Any:
        """Return a job; None where it is not remembered."""
        try:
            return self.call(_location(name), "get_custom_job", name=name)
        except OverError:
            return None

    def cancel(self, name: str) -> None:
        """End a job; one that is over or forgotten is left alone."""
        with contextlib.suppress(OverError):
            self.call(_location(name), "cancel_custom_job", name=name)


def _location(name: str) -> str:
    return name.split("/")[3]
