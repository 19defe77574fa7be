"""results.json: what a run was and how it ended, written by rank 0 and replaced atomically."""

import json
import os
import platform
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trainwright.backends.native.callbacks import StepBoundary
from trainwright.backends.native.data import BatchPlan
from trainwright.backends.native.retention import saved_checkpoints
from trainwright.backends.native.run_log import finite
from trainwright.config import RunConfig
from trainwright.dataset.samples import GptData
from trainwright.node.run_paths import RunPaths

SCHEMA_VERSION = 1


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    packages = ("torch", "lightning", "transformers", "trainwright")
    return {"python": platform.python_version(), **{package: version(package) for package in packages}}


def collect_results(
    *,
    config: RunConfig,
    paths: RunPaths,
    plan: BatchPlan,
    data: GptData,
    boundary: StepBoundary,
    parameters: int,
    step: int,
    attempt: int,
    started: datetime,
    ended: datetime,
) -> dict[str, Any]:
    """Return the content of results.json; losses are in nats a token, and null where there is none."""
    unigram_loss = data.unigram_cross_entropy(config.model.vocab_size)
    val_loss = boundary.last_validation and boundary.last_validation[1]
    checkpoints = [
        {"step": saved.step, "path": str(saved.path.relative_to(paths.run_dir)), "metrics": dict(saved.metrics)}
        for saved in saved_checkpoints(paths.checkpoints)
    ]
    content = {
        "schema_version": SCHEMA_VERSION,
        "run_id": paths.run_dir.name,
        "attempt": attempt,
        "started": _utc(started),
        "ended": _utc(ended),
        "wall_s": (ended - started).total_seconds(),  # of this attempt, without the start of Python
        "model": {"name": config.model.name, "parameters": parameters},
        "batch": {
            "micro_batch_size": plan.micro_batch_size,
            "global_batch_size": plan.global_batch_size,
            "accumulate_grad_batches": plan.accumulate_grad_batches,
            "world_size": plan.data_parallel_size,
            "data_parallel_size": plan.data_parallel_size,
        },
        "steps": step,
        "max_steps": config.trainer.max_steps,
        "consumed_samples": step * plan.global_batch_size,
        "consumed_tokens": step * plan.global_batch_size * config.data.seq_length,
        "data": {
            "prefixes": [str(prefix) for prefix in data.prefixes],
            "splits_string": config.data.splits_string,
            "train_tokens": sum(len(tokens) for tokens in data.train_tokens),
            "validation_tokens": sum(len(tokens) for tokens in data.validation_tokens),
        },
        "versions": versions(),
        "tokens_per_s": boundary.median_tokens_per_s,
        "train_loss": boundary.train_loss,
        "val_loss": val_loss,
        "best_val_loss": _named(boundary.best_validation),
        "unigram_loss": unigram_loss,
        "margin": None if unigram_loss is None or val_loss is None else unigram_loss - val_loss,
        "checkpoints": checkpoints,
    }
    return dict(finite(content))


def write_results(path: Path, content: dict[str, Any]) -> None:
    """Replace `path`; a reader sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".tmp")
    with draft.open("w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=1, allow_nan=False)
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(path)


def _utc(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def _named(validation: tuple[int, float] | None) -> dict[str, Any] | None:
    return None if validation is None else {"step": validation[0], "val_loss": validation[1]}
