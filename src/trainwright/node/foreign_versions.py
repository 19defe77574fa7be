"""Which versions trained, where the framework lives in an environment that this process does not run in."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

# As the folders of installed packages spell them.
_PACKAGES = frozenset({
    "lightning", "megatron_core", "nemo_toolkit", "neuronx_cc", "neuronx_distributed", "neuronx_distributed_training",
    "pytorch_lightning", "torch", "torch_neuronx", "torch_xla", "transformer_engine", "transformers",
})  # fmt: skip


def installed_versions(python: str) -> dict[str, str]:
    """Return the versions of what training depends on in the environment of an interpreter, and of that.

    An interpreter without a folder, say `python3` in a container, is taken for the one that runs this.
    """
    lib = Path(python).parent.parent / "lib" if "/" in python else None
    folders = [Path(entry) for entry in sys.path] if lib is None else sorted(lib.glob("python3*/site-packages"))
    found: dict[str, str] = {}
    for folder in folders:
        for info in folder.glob("*.dist-info"):
            name, _, version = info.name[: -len(".dist-info")].rpartition("-")
            if name.lower() in _PACKAGES:
                found.setdefault(name.lower(), version)
    own = platform.python_version() if lib is None else "".join(folder.parent.name[6:] for folder in folders[:1])
    return {**({"python": own} if own else {}), **{name: found[name] for name in sorted(found)}}
