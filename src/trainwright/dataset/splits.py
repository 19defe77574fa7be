"""data.splits_string: which sequences train, which validate and which test.

Source: megatron.core.datasets.blended_megatron_dataset_config and blended_megatron_dataset_builder, 0.16.1.
"""

from __future__ import annotations

import re
from functools import reduce
from itertools import accumulate
from operator import add

from trainwright.errors import UserError

SPLITS = ("train", "validation", "test")
Bounds = tuple[int, int]  # the sequences [first, stop)


def cut_at(splits_string: str, num_sequences: int) -> dict[str, Bounds | None]:
    """Return the sequences of each split as Megatron cuts them, also where that leaves a split without any.

    Raises UserError for a string that is no list of up to three weights.
    """
    weights = _parse(splits_string)
    total = reduce(add, weights)  # not `sum`, which rounds otherwise than numpy's does since Python 3.12
    edges = list(accumulate((weight / total for weight in weights), initial=0.0))
    return {
        name: (round(begin * float(num_sequences)), round(end * float(num_sequences))) if end > begin else None
        for name, begin, end in zip(SPLITS, edges[:-1], edges[1:], strict=True)
    }


def split_bounds(splits_string: str, num_sequences: int, source: str) -> dict[str, Bounds | None]:
    """Return the sequences of each split; None for a split of weight 0.

    Raises UserError for a string that is no list of up to three weights, and for a weighted split without any sequence
    (megatron-core would count epochs of it forever). `source` names the data set in that message.
    """
    bounds = cut_at(splits_string, num_sequences)
    problem = empty_split(splits_string, num_sequences, source)
    if problem is not None:
        raise UserError("; ".join(problem))
    return bounds


def empty_split(splits_string: str, num_sequences: int, source: str) -> tuple[str, str] | None:
    """Return (what is wrong, what to do) where a weighted split is left without any sequence."""
    bounds = cut_at(splits_string, num_sequences)
    empty = [name for name, split in bounds.items() if split is not None and split[0] == split[1]]
    if not empty:
        return None
    counts = ", ".join(f"{name} {split[1] - split[0] if split else 0}" for name, split in bounds.items())
    return (
        f"data.splits_string={splits_string!r} leaves no sequence for {' and '.join(empty)}: the {num_sequences} "
        f"sequences of {source} become {counts}",
        "give a larger weight, or weight 0 to go without that split",
    )


def _parse(splits_string: str) -> list[float]:
    texts = re.findall(r"[.0-9]+", splits_string)
    try:
        weights = [float(text) for text in texts]
    except ValueError:
        weights = []
    if len(weights) > len(SPLITS) or sum(weights) <= 0:
        raise UserError(
            f"data.splits_string={splits_string!r} is no list of weights for train, validation and test; "
            "right would be '95,5,0'"
        )
    return weights + [0.0] * (len(SPLITS) - len(weights))
