"""Vertex AI's TensorboardService on this machine, as far as we call it; part of VertexServer."""

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SERVICE = "google.cloud.aiplatform.v1.TensorboardService"
_ID = re.compile(r"[a-z0-9-]{1,128}")
_MOST_POINTS = 5000  # of one request


@dataclass
class TensorboardServer:
    """Instances and what is in them, by full name. `note` counts a call and gives ordered failures, `abort` any."""

    note: Callable[[str, str, Any], Any]
    abort: Callable[..., None]
    longest_page: int = 100
    instances: dict[str, Any] = field(default_factory=dict)
    experiments: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, Any] = field(default_factory=dict)
    series: dict[str, Any] = field(default_factory=dict)
    points: dict[str, dict[int, float]] = field(default_factory=dict)  # by series and step
    sent: list[int] = field(default_factory=list)  # points of each request that wrote some
    _ids: Any = field(default_factory=lambda: itertools.count(1))

    def methods(self, handler: Callable[..., Any]) -> dict[str, Any]:
        """Return a handler for each method; `handler` makes one of function, request class and serializer."""
        from google.cloud import aiplatform_v1 as v1
        from google.longrunning import operations_pb2

        operation = operations_pb2.Operation.SerializeToString
        calls: dict[str, tuple[Callable[[Any, Any], Any], Any, Any]] = {
            "CreateTensorboard": (self._create, v1.CreateTensorboardRequest, operation),
            "GetTensorboard": (self._get(self.instances), v1.GetTensorboardRequest, v1.Tensorboard.serialize),
            "ListTensorboards": (self._list, v1.ListTensorboardsRequest, v1.ListTensorboardsResponse.serialize),
            "DeleteTensorboard": (self._delete, v1.DeleteTensorboardRequest, operation),
            "GetTensorboardExperiment": (
                self._get(self.experiments),
                v1.GetTensorboardExperimentRequest,
                v1.TensorboardExperiment.serialize,
            ),
            "CreateTensorboardExperiment": (
                self._create_experiment,
                v1.CreateTensorboardExperimentRequest,
                v1.TensorboardExperiment.serialize,
            ),
            "ListTensorboardExperiments": (
                self._list_experiments,
                v1.ListTensorboardExperimentsRequest,
                v1.ListTensorboardExperimentsResponse.serialize,
            ),
            "GetTensorboardRun": (self._get(self.runs), v1.GetTensorboardRunRequest, v1.TensorboardRun.serialize),
            "CreateTensorboardRun": (self._create_run, v1.CreateTensorboardRunRequest, v1.TensorboardRun.serialize),
            "ListTensorboardTimeSeries": (
                self._list_series,
                v1.ListTensorboardTimeSeriesRequest,
                v1.ListTensorboardTimeSeriesResponse.serialize,
            ),
            "BatchCreateTensorboardTimeSeries": (
                self._create_series,
                v1.BatchCreateTensorboardTimeSeriesRequest,
                v1.BatchCreateTensorboardTimeSeriesResponse.serialize,
            ),
            "WriteTensorboardExperimentData": (
                self._write,
                v1.WriteTensorboardExperimentDataRequest,
                v1.WriteTensorboardExperimentDataResponse.serialize,
            ),
        }
        return {name: handler(self._noted(name, call), *rest) for name, (call, *rest) in calls.items()}

    def _noted(self, name: str, call: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def answer(request: Any, context: Any) -> Any:
            where = getattr(request, "parent", "") or getattr(request, "name", "") or request.tensorboard_experiment
            failure = self.note(name, where, context)
            answered = call(request, context)
            if failure is not None:  # done, but the answer is lost
                self.abort(context, failure)
            return answered

        return answer

    def _get(self, kept: dict[str, Any]) -> Callable[[Any, Any], Any]:
        def answer(request: Any, context: Any) -> Any:
            if request.name not in kept:
                self._refuse(context, "NOT_FOUND", f"{request.name} is not found.")
            return kept[request.name]

        return answer

    def _create(self, request: Any, context: Any) -> Any:
        made = request.tensorboard
        made.name = f"{request.parent}/tensorboards/{next(self._ids)}"
        self.instances[made.name] = made
        return _done(made)

    def _list(self, request: Any, context: Any) -> Any:
        from google.cloud import aiplatform_v1 as v1

        if request.filter and re.fullmatch(r"labels\.[a-z0-9_]+:\*", request.filter) is None:
            self._refuse(context, "INVALID_ARGUMENT", f"filter: {request.filter}")
        label = request.filter.removeprefix("labels.").removesuffix(":*")
        rows = [one for name, one in self.instances.items() if name.startswith(f"{request.parent}/")]
        page, rest = self._page([one for one in rows if not label or label in one.labels], request)
        return v1.ListTensorboardsResponse(tensorboards=page, next_page_token=rest)

    def _delete(self, request: Any, context: Any) -> Any:
        if request.name not in self.instances:
            self._refuse(context, "NOT_FOUND", f"{request.name} is not found.")
        for kept in (self.instances, self.experiments, self.runs, self.series, self.points):
            for name in [name for name in kept if f"{name}/".startswith(f"{request.name}/")]:
                del kept[name]  # type: ignore[attr-defined]
        return _done(None)

    def _create_experiment(self, request: Any, context: Any) -> Any:
        name = f"{request.parent}/experiments/{request.tensorboard_experiment_id}"
        return self._keep(self.experiments, request.tensorboard_experiment, name, self.instances, context)

    def _list_experiments(self, request: Any, context: Any) -> Any:
        from google.cloud import aiplatform_v1 as v1

        rows = [one for name, one in self.experiments.items() if name.startswith(f"{request.parent}/")]
        page, rest = self._page(rows, request)
        return v1.ListTensorboardExperimentsResponse(tensorboard_experiments=page, next_page_token=rest)

    def _create_run(self, request: Any, context: Any) -> Any:
        name = f"{request.parent}/runs/{request.tensorboard_run_id}"
        return self._keep(self.runs, request.tensorboard_run, name, self.experiments, context)

    def _list_series(self, request: Any, context: Any) -> Any:
        from google.cloud import aiplatform_v1 as v1

        rows = [one for name, one in self.series.items() if name.startswith(f"{request.parent}/")]
        page, rest = self._page(rows, request)
        return v1.ListTensorboardTimeSeriesResponse(tensorboard_time_series=page, next_page_token=rest)

    def _create_series(self, request: Any, context: Any) -> Any:
        from google.cloud import aiplatform_v1 as v1

        made = []
        for one in request.requests:
            wanted = one.tensorboard_time_series
            names = [other.display_name for name, other in self.series.items() if name.startswith(f"{one.parent}/")]
            if one.parent not in self.runs:
                self._refuse(context, "NOT_FOUND", f"{one.parent} is not found.")
            if wanted.display_name in names:
                self._refuse(context, "INVALID_ARGUMENT", f"Time series {wanted.display_name} already exists.")
            wanted.name = f"{one.parent}/timeSeries/{next(self._ids)}"
            self.series[wanted.name], self.points[wanted.name] = wanted, {}
            made.append(wanted)
        return v1.BatchCreateTensorboardTimeSeriesResponse(tensorboard_time_series=made)

    def _write(self, request: Any, context: Any) -> Any:
        from google.cloud import aiplatform_v1 as v1

        data = [(one.tensorboard_run, part) for one in request.write_run_data_requests for part in one.time_series_data]
        number = sum(len(part.values) for _, part in data)
        if number > _MOST_POINTS:
            self._refuse(context, "INVALID_ARGUMENT", f"{number} points are too many")
        for run, part in data:
            name = f"{run}/timeSeries/{part.tensorboard_time_series_id}"
            if name not in self.series:
                self._refuse(context, "NOT_FOUND", f"{name} is not found.")
            known = self.series[name].metadata
            for point in part.values:
                self.points[name][point.step] = point.scalar.value
                known.max_step = max(known.max_step, point.step)
                if known.max_wall_time is None or point.wall_time > known.max_wall_time:
                    known.max_wall_time = point.wall_time
        self.sent.append(number)
        return v1.WriteTensorboardExperimentDataResponse()

    # ---- behind them

    def curves(self) -> dict[str, dict[int, float]]:
        """Return all points by experiment, run and tag, such as `one/default/train_loss`."""
        return {
            "/".join([*name.split("/")[7:10:2], self.series[name].display_name]): points
            for name, points in self.points.items()
        }

    def _keep(self, kept: dict[str, Any], made: Any, name: str, parents: dict[str, Any], context: Any) -> Any:
        above, ident = name.rsplit("/", 2)[0], name.rpartition("/")[2]
        if above not in parents:
            self._refuse(context, "NOT_FOUND", f"{above} is not found.")
        if _ID.fullmatch(ident) is None:
            self._refuse(context, "INVALID_ARGUMENT", f"id: {ident}")
        if name in kept:
            self._refuse(context, "ALREADY_EXISTS", f"{name} already exists.")
        made.name = name
        kept[name] = made
        return made

    def _page(self, rows: list[Any], request: Any) -> tuple[list[Any], str]:
        start, size = int(request.page_token or 0), min(request.page_size or self.longest_page, self.longest_page)
        return rows[start : start + size], str(start + size) if start + size < len(rows) else ""

    def _refuse(self, context: Any, code: str, message: str) -> None:
        from tests.vertex_server import Failure

        self.abort(context, Failure(code=code, message=message, retry_after_s=None))


def _done(made: Any) -> Any:
    """Return a long operation that has ended already."""
    from google.longrunning import operations_pb2
    from google.protobuf import any_pb2, empty_pb2

    packed = any_pb2.Any()
    packed.Pack(type(made).pb(made) if made is not None else empty_pb2.Empty())
    return operations_pb2.Operation(name="operations/1", done=True, response=packed)
