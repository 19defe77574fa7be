"""Vertex AI's JobService on this machine, and TensorboardService: real messages over gRPC, as the client speaks them.

gRPC rather than the REST transport, since that is what runs in earnest: status codes, details such as RetryInfo and
page tokens reach the client in the form in which Google sends them, and the same code of ours runs but for the channel.

Without `containers` a job takes the states of `course`, one each time it is asked for. With `containers` its command
lines run as processes here, each with the environment that Vertex AI gives, and the states follow from them.
"""

import contextlib
import datetime
import itertools
import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests import vertex_tensorboard
from trainwright.node.address import free_port

SERVICE = "google.cloud.aiplatform.v1.JobService"
PROJECT_NUMBER = "1234567890"  # names of resources hold it, whatever project id was asked for
FINAL = {"SUCCEEDED", "FAILED", "CANCELLED", "EXPIRED", "PARTIALLY_SUCCEEDED"}
_LABEL = re.compile(r"[a-z0-9_-]{0,63}")
_CONDITION = re.compile(r'(?:labels\.(?P<key>[a-z0-9_]+)(?P<how>=|:)"?(?P<value>[^"]*?)"?|state="(?P<state>\w+)")')
_MESSAGE = "The replica {} exited with a non-zero status of {}. To find out more please check the logs."


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An answer that is an error, to be given once."""

    code: str  # of gRPC, such as UNAVAILABLE
    message: str = "The service is currently unavailable."
    reason: str | None = None  # of google.rpc.ErrorInfo; None: no such detail
    retry_after_s: float | None = 0.01  # of google.rpc.RetryInfo; None: no such detail
    is_taken: bool = False  # True: what was asked for is done all the same, only the answer is lost
    location: str | None = None  # None: in any region


def quota(metric: str = "custom_model_training_nvidia_t4_gpus", location: str | None = None) -> Failure:
    """Return the refusal of a job for which there is no quota."""
    return Failure(
        code="RESOURCE_EXHAUSTED",
        message=f"The following quota metrics exceed quota limits: aiplatform.googleapis.com/{metric}",
        retry_after_s=None,
        location=location,
    )


@dataclass(kw_only=True)
class Containers:
    """How the command lines of containers are run here."""

    logs: Path  # a file for each replica
    environment: Mapping[str, str] = field(default_factory=dict)  # of the image, as it were
    paths: Mapping[str, str] = field(
        default_factory=dict
    )  # what stands here for a folder of the container, such as /gcs
    grace_s: float = 30.0  # between SIGTERM and SIGKILL of a job that is cancelled


class VertexServer:
    """The calls of both services that we need, for every project and region. A context manager."""

    def __init__(
        self, *, course: Sequence[str] = ("PENDING", "RUNNING", "SUCCEEDED"), containers: Containers | None = None
    ):
        self.course, self.containers = tuple(course), containers
        self.error = ""  # message of a job whose course ends in FAILED
        self.longest_page = 100
        self.calls: list[tuple[str, str]] = []  # (method, parent or name)
        self.jobs: dict[str, Any] = {}  # CustomJob by name
        self._failures: list[tuple[str, Failure]] = []
        self._running: dict[str, _Replicas] = {}
        self._ages: dict[str, int] = {}
        self.tensorboard = vertex_tensorboard.TensorboardServer(self._note, self._abort)
        self._ids, self._lock = itertools.count(1001), threading.RLock()

    def __enter__(self) -> "VertexServer":
        import grpc
        from google.cloud import aiplatform_v1 as v1
        from google.protobuf import empty_pb2

        def handler(answer: Any, request: Any, serialize: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(
                answer, request_deserializer=request.deserialize, response_serializer=serialize
            )

        methods = {
            "CreateCustomJob": handler(self._create, v1.CreateCustomJobRequest, v1.CustomJob.serialize),
            "GetCustomJob": handler(self._get, v1.GetCustomJobRequest, v1.CustomJob.serialize),
            "ListCustomJobs": handler(self._list, v1.ListCustomJobsRequest, v1.ListCustomJobsResponse.serialize),
            "CancelCustomJob": handler(self._cancel, v1.CancelCustomJobRequest, empty_pb2.Empty.SerializeToString),
        }
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        services = {SERVICE: methods, vertex_tensorboard.SERVICE: self.tensorboard.methods(handler)}
        handlers = [grpc.method_handlers_generic_handler(name, methods) for name, methods in services.items()]
        self._server.add_generic_rpc_handlers(tuple(handlers))
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        for replicas in self._running.values():
            replicas.kill()
        self._server.stop(0).wait()

    def fail(self, method: str, *failures: Failure) -> None:
        """Answer the next calls of a method, such as CreateCustomJob, with these failures, one each."""
        self._failures += [(method, failure) for failure in failures]

    def count(self, method: str) -> int:
        """Return how often a method was called."""
        return sum(called == method for called, _ in self.calls)

    def end(self, name: str, state: str, message: str = "", code: int = 3) -> None:
        """Let a job end, or be in whatever state, at once."""
        from google.rpc import status_pb2

        with self._lock:
            self._enter(self.jobs[name], state)
            self.jobs[name].error = status_pb2.Status(code=code, message=message) if message else status_pb2.Status()

    def wait_for_end(self, name: str, deadline_s: float = 300.0) -> str:
        """Return the last state of a job in `containers`, once it is there."""
        self._running[name].thread.join(deadline_s)
        assert not self._running[name].thread.is_alive(), f"{name} does not come to an end"
        return str(self.jobs[name].state.name).removeprefix("JOB_STATE_")

    # ---- the calls

    def _create(self, request: Any, context: Any) -> Any:
        failure = self._note("CreateCustomJob", request.parent, context)
        job = request.custom_job
        problem = next(_problems(job), None)
        if problem is not None:
            self._abort(context, Failure(code="INVALID_ARGUMENT", message=problem, retry_after_s=None))
        with self._lock:
            project = request.parent.split("/")[1]
            parent = request.parent.replace(f"projects/{project}/", f"projects/{PROJECT_NUMBER}/")
            job.name = f"{parent}/customJobs/{next(self._ids)}"
            job.create_time = _now()
            self._enter(job, "QUEUED")
            self.jobs[job.name], self._ages[job.name] = job, 0
            if self.containers is not None:
                self._running[job.name] = _Replicas(self, job, self.containers)
        if failure is not None:
            self._abort(context, failure)
        return job

    def _get(self, request: Any, context: Any) -> Any:
        self._note("GetCustomJob", request.name, context)
        with self._lock:
            job = self._job(request.name, context)
            state = job.state.name.removeprefix("JOB_STATE_")
            if self.containers is None and state == "CANCELLING":
                self._enter(job, "CANCELLED")
            elif self.containers is None and state not in FINAL and self._ages[job.name] < len(self.course):
                self._enter(job, self.course[self._ages[job.name]])
                self._ages[job.name] += 1
                if job.state.name == "JOB_STATE_FAILED":
                    self.end(job.name, "FAILED", self.error)
            return job

    def _list(self, request: Any, context: Any) -> Any:
        from google.cloud import aiplatform_v1 as v1

        self._note("ListCustomJobs", request.parent, context)
        conditions = [_CONDITION.fullmatch(part) for part in request.filter.split(" AND ")] if request.filter else []
        if not all(conditions):
            self._abort(
                context, Failure(code="INVALID_ARGUMENT", message=f"filter: {request.filter}", retry_after_s=None)
            )
        location = request.parent.split("/")[3]
        with self._lock:
            rows = [job for job in self.jobs.values() if f"/locations/{location}/" in job.name]
            rows = [job for job in rows if all(_holds(job, match.groupdict()) for match in conditions if match)]
        start, size = int(request.page_token or 0), min(request.page_size or self.longest_page, self.longest_page)
        rest = str(start + size) if start + size < len(rows) else ""
        return v1.ListCustomJobsResponse(custom_jobs=rows[start : start + size], next_page_token=rest)

    def _cancel(self, request: Any, context: Any) -> Any:
        from google.protobuf import empty_pb2

        self._note("CancelCustomJob", request.name, context)
        with self._lock:
            job = self._job(request.name, context)
            if job.state.name.removeprefix("JOB_STATE_") in FINAL:
                told = f"Job is in state {job.state.name} and cannot be cancelled."
                self._abort(context, Failure(code="FAILED_PRECONDITION", message=told, retry_after_s=None))
            self._enter(job, "CANCELLING")
        if job.name in self._running:
            self._running[job.name].cancel()
        return empty_pb2.Empty()

    # ---- behind them

    def _note(self, method: str, where: str, context: Any) -> Failure | None:
        """Note a call and give the failure that was ordered for it; return one that comes after the deed."""
        with self._lock:
            self.calls.append((method, where))
            for ordered in self._failures:
                wanted, failure = ordered
                if wanted == method and (failure.location is None or f"/locations/{failure.location}" in where):
                    self._failures.remove(ordered)
                    break
            else:
                return None
        if not failure.is_taken:
            self._abort(context, failure)
        return failure

    def _abort(self, context: Any, failure: Failure) -> None:
        import grpc
        from google.protobuf import any_pb2, duration_pb2
        from google.rpc import error_details_pb2, status_pb2
        from grpc_status import rpc_status

        details: list[Any] = []
        if failure.reason is not None:
            details.append(error_details_pb2.ErrorInfo(reason=failure.reason, domain="googleapis.com"))
        if failure.retry_after_s is not None:
            delay = duration_pb2.Duration(nanos=int(failure.retry_after_s * 1e9))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        packed = []
        for detail in details:
            packed.append(any_pb2.Any())
            packed[-1].Pack(detail)
        code = grpc.StatusCode[failure.code].value[0]
        context.abort_with_status(
            rpc_status.to_status(status_pb2.Status(code=code, message=failure.message, details=packed))
        )

    def _job(self, name: str, context: Any) -> Any:
        found = [job for job in self.jobs.values() if job.name.split("/")[2:] == name.split("/")[2:]]
        if not found:
            self._abort(context, Failure(code="NOT_FOUND", message=f"The CustomJob {name} does not exist."))
        return found[0]

    def _enter(self, job: Any, state: str) -> None:
        from google.cloud import aiplatform_v1 as v1

        job.state = v1.JobState[f"JOB_STATE_{state}"]
        job.update_time = _now()
        if state == "RUNNING":
            job.start_time = job.start_time or _now()
        if state in FINAL:
            job.end_time = _now()


class _Replicas:
    """The processes of one job."""

    def __init__(self, server: VertexServer, job: Any, how: Containers) -> None:
        self._server, self._job, self._how = server, job, how
        self._is_cancelled = threading.Event()
        pools = [(number, pool) for number, pool in enumerate(job.job_spec.worker_pool_specs) if pool.replica_count]
        self._specs = [(number, index, pool) for number, pool in pools for index in range(pool.replica_count)]
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        how.logs.mkdir(parents=True, exist_ok=True)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def cancel(self) -> None:
        self._is_cancelled.set()
        self._signal(signal.SIGTERM)
        threading.Timer(self._how.grace_s, self.kill).start()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _run(self) -> None:
        name = self._job.name
        self._server.end(name, "PENDING")
        hosts = {(number, index): f"127.0.0.1:{free_port()}" for number, index, _ in self._specs}
        for number, index, pool in self._specs:
            if not self._is_cancelled.is_set():
                self._processes[f"workerpool{number}-{index}"] = self._start(number, index, pool, hosts)
        if not self._is_cancelled.is_set():
            self._server.end(name, "RUNNING")
        ended: dict[str, int] = {}
        finished = threading.Condition()

        def wait(replica: str, process: "subprocess.Popen[bytes]") -> None:
            code = process.wait()
            with finished:
                ended[replica] = code if code >= 0 else 128 - code
                finished.notify()

        waiting = {
            replica: threading.Thread(target=wait, args=(replica, process), daemon=True)
            for replica, process in self._processes.items()
        }
        for thread in waiting.values():
            thread.start()
        with finished:
            # The chief's success ends the job; so does the first failure of any replica.
            finished.wait_for(
                lambda: len(ended) == len(waiting) or ended.get("workerpool0-0") == 0 or any(ended.values())
            )
            first = next((one for one in ended.items() if one[1]), None)
        if len(ended) < len(waiting):
            self._signal(signal.SIGTERM)
            timer = threading.Timer(self._how.grace_s, self.kill)
            timer.start()
            for thread in waiting.values():
                thread.join()
            timer.cancel()
        if self._is_cancelled.is_set():
            self._server.end(name, "CANCELLED")
        elif first is not None:
            self._server.end(name, "FAILED", _MESSAGE.format(*first))
        else:
            self._server.end(name, "SUCCEEDED")

    def _signal(self, how: signal.Signals) -> None:
        for process in list(self._processes.values()):
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, how)

    def _start(
        self, pool: int, index: int, spec: Any, hosts: Mapping[tuple[int, int], str]
    ) -> "subprocess.Popen[bytes]":
        container = spec.container_spec
        environment = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
        environment.update(self._how.environment, **cluster_environment(self._job, pool, index, hosts))
        for variable in container.env:
            environment[variable.name] = _expanded(variable.value, environment)
        command = [self._here(word) for word in (*container.command, *container.args)]
        number = self._job.name.rpartition("/")[2]
        with open(self._how.logs / f"{number}-workerpool{pool}-{index}.log", "wb") as log:
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _here(self, word: str) -> str:
        for there, here in self._how.paths.items():
            if word == there or word.startswith(f"{there}/"):
                return here + word.removeprefix(there)
        return word


def cluster_environment(job: Any, pool: int, index: int, hosts: Mapping[tuple[int, int], str]) -> dict[str, str]:
    """Return what Vertex AI tells a replica of a job about the cluster; `hosts` by (pool, index)."""
    _, project, _, location, _, number = job.name.split("/")
    environment = {
        "CLOUD_ML_JOB_ID": number,
        "CLOUD_ML_PROJECT_ID": project,
        "CLOUD_ML_REGION": location,
        "HOSTNAME": f"cmle-training-workerpool{pool}-{number}-{index}",
    }
    if job.job_spec.base_output_directory.output_uri_prefix:
        base = job.job_spec.base_output_directory.output_uri_prefix.rstrip("/")
        folders = {"AIP_MODEL_DIR": "model", "AIP_CHECKPOINT_DIR": "checkpoints", "AIP_TENSORBOARD_LOG_DIR": "logs"}
        environment.update({name: f"{base}/{folder}/" for name, folder in folders.items()})
    roles = ("chief", "worker", "ps", "evaluator")
    pools = sorted({number for number, _ in hosts})
    of_pool = {number: [host for (at, _), host in hosts.items() if at == number] for number in pools}
    rest = {"environment": "cloud", "job": json.dumps({"python_module": "", "package_uris": [], "job_args": []})}
    cluster_spec = {
        "cluster": {f"workerpool{number}": addresses for number, addresses in of_pool.items()},
        "task": {"type": f"workerpool{pool}", "index": index, "trial": ""},
        **rest,
    }
    tf_config = {
        "cluster": {roles[number]: addresses for number, addresses in of_pool.items() if roles[number] != "evaluator"},
        "task": {"type": roles[pool], "index": index},
        **rest,
    }
    environment.update(CLUSTER_SPEC=json.dumps(cluster_spec), TF_CONFIG=json.dumps(tf_config))
    if len(hosts) > 1:  # a node each, not a process: RANK is the node
        host, _, port = hosts[0, 0].partition(":")
        environment.update(MASTER_ADDR=host, MASTER_PORT=port, WORLD_SIZE=str(len(hosts)))
        environment["RANK"] = str(sorted(hosts).index((pool, index)))
    return environment


def _problems(job: Any) -> Iterator[str]:
    """Yield what JobService finds wrong with a job."""
    pools = job.job_spec.worker_pool_specs
    if not 0 < len(job.display_name) <= 128:
        yield "display_name: 1 to 128 characters are needed"
    if not all(_LABEL.fullmatch(text) for pair in job.labels.items() for text in pair):
        yield f"labels: {dict(job.labels)}"
    if not pools or pools[0].replica_count != 1:
        yield "job_spec.worker_pool_specs[0].replica_count must be 1"
    if job.job_spec.tensorboard and not job.job_spec.service_account:
        yield "service_account is required with tensorboard"
    for pool in pools:
        if not pool.machine_spec.machine_type or not pool.container_spec.image_uri:
            yield "machine_type and image_uri are required"
        if len(pool.container_spec.env) > 100:
            yield "env: at most 100 variables"


def _holds(job: Any, condition: Mapping[str, str | None]) -> bool:
    if condition["state"] is not None:
        return bool(job.state.name == condition["state"])
    key = str(condition["key"])
    return key in job.labels and (condition["how"] == ":" or job.labels[key] == condition["value"])


def _expanded(value: str, environment: Mapping[str, str]) -> str:
    """Expand $(NAME) as Vertex AI does: an unknown name stays, $$(NAME) stands for $(NAME)."""

    def replace(match: "re.Match[str]") -> str:
        return match.group()[1:] if match.group().startswith("$$") else environment.get(match.group(1), match.group())

    return re.sub(r"\$?\$\((\w+)\)|\$\$\(", replace, value)


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.timezone.utc)
