"""How two Hugging Face models differ, tensor by tensor, a few rows in memory at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from trainwright.checkpoint.bits import Bits, Dtype, as_torch
from trainwright.checkpoint.hf_model import HfModel

_VALUES_AT_ONCE = 1 << 18  # 6 ns a value on two cores shared with other work; 1 << 22: 15 ns (2026-11-30)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What became of one tensor."""

    name: str
    num_values: int
    num_differing: int  # bit for bit
    largest: float  # absolute difference of finite values; 0.0 where none differ
    num_nan: int
    num_infinite: int


def structure_problems(model: HfModel, base: HfModel) -> Iterator[str]:
    """Yield what of the names and shapes of `model` is not as in `base`."""
    yield from (f"{name} is missing" for name in base.specs if name not in model.specs)
    yield from (f"{name} is not in {base.directory}" for name in model.specs if name not in base.specs)
    for name in _of_both(model, base):
        mine, due = model.specs[name].shape, base.specs[name].shape
        if mine != due:
            yield f"{name} has shape {list(mine)}, not {list(due)}"


def type_problems(model: HfModel, base: HfModel) -> Iterator[str]:
    """Yield which tensors of `model` have another type than in `base`."""
    for name in _of_both(model, base):
        mine, due = model.specs[name].dtype, base.specs[name].dtype
        if mine != due:
            yield f"{name} is {mine.torch_name}, not {due.torch_name}"


def differences(model: HfModel, base: HfModel) -> Iterator[Difference]:
    """Yield how the values of `model` differ from those of `base`, for each tensor of one shape and type in both."""
    for name in _of_both(model, base):
        spec = model.specs[name]
        if spec == base.specs[name]:
            model.read_ahead(name)
            base.read_ahead(name)
            yield _difference(name, model.values(name).reshape(-1), base.values(name).reshape(-1), spec.dtype)


def _of_both(model: HfModel, base: HfModel) -> list[str]:
    return [name for name in base.specs if name in model.specs]


def _difference(name: str, mine: Bits, theirs: Bits, dtype: Dtype) -> Difference:
    differing = nan = infinite = 0
    largest = 0.0
    for start in range(0, len(mine), _VALUES_AT_ONCE):
        bits, others = (values[start : start + _VALUES_AT_ONCE] for values in (mine, theirs))
        values = _as_float(bits, dtype)
        if not isfinite(float(values.sum())):  # far cheaper than to look at each value
            nan += int(values.isnan().sum())
            infinite += int(values.isinf().sum())
        num = int(np.count_nonzero(bits != others))
        if num:
            differing += num
            largest = max(largest, _largest(values, _as_float(others, dtype)))
    return Difference(
        name=name,
        num_values=len(mine),
        num_differing=differing,
        largest=largest,
        num_nan=nan,
        num_infinite=infinite,
    )


def _largest(first: Any, second: Any) -> float:
    largest = float((first - second).abs().max())
    if isfinite(largest):
        return largest
    apart = (first.double() - second.double()).abs()
    finite = apart[apart.isfinite()]
    return float(finite.max()) if len(finite) else 0.0


def _as_float(bits: Bits, dtype: Dtype) -> Any:
    return as_torch(bits, dtype).double() if dtype.item_bytes > 4 else as_torch(bits, dtype).float()
