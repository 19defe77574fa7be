"""What the tests of runs read off them."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from trainwright.backends.native.retention import delete, saved_checkpoints
from trainwright.config import RunConfig
from trainwright.node.run_paths import RunPaths

MakeConfig = Callable[..., RunConfig]


def losses(run_dir: Path, attempt: int = 1) -> dict[int, str]:
    """Return the training loss of each step of an attempt, as the exact number."""
    lines = RunPaths(run_dir).metrics(attempt).read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    return {step["step"]: float(step["train_loss"]).hex() for step in steps if "train_loss" in step}


def forget_after(run_dir: Path, step: int) -> None:
    """Put a run back to where only the checkpoints up to `step` were written."""
    for saved in saved_checkpoints(RunPaths(run_dir).checkpoints):
        if saved.step > step:
            delete(saved)


def wait_for_steps(run_dir: Path, num_steps: int) -> None:
    """Return when the first attempt of a run has taken so many steps."""
    metrics = RunPaths(run_dir).own / "metrics-a1.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= num_steps):
        assert time.monotonic() < deadline
        time.sleep(0.01)  # polling another process, not synchronising with it


def scalar_steps(run_dir: Path) -> dict[str, list[int]]:
    """Return all steps by tag that any event file of a run holds, as often as they are there."""
    steps: dict[str, list[int]] = {}
    for path in sorted(run_dir.glob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                steps.setdefault(value.tag, []).append(event.step)
    return steps
