"""data.data_prefix: one data set, or a blend of several in given proportions, mixed sample by sample.

Source: megatron.core.datasets.blended_megatron_dataset_builder, blended_dataset and helpers.cpp, 0.16.1.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainwright.dataset.splits import Bounds
from trainwright.errors import UserError

# Each source is built with 0.5 % more samples than its share, since rounding may draw a few more of it.
_SURPLUS = 0.005
_RIGHT = "right would be [PATH] or [0.7, PATH, 0.3, PATH]"


@dataclass(frozen=True, kw_only=True)
class Blend:
    """The sources of a run."""

    prefixes: tuple[Path, ...]
    weights: tuple[float, ...] | None  # normalised; None: one source, read as it is
    bounds: Mapping[str, Bounds | None] | None = None  # the splits of one source; None: data.splits_string cuts them

    def sizes(self, num_samples: int) -> list[int]:
        """Return how many samples each source is drawn for, of `num_samples` in all; the sum may be slightly larger."""
        return [math.ceil(num_samples * weight) for weight in self.weights or (1.0,)]

    def sizes_with_surplus(self, num_samples: int) -> list[int]:
        """Return how many samples each source is built with."""
        surplus = 0.0 if self.weights is None else _SURPLUS
        return [math.ceil(size * (1 + surplus)) for size in self.sizes(num_samples)]


def parse_data_prefix(data_prefix: Sequence[str | float]) -> Blend:
    """Return the blend that [PATH] or [weight, PATH, weight, PATH, ...] describes; UserError for anything else."""
    if len(data_prefix) == 1:
        return Blend(prefixes=(Path(str(data_prefix[0])),), weights=None)
    if not data_prefix or len(data_prefix) % 2:
        raise UserError(
            f"data.data_prefix has {len(data_prefix)} elements, neither one path nor pairs of weight and path; {_RIGHT}"
        )
    weights = [_weight(value) for value in data_prefix[0::2]]
    normalised = (np.array(weights) / np.sum(weights)).tolist()
    return Blend(prefixes=tuple(Path(str(path)) for path in data_prefix[1::2]), weights=tuple(normalised))


def blend_indices(weights: Sequence[float], num_samples: int) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Return for each blended sample its source, and its number among the samples of that source.

    Each step takes the source that is furthest behind its share, and so depends on all steps before it: a loop, which
    takes a second for a million samples. One source needs none.
    """
    if len(weights) == 1:
        return np.zeros(num_samples, dtype=np.int16), np.arange(num_samples, dtype=np.int64)
    chosen, numbers = array("h"), array("q")
    taken = [0] * len(weights)
    for sample in range(num_samples):
        share = max(sample, 1)
        behind = [weight * share - count for weight, count in zip(weights, taken, strict=True)]
        source = behind.index(max(behind))
        chosen.append(source)
        numbers.append(taken[source])
        taken[source] += 1
    return np.frombuffer(chosen, dtype=np.int16), np.frombuffer(numbers, dtype=np.int64)


def _weight(value: str | float) -> float:
    try:
        weight = float(value)
    except ValueError:
        raise UserError(f"data.data_prefix: {value!r} stands where a weight belongs; {_RIGHT}") from None
    if not (0 < weight < math.inf):
        raise UserError(f"data.data_prefix: weight {value!r} is not a positive number; {_RIGHT}")
    return weight
