"""The Hydra sweeper: expands the command line into jobs and launches them as one batch."""

import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class SweeperNode:
    """What `hydra/sweeper: trainwright` selects; experiments/sweep/NAME.yaml fills `params`."""

    _target_: str = "hydra_plugins.trainwright_launcher.sweeper.TrainwrightSweeper"
    params: dict[str, Any] | None = None


ConfigStore.instance().store(group="hydra/sweeper", name="trainwright", node=SweeperNode, provider="trainwright")


class TrainwrightSweeper(Sweeper):
    """Product of all swept keys, in order. A job is composed once, and no failure stops the others."""

    def __init__(self, params: Mapping[str, Any] | None = None) -> None:
        self._params = params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._config = config
        self._parser = OverridesParser.create(config_loader=hydra_context.config_loader)
        self._launcher = Plugins.instance().instantiate_launcher(
            config=config, hydra_context=hydra_context, task_function=task_function
        )

    def sweep(self, arguments: list[str]) -> None:
        from trainwright.dispatch import refuse_too_many
        from trainwright.errors import RunFailedError

        given = self._parser.parse_overrides(arguments)
        given_keys = {override.key_or_group for override in given}
        # A key on the command line replaces the sweep file's.
        from_file = [f"{key}={value}" for key, value in self._params.items() if key.lstrip("+") not in given_keys]
        axes = [list(_values(override)) for override in (*given, *self._parser.parse_overrides(from_file))]
        refuse_too_many(math.prod(map(len, axes)), self._config.max_jobs)
        points = list(itertools.product(*axes))
        jobs = list(dict.fromkeys(points))
        for note in (*_given_twice(given), *_same_points(points, jobs)):
            print(f"warning: {note}", file=sys.stderr)
        returns = self._launcher.launch(jobs, initial_job_idx=0)
        RunFailedError.raise_for([result._return_value for result in returns])


def _values(override: Override) -> Iterator[str]:
    """Yield the override of each value of an axis; exactly the user's text where it is no axis."""
    if override.is_sweep_override():
        for value in override.sweep_string_iterator():
            yield f"{override.get_key_element()}={value}"
    else:
        assert override.input_line is not None
        yield override.input_line


def _given_twice(overrides: Sequence[Override]) -> Iterator[str]:
    last: dict[str, str] = {}
    for override in overrides:
        key, line = override.get_key_element(), str(override.input_line)
        if key in last:
            yield f"{key} is given twice, as {last[key]} and {line}; the last counts"
        last[key] = line


def _same_points(points: Sequence[Any], jobs: Sequence[Any]) -> Iterator[str]:
    if len(jobs) < len(points):
        yield f"the sweep has {len(points)} points, but only {len(jobs)} differ; each is run once"
