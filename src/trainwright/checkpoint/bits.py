"""Tensors as raw bits: numpy knows no bfloat16, and moving weights needs none. Only `cast` looks at values."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.unsignedinteger[Any]]  # one unsigned integer of the item's size for each value
DtypeChoice = Literal["keep", "bf16", "fp32"]


@dataclass(frozen=True, kw_only=True)
class Dtype:
    """One type of value under the names that file formats give it."""

    code: str  # in safetensors
    torch_name: str
    storage: str  # torch's class of typed storages, which the pickle of a tensor names
    item_bytes: int
    is_float: bool = True

    @property
    def bits(self) -> np.dtype[np.unsignedinteger[Any]]:
        return np.dtype(f"<u{self.item_bytes}")


_ALL = (
    Dtype(code="BF16", torch_name="bfloat16", storage="BFloat16Storage", item_bytes=2),
    Dtype(code="F16", torch_name="float16", storage="HalfStorage", item_bytes=2),
    Dtype(code="F32", torch_name="float32", storage="FloatStorage", item_bytes=4),
    Dtype(code="F64", torch_name="float64", storage="DoubleStorage", item_bytes=8),
    Dtype(code="I64", torch_name="int64", storage="LongStorage", item_bytes=8, is_float=False),
    Dtype(code="I32", torch_name="int32", storage="IntStorage", item_bytes=4, is_float=False),
    Dtype(code="I16", torch_name="int16", storage="ShortStorage", item_bytes=2, is_float=False),
    Dtype(code="I8", torch_name="int8", storage="CharStorage", item_bytes=1, is_float=False),
    Dtype(code="U8", torch_name="uint8", storage="ByteStorage", item_bytes=1, is_float=False),
    Dtype(code="BOOL", torch_name="bool", storage="BoolStorage", item_bytes=1, is_float=False),
)
DTYPES = {dtype.code: dtype for dtype in _ALL}
TORCH_DTYPES = {dtype.torch_name: dtype for dtype in _ALL}
_CHOICES = {"bf16": DTYPES["BF16"], "fp32": DTYPES["F32"]}


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """What a file says about a tensor besides its values."""

    dtype: Dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.item_bytes


def chosen(dtype: Dtype, choice: DtypeChoice) -> Dtype:
    """Return the type that values of `dtype` are stored in under `choice`; what is no float stays as it is."""
    return _CHOICES[choice] if choice != "keep" and dtype.is_float else dtype


def cast(bits: Bits, source: Dtype, target: Dtype) -> Bits:
    """Return the same values in another type, rounded to nearest even where it holds fewer digits."""
    if source == target:
        return bits
    import torch

    return from_torch(as_torch(bits, source).to(getattr(torch, target.torch_name)))


def mean(copies: Sequence[Bits], dtype: Dtype) -> Bits:
    """Return the average of several tensors of one type, computed in double precision."""
    import torch

    total = torch.zeros(copies[0].shape, dtype=torch.float64)
    for copy in copies:
        total += as_torch(copy, dtype).double()
    return from_torch((total / len(copies)).to(getattr(torch, dtype.torch_name)))


def largest_difference(first: Bits, second: Bits, dtype: Dtype) -> float:
    """Return by how much two tensors of one shape differ at most."""
    difference = as_torch(first, dtype).double() - as_torch(second, dtype).double()
    return float(difference.abs().max())


def as_torch(bits: Bits, dtype: Dtype) -> Any:
    """Return a torch tensor of the same values: a copy, since torch takes no read-only memory."""
    import torch

    signed = bits.astype(bits.dtype.str.replace("u", "i"), copy=True)
    return torch.from_numpy(signed).view(getattr(torch, dtype.torch_name))


def from_torch(tensor: Any) -> Bits:
    """Return the bits of a torch tensor, sharing its memory."""
    import torch

    item_bytes = tensor.element_size()
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[item_bytes]
    bits: Bits = tensor.detach().view(signed).numpy().view(f"<u{item_bytes}")
    return bits
