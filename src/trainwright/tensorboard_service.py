"""Vertex AI TensorBoard as our commands see it. Google's client stays with the launcher that speaks to Vertex AI."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from trainwright.config import RunConfig
from trainwright.errors import UserError
from trainwright.node.tfevents import Point
from trainwright.scheduler import open_scheduler

Curves = Mapping[str, Sequence[Point]]  # by tag, each in the order of its steps


@dataclass(frozen=True, kw_only=True)
class Uploaded:
    """What became of a run's curves."""

    tensorboard: str  # the instance, projects/P/locations/L/tensorboards/ID
    experiment: str  # its full name
    url: str  # where people look at it
    num_points: int  # of the run
    num_new: int  # of these, sent now


class TensorBoards(Protocol):
    """An instance of Vertex AI TensorBoard that may not be there yet. All methods raise UserError."""

    def upload(self, run_id: str, curves: Mapping[str, Curves], on_progress: Callable[[int, int], None]) -> Uploaded:
        """Bring a run's curves, by the name of their folder, into an experiment of its name: what is not there yet.

        The instance is made if needed. `on_progress` hears how many points of how many are sent.
        """

    def delete(self, run_ids: Collection[str], *, others_too: bool) -> str | None:
        """Delete the instance and return its name; None: there is none.

        Raises UserError when it holds experiments of other runs or is not one of ours, unless `others_too`.
        """


@runtime_checkable
class _HasTensorBoards(Protocol):
    def tensorboards(self) -> TensorBoards: ...


def open_tensorboards(config: RunConfig) -> TensorBoards:
    """Return the instance of a run's project and region. Raises UserError where the run names none."""
    scheduler = open_scheduler(config)
    if not isinstance(scheduler, _HasTensorBoards):
        raise UserError(f"launcher={config.launcher.kind}: Vertex AI TensorBoard goes with launcher=vertex")
    return scheduler.tensorboards()
