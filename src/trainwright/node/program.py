"""`worker.pyz program MODULE RUN_DIR --attempt N`: becomes a program of our own package, if this interpreter has it."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Sequence

from .run_paths import RunPaths

USER_ERROR = 2


def main(argv: Sequence[str]) -> int:
    """Run the module in this process; where the package is missing, leave the reason where the worker looks for it."""
    module, run_dir, *options = argv
    package, stage = module.split(".")[0], module.split(".")[-1]
    if importlib.util.find_spec(package) is not None:
        os.execv(sys.executable, [sys.executable, "-m", *argv])  # no return
    version = ".".join(map(str, sys.version_info[:2]))
    reason = (
        f"launcher.python: {sys.executable} (Python {version}) has no {package}, which the stage {stage} needs on the "
        f"node; name an interpreter with `pip install '{package}[nxdt]'` that all nodes see"
    )
    print(f"error: {reason}", file=sys.stderr)
    file = RunPaths(run_dir).rank_reason(stage, int(options[options.index("--attempt") + 1]), 0)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{reason}\n", encoding="utf-8")
    return USER_ERROR
