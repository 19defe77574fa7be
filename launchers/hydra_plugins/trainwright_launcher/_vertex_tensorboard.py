"""Curves on Vertex AI TensorBoard: an instance for all runs of a project and region, in it an experiment for each.

The instance is launcher.tensorboard; else the one that carries our label, which is made by the first upload.
Limits and what overwrites what: google.cloud.aiplatform.v1, tensorboard_service.proto.
"""

import datetime
import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from hydra_plugins.trainwright_launcher._vertex_client import ServiceClient, patiently
from hydra_plugins.trainwright_launcher._vertex_errors import OverError, TakenError, VertexError

from trainwright.config_launcher import VertexLauncher
from trainwright.node.tfevents import Point
from trainwright.tensorboard_service import Curves, Uploaded

_NAME = "trainwright"  # of the instance that we make, and of the label by which it is found again
_INSTANCE = re.compile(r"projects/[^/]+/locations/(?P<location>[^/]+)/tensorboards/[^/]+")
_ID_LENGTH = 128  # of an experiment's id and of a run's, of [a-z0-9-]
_POINTS_A_REQUEST = 1000  # the service takes 5000
_SERIES_A_REQUEST = 1000
_SCALARS = "scalars"  # TensorBoard's plugin that draws them


class VertexTensorBoards:
    """The TensorBoard of one project and region."""

    def __init__(self, launcher: VertexLauncher) -> None:
        self._launcher, self._instance = launcher, launcher.tensorboard
        given = _INSTANCE.fullmatch(launcher.tensorboard or "")
        if launcher.tensorboard is not None and given is None:
            raise VertexError(
                f"launcher.tensorboard={launcher.tensorboard} is no name of an instance",
                "use projects/PROJECT/locations/LOCATION/tensorboards/ID",
            )
        self._location = given["location"] if given is not None else launcher.location
        self._client = ServiceClient("TensorboardService", launcher.project, launcher.api_endpoint)

    def upload(self, run_id: str, curves: Mapping[str, Curves], on_progress: Callable[[int, int], None]) -> Uploaded:
        """Bring a run's curves into an experiment of its name: the points that are not there yet."""
        instance = patiently(lambda: self._find() or self._make())
        experiment = f"{instance}/experiments/{_id(run_id)}"
        patiently(lambda: self._ensure_experiment(instance, experiment, run_id))
        new: list[tuple[str, str, Sequence[Point]]] = []  # run, series, points
        for folder, tags in curves.items():
            run = f"{experiment}/runs/{_id(folder)}"
            patiently(lambda name=run, shown=folder: self._ensure_run(experiment, name, shown))  # type: ignore[misc]
            series = patiently(lambda name=run, wanted=tags: self._ensure_series(experiment, name, wanted))  # type: ignore[misc]
            new += [(run, series[tag].name, _newer(points, series[tag])) for tag, points in tags.items()]
        total = sum(len(points) for *_, points in new)
        done = 0
        on_progress(done, total)
        for batch in _batches(new):
            patiently(lambda points=batch: self._write(experiment, points))  # type: ignore[misc]
            done += sum(len(points) for *_, points in batch)
            on_progress(done, total)
        return Uploaded(
            tensorboard=instance,
            experiment=experiment,
            url=f"https://{self._location}.tensorboard.googleusercontent.com/experiment/{experiment.replace('/', '+')}",
            num_points=sum(len(points) for tags in curves.values() for points in tags.values()),
            num_new=total,
        )

    def delete(self, run_ids: Collection[str], *, others_too: bool) -> str | None:
        """Delete the instance, unless it holds experiments of other runs or was not made by us."""
        name = patiently(self._find)
        if name is None:
            return None
        if not others_too:
            self._refuse_to_delete(name, run_ids)
        operation = patiently(lambda: self._call("delete_tensorboard", name=name))
        self._client.finish(self._location, operation)
        return name

    # ---- what is there, or is made

    def _find(self) -> str | None:
        if self._instance is not None:
            return str(self._call("get_tensorboard", name=self._instance).name)
        request = {"parent": self._client.parent(self._location), "filter": f"labels.{_NAME}:*"}
        found = self._call("list_tensorboards", request=request, pages=True)
        mine = sorted((one for one in found if _NAME in one.labels), key=lambda one: one.create_time)
        return str(mine[0].name) if mine else None  # the oldest: two commands may have made one at the same time

    def _make(self) -> str:
        from google.cloud.aiplatform_v1 import EncryptionSpec, Tensorboard

        key = self._launcher.encryption_key
        wanted = Tensorboard(
            display_name=_NAME,
            description="Curves of trainwright's runs",
            labels={_NAME: "runs"},
            encryption_spec=EncryptionSpec(kms_key_name=key) if key is not None else None,
        )
        parent = self._client.parent(self._location)
        operation = self._call("create_tensorboard", parent=parent, tensorboard=wanted)
        return str(self._client.finish(self._location, operation).name)

    def _ensure_experiment(self, instance: str, name: str, run_id: str) -> None:
        from google.cloud.aiplatform_v1 import TensorboardExperiment

        try:
            self._call("get_tensorboard_experiment", name=name)
        except OverError:
            self._make_unless_taken(
                "create_tensorboard_experiment",
                parent=instance,
                tensorboard_experiment=TensorboardExperiment(display_name=run_id, source="trainwright"),
                tensorboard_experiment_id=name.rpartition("/")[2],
            )

    def _ensure_run(self, experiment: str, name: str, shown: str) -> None:
        from google.cloud.aiplatform_v1 import TensorboardRun

        try:
            self._call("get_tensorboard_run", name=name)
        except OverError:
            self._make_unless_taken(
                "create_tensorboard_run",
                parent=experiment,
                tensorboard_run=TensorboardRun(display_name=shown),
                tensorboard_run_id=name.rpartition("/")[2],
            )

    def _ensure_series(self, experiment: str, run: str, tags: Curves) -> dict[str, Any]:
        """Return the time series of a run by tag; those that are missing are made, all by few calls."""
        from google.cloud.aiplatform_v1 import CreateTensorboardTimeSeriesRequest, TensorboardTimeSeries

        request = {"parent": run, "page_size": _SERIES_A_REQUEST}
        found = self._call("list_tensorboard_time_series", request=request, pages=True)
        series = {one.display_name: one for one in found}
        missing = [tag for tag in tags if tag not in series]
        for start in range(0, len(missing), _SERIES_A_REQUEST):
            requests = [
                CreateTensorboardTimeSeriesRequest(
                    parent=run,
                    tensorboard_time_series=TensorboardTimeSeries(
                        display_name=tag, value_type=TensorboardTimeSeries.ValueType.SCALAR, plugin_name=_SCALARS
                    ),
                )
                for tag in missing[start : start + _SERIES_A_REQUEST]
            ]
            made = self._call("batch_create_tensorboard_time_series", parent=experiment, requests=requests)
            series.update({one.display_name: one for one in made.tensorboard_time_series})
        return series

    def _make_unless_taken(self, method: str, **request: Any) -> None:
        try:
            self._call(method, **request)
        except TakenError:  # by another command, or by a call whose answer was lost
            return

    # ---- points

    def _write(self, experiment: str, batch: Sequence[tuple[str, str, Sequence[Point]]]) -> None:
        from google.cloud.aiplatform_v1 import TensorboardTimeSeries, TimeSeriesData, WriteTensorboardRunDataRequest

        of_run: dict[str, list[Any]] = {}
        for run, series, points in batch:
            data = TimeSeriesData(
                tensorboard_time_series_id=series.rpartition("/")[2],
                value_type=TensorboardTimeSeries.ValueType.SCALAR,
                values=[_data_point(point) for point in points],
            )
            of_run.setdefault(run, []).append(data)
        requests = [
            WriteTensorboardRunDataRequest(tensorboard_run=run, time_series_data=data) for run, data in of_run.items()
        ]
        self._call(
            "write_tensorboard_experiment_data", tensorboard_experiment=experiment, write_run_data_requests=requests
        )

    # ---- what may not go

    def _refuse_to_delete(self, name: str, run_ids: Collection[str]) -> None:
        found = patiently(lambda: self._call("list_tensorboard_experiments", request={"parent": name}, pages=True))
        ours = {_id(run_id) for run_id in run_ids}
        others = sorted(one.display_name or one.name for one in found if one.name.rpartition("/")[2] not in ours)
        if others:
            more = f" and {len(others) - 3} more" if len(others) > 3 else ""
            raise VertexError(
                f"{name} holds experiments of other runs, too: {', '.join(others[:3])}{more}",
                "name these runs as well, or add --force",
            )
        labels = patiently(lambda: self._call("get_tensorboard", name=name)).labels
        if _NAME not in labels:
            raise VertexError(f"{name} was not made by trainwright", "add --force if nobody else needs it")

    def _call(self, method: str, **request: Any) -> Any:
        return self._client.call(self._location, method, **request)


