"""What rank 0 puts into results.json of a run of our own backend."""

import platform
from dataclasses import replace
from datetime import datetime
from importlib.metadata import version
from typing import Any, Literal

import yaml

from trainwright.backends.foreign import results_constants
from trainwright.backends.native.callbacks import StepBoundary
from trainwright.backends.native.data import BatchPlan
from trainwright.backends.native.retention import saved_checkpoints
from trainwright.config import RunConfig
from trainwright.dataset.samples import GptData
from trainwright.node.results import Measured, content
from trainwright.node.run_paths import RunPaths
from trainwright.plan import make_plan

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
    as_run = replace(
        make_plan(config),
        world_size=plan.data_parallel_size,
        data_parallel_size=plan.data_parallel_size,
        accumulate_grad_batches=plan.accumulate_grad_batches,
        num_parameters=parameters,
    )
    constants = results_constants(config, as_run)
    constants["data"] = {
        "prefixes": [str(prefix) for prefix in data.prefixes],
        "splits_string": config.data.splits_string,
        "train_tokens": sum(len(tokens) for tokens in data.train_tokens),
        "validation_tokens": sum(len(tokens) for tokens in data.validation_tokens),
    }
    measured = Measured(
        steps=step,
        tokens_per_s=boundary.median_tokens_per_s,
        train_loss=boundary.train_loss,
        val_loss=boundary.last_validation and boundary.last_validation[1],
        best_validation=boundary.best_validation,
        unigram_loss=data.unigram_cross_entropy(config.model.vocab_size),
    )
    return content(
        constants,
        measured,
        run_id=paths.run_dir.name,
        attempt=attempt,
        started=started,
        ended=ended,
        stop_reason=stop_reason,
        stop_message=stop_message,
        versions=versions(),
        git=_git(paths, attempt),
        checkpoints=[
            {"step": saved.step, "path": str(saved.path.relative_to(paths.run_dir)), "metrics": dict(saved.metrics)}
            for saved in saved_checkpoints(paths.checkpoints)
        ],
    )


def _git(paths: RunPaths, attempt: int) -> dict[str, Any] | None:
    """Return commit and dirtiness at submit time, from the record; None without a record or outside a repository."""
    if not paths.record(attempt).is_file():
        return None
    record = yaml.safe_load(paths.record(attempt).read_text(encoding="utf-8"))
    git: dict[str, Any] | None = record.get("git")
    return git
