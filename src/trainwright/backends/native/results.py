"""results.json: what a run was and how it ended, written by rank 0 and replaced atomically."""

import json
import os
import platform
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import yaml

from trainwright.backends.native.callbacks import StepBoundary
from trainwright.backends.native.data import BatchPlan
from trainwright.backends.native.retention import saved_checkpoints
from trainwright.backends.native.run_log import finite
from trainwright.config import RunConfig
from trainwright.dataset.samples import GptData
from trainwright.node.run_paths import RunPaths
from trainwright.plan import padded_vocab_size, train_flops_per_token

SCHEMA_VERSION = 1
StopReason = Literal["max_steps", "early_stopping", "preempted", "max_time_per_run", "diverged", "failed"]


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
    stop_reason: StopReason,
    stop_message: str | None,
) -> dict[str, Any]:
    """Return the content of results.json; losses are in nats a token, and null where there is none.

    Written whenever ranks end in an orderly way, failure included; after a kill, that of an earlier attempt stays.
    """
    unigram_loss = data.unigram_cross_entropy(config.model.vocab_size)
    val_loss = boundary.last_validation and boundary.last_validation[1]
    checkpoints = [
        {"step": saved.step, "path": str(saved.path.relative_to(paths.run_dir)), "metrics": dict(saved.metrics)}
        for saved in saved_checkpoints(paths.checkpoints)
    ]
    tokens_per_s = boundary.median_tokens_per_s
    flops_per_token = train_flops_per_token(config.model, config.data.seq_length, padded_vocab_size(config))
    tflops_per_s = None if tokens_per_s is None else tokens_per_s * flops_per_token / plan.data_parallel_size / 1e12
    peak = config.hardware.peak_tflops
    content = {
        "schema_version": SCHEMA_VERSION,
        "run_id": paths.run_dir.name,
        "attempt": attempt,
        "started": _utc(started),
        "ended": _utc(ended),
        "stop_reason": stop_reason,
        "stop_message": stop_message,
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
        "git": _git(paths, attempt),
        "tokens_per_s": tokens_per_s,
        "samples_per_s": None if tokens_per_s is None else tokens_per_s / config.data.seq_length,
        "tflops_per_s": tflops_per_s,  # of one device
        "mfu": None if tflops_per_s is None or peak is None else tflops_per_s / peak,
        "train_loss": boundary.train_loss,
        "val_loss": val_loss,
        "best_val_loss": _named(boundary.best_validation),
        "unigram_loss": unigram_loss,
        "margin": None if unigram_loss is None or val_loss is None else unigram_loss - val_loss,
        "checkpoints": checkpoints,
    }
    return dict(finite(content))


def read_results(path: Path) -> dict[str, Any] | None:
    """Return what an earlier attempt wrote; None where none did."""
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return content


def write_results(path: Path, content: dict[str, Any]) -> None:
    """Replace `path`; a reader sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".tmp")
    with draft.open("w", encoding="utf-8") as stream:
        json.dump(content, stream, indent=1, allow_nan=False)
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(path)


def _git(paths: RunPaths, attempt: int) -> dict[str, Any] | None:
    """Return commit and dirtiness at submit time, from the record; None without a record or outside a repository."""
    if not paths.record(attempt).is_file():
        return None
    record = yaml.safe_load(paths.record(attempt).read_text(encoding="utf-8"))
    git: dict[str, Any] | None = record.get("git")
    return git


def _utc(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def _named(validation: tuple[int, float] | None) -> dict[str, Any] | None:
    return None if validation is None else {"step": validation[0], "val_loss": validation[1]}