def _id(text: str) -> str:
    """Return an id that no other text has."""
    plain = re.sub(r"[^a-z0-9-]", "-", text.lower())
    if plain == text and len(text) <= _ID_LENGTH:
        return text
    tail = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{plain[: _ID_LENGTH - 9]}-{tail}"


def _newer(points: Sequence[Point], series: Any) -> list[Point]:
    """Return the points that a time series lacks: of later steps, or logged anew since, as a resumed run does.

    The service overwrites the value of a step that is written again.
    """
    known = series.metadata
    if known.max_wall_time is None or not known.max_wall_time.timestamp():
        return list(points)
    last = known.max_wall_time.timestamp()
    return [point for point in points if point.step > known.max_step or point.wall_time > last + 1e-5]


def _batches(
    series: Sequence[tuple[str, str, Sequence[Point]]],
) -> Iterator[list[tuple[str, str, Sequence[Point]]]]:
    """Yield the points, so many together as one request takes."""
    batch: list[tuple[str, str, Sequence[Point]]] = []
    room = _POINTS_A_REQUEST
    for run, name, points in series:
        start = 0
        while start < len(points):
            part = points[start : start + room]
            batch.append((run, name, part))
            start, room = start + len(part), room - len(part)
            if not room:
                yield batch
                batch, room = [], _POINTS_A_REQUEST
    if batch:
        yield batch


def _data_point(point: Point) -> Any:
    from google.cloud.aiplatform_v1 import Scalar, TimeSeriesDataPoint

    when = datetime.datetime.fromtimestamp(point.wall_time, datetime.timezone.utc)
    return TimeSeriesDataPoint(scalar=Scalar(value=point.value), wall_time=when, step=point.step)
