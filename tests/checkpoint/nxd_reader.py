"""NxD's reader as far as files go: which of them it opens for a shard, and under which names it unpickles.

Source: neuronx_distributed trainer/checkpoint.py and checkpoint_storage.py (SDK 2.29), and torch_xla's
utils/serialization.py, whose class of references stands here under its own name.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

MODULE = "torch_xla.utils.serialization"


class TensorReference:
    def __init__(self, tid: int) -> None:
        self.tid = tid


TensorReference.__module__ = MODULE


def read_as_nxd(shard: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a shard in either layout, as NxD finds them out."""
    is_xser = any(path.name.endswith(".tensors") for path in shard.parent.iterdir())
    content = _load(shard)
    if not is_xser:
        assert all(isinstance(value, torch.Tensor) for value in content.values())
        return dict(content)
    info = _load(shard.with_name(shard.name + ".info.pt"))
    tensors = {}
    for name, reference in content.items():
        assert type(reference) is TensorReference
        tensors[name] = _load(shard.with_name(shard.name + ".tensors") / f"tensor_{reference.tid}.pt")
        entry = info[reference.tid]
        assert entry == {
            "dtype": tensors[name].dtype,
            "shape": tensors[name].shape,
            "expert_model_parallel": False,
        }
        assert isinstance(entry["shape"], torch.Size)
    return tensors


def _load(path: Path) -> Any:
    """Unpickle as NxD does, torch_xla being installed where it runs."""
    names = ["torch_xla", "torch_xla.utils", MODULE]
    modules: dict[str, Any] = {name: ModuleType(name) for name in names}
    modules[MODULE].TensorReference = TensorReference
    with mock.patch.dict(sys.modules, modules):
        return torch.load(path, map_location="cpu", weights_only=False)
