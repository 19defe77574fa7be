"""What the tests of runs read off them."""

import json
from collections.abc import Callable
from pathlib import Path

from trainwright.config import RunConfig
from trainwright.node.run_paths import RunPaths

MakeConfig = Callable[..., RunConfig]


def losses(run_dir: Path, attempt: int = 1) -> dict[int, str]:
    """Return the training loss of each step of an attempt, as the exact number."""
    lines = (RunPaths(run_dir).own / f"metrics-a{attempt}.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    return {step["step"]: float(step["train_loss"]).hex() for step in steps if "train_loss" in step}
