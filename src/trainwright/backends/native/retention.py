"""Which checkpoints a run has, which one a resume takes and which ones are kept: read from commits, never from names.

The newest is always kept: it is what a resume takes, so there is no separate "-last" copy, whatever `save_last` says.
Besides, the best `save_top_k` by the monitored metric stay; one without that metric, or with a NaN, is not among them.
"""

import logging
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from trainwright.config_exp_manager import CheckpointCallbackParams
from trainwright.errors import UserError
from trainwright.node import commit

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SavedCheckpoint:
    """A complete checkpoint, as its commit describes it."""

    path: Path
    step: int
    consumed_samples: int
    world_size: int
    sample_requests: tuple[tuple[int, int], ...]  # see data.open_samples
    metrics: Mapping[str, float]  # as measured at this step; what was not measured is absent


def saved_checkpoints(checkpoints: Path) -> list[SavedCheckpoint]:
    """Return the complete checkpoints below `checkpoints`, oldest step first."""
    committed = [(path, commit.read_commit(path)) for path in _directories(checkpoints)]
    return sorted(
        (_saved(path, metadata) for path, metadata in committed if metadata is not None), key=lambda saved: saved.step
    )


def choose_resume(checkpoints: Path, *, may_be_none: bool, may_ignore_damaged: bool = False) -> SavedCheckpoint | None:
    """Return the newest intact checkpoint and remove what was never committed; None to start at step 0.

    Before a start at step 0 nothing is removed. Raises UserError when checkpoints exist but none is intact, unless
    `may_ignore_damaged`, and when there is none though `may_be_none` is false.
    """
    for saved in reversed(saved_checkpoints(checkpoints)):
        problems = commit.verify(saved.path)
        if not problems:
            _sweep(checkpoints)
            return saved
        log.warning("%s is damaged (%s); trying the one before", saved.path, problems[0])
    unusable = {path: commit.verify(path) for path in _directories(checkpoints)}
    reasons = "\n".join(f"  {path.name}: {'; '.join(problems)}" for path, problems in unusable.items())
    is_damaged = any(commit.was_committed(path) for path in unusable)
    if is_damaged and not may_ignore_damaged:
        raise UserError(
            f"no checkpoint in {checkpoints} can be resumed from:\n{reasons}\n"
            "repair one, set exp_manager.resume_ignore_damaged=true to start this run at step 0, or start a new run "
            "by leaving run_id out"
        )
    if unusable:
        log.warning("starting at step 0; these in %s cannot be resumed from and stay:\n%s", checkpoints, reasons)
    if not may_be_none and not is_damaged:
        raise UserError(
            f"exp_manager.resume_ignore_no_checkpoint=false, but {checkpoints} holds no checkpoint; "
            "set it to true to start at step 0"
        )
    return None


def checkpoint_name(template: str, values: Mapping[str, Any]) -> str:
    """Fill in `template` as NeMo does: `{step}` becomes `step=50`; only `{name}` stands without its key.

    A metric that `values` lacks, since it was not measured at this step, is written as nan.
    """
    parts = []
    for literal, key, spec, _ in Formatter().parse(template):
        parts.append(literal)
        if key is not None:
            value = format(values.get(key, math.nan), spec or "")
            parts.append(value if key == "name" else f"{key}={value}")
    return "".join(parts)


def unused_path(path: Path) -> Path:
    """Return `path`, or where a damaged checkpoint has that name, the first free `path-vN`: nothing is overwritten."""
    version, free = 0, path
    while free.exists():
        version += 1
        free = path.with_name(f"{path.name}-v{version}")
    return free


def superseded(saved: Sequence[SavedCheckpoint], params: CheckpointCallbackParams) -> list[SavedCheckpoint]:
    """Return those of `saved` to delete, oldest first. Of equal metrics the newer one counts as better."""
    if params.save_top_k == -1:
        return []
    sign = 1 if params.mode == "min" else -1
    measured = [(value, one) for one in saved if (value := _monitored(one, params.monitor)) is not None]
    ranked = sorted(measured, key=lambda pair: (sign * pair[0], -pair[1].step))
    kept = {one.path for _, one in ranked[: params.save_top_k]}
    kept |= {one.path for one in saved if one.step == max(other.step for other in saved)}
    return [one for one in saved if one.path not in kept]


def delete(saved: SavedCheckpoint) -> None:
    """Remove a checkpoint, its commit first: when interrupted, what is left counts as never saved."""
    (saved.path / commit.COMMIT_FILE).unlink()
    shutil.rmtree(saved.path)


def _directories(checkpoints: Path) -> list[Path]:
    return sorted(path for path in checkpoints.iterdir() if path.is_dir()) if checkpoints.is_dir() else []


def _saved(path: Path, metadata: Mapping[str, Any]) -> SavedCheckpoint:
    return SavedCheckpoint(
        path=path,
        step=metadata["step"],
        consumed_samples=metadata["consumed_samples"],
        world_size=metadata["world_size"],
        sample_requests=tuple((train, validation) for train, validation in metadata["sample_requests"]),
        metrics=metadata["metrics"],
    )


def _monitored(saved: SavedCheckpoint, monitor: str) -> float | None:
    value = saved.step if monitor == "step" else saved.metrics.get(monitor)
    return None if value is None or math.isnan(value) else float(value)


def _sweep(checkpoints: Path) -> None:
    for removed in commit.sweep(checkpoints):
        log.warning("removed %s: an interrupted run left it without a commit", removed)
