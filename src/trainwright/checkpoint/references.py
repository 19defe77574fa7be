"""The small files of NxD's xser layout: a pickle of references to tensors, and what each of them is like."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from trainwright.checkpoint.bits import TensorSpec
from trainwright.checkpoint.nxd_checkpoint import REFERENCE_CLASS, REFERENCE_MODULE


def write_references(path: Path, specs: Mapping[str, TensorSpec]) -> None:
    """Write the shard `path` and its info file; tensor number i is to lie in `PATH.tensors/tensor_i.pt`."""
    import torch

    info = {
        tid: {
            "dtype": getattr(torch, spec.dtype.torch_name),
            "shape": torch.Size(spec.shape),
            "expert_model_parallel": False,
        }
        for tid, spec in enumerate(specs.values())
    }
    with _reference_class() as reference_class:
        references = {}
        for tid, name in enumerate(specs):
            references[name] = reference_class.__new__(reference_class)
            references[name].tid = tid
        torch.save(references, path)
    torch.save(info, path.with_name(path.name + ".info.pt"))


@contextlib.contextmanager
def _reference_class() -> Iterator[Any]:
    """Give the class that NxD's reader finds under torch_xla's name. A pickle names importable classes only."""
    if REFERENCE_MODULE in sys.modules:
        yield getattr(sys.modules[REFERENCE_MODULE], REFERENCE_CLASS)
        return
    parts = REFERENCE_MODULE.split(".")
    names = [".".join(parts[: depth + 1]) for depth in range(len(parts))]
    added = {name: ModuleType(name) for name in names if name not in sys.modules}
    reference_class = type(REFERENCE_CLASS, (), {"__module__": REFERENCE_MODULE})
    setattr(added[REFERENCE_MODULE], REFERENCE_CLASS, reference_class)
    sys.modules.update(added)
    try:
        yield reference_class
    finally:
        for name in added:
            del sys.modules[name]
