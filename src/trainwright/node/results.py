"""results.json: what a run was and how it ended. Every backend's has this content, wherever it is written."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Mapping, Sequence

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Measured:
    """What an attempt measured. Losses are nats a token; None: nothing was measured."""

    steps: int
    tokens_per_s: float | None  # of the whole world
    train_loss: float | None
    val_loss: float | None
    best_validation: tuple[int, float] | None  # step and loss
    unigram_loss: float | None = None


def content(
    constants: Mapping[str, Any],
    measured: Measured,
    *,
    run_id: str,
    attempt: int,
    started: datetime,
    ended: datetime,
    stop_reason: str | None,
    stop_message: str | None,
    versions: Mapping[str, str],
    git: Mapping[str, Any] | None,
    checkpoints: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return the content of results.json; null stands where there is no value.

    `constants` is what `backends.foreign.results_constants` made of the config.
    """
    batch, tokens_per_s = constants["batch"], measured.tokens_per_s
    consumed_samples = measured.steps * batch["global_batch_size"]
    tflops_per_s, mfu = speed(constants, tokens_per_s)
    val_loss, best = measured.val_loss, measured.best_validation
    unigram_loss = measured.unigram_loss
    tree = {
        "schema_version": SCHEMA_VERSION,
        "run_id": run_id,
        "attempt": attempt,
        "started": _utc(started),
        "ended": _utc(ended),
        "stop_reason": stop_reason,
        "stop_message": stop_message,
        "wall_s": (ended - started).total_seconds(),  # of this attempt
        "model": constants["model"],
        "batch": batch,
        "steps": measured.steps,
        "max_steps": constants["max_steps"],
        "consumed_samples": consumed_samples,
        "consumed_tokens": consumed_samples * constants["seq_length"],
        "data": constants["data"],
        "versions": versions,
        "git": git,
        "tokens_per_s": tokens_per_s,
        "samples_per_s": None if tokens_per_s is None else tokens_per_s / constants["seq_length"],
        "tflops_per_s": tflops_per_s,  # of one device
        "mfu": mfu,
        "train_loss": measured.train_loss,
        "val_loss": val_loss,
        "best_val_loss": None if best is None else {"step": best[0], "val_loss": best[1]},
        "unigram_loss": unigram_loss,
        "margin": None if unigram_loss is None or val_loss is None else unigram_loss - val_loss,
        "checkpoints": checkpoints,
    }
    return dict(finite(tree))


def speed(constants: Mapping[str, Any], tokens_per_s: float | None) -> tuple[float | None, float | None]:
    """Return TFLOP/s of one device, counted by the model's arithmetic, and its part of the device's peak."""
    if tokens_per_s is None:
        return None, None
    tflops_per_s = tokens_per_s * constants["flops_per_token"] / constants["batch"]["world_size"] / 1e12
    peak = constants["peak_tflops"]
    return tflops_per_s, None if peak is None else tflops_per_s / peak


def read(path: Path) -> dict[str, Any] | None:
    """Return what an earlier attempt wrote; None where none did."""
    try:
        tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return tree


def write(path: Path, tree: Mapping[str, Any], *, by_rename: bool = True) -> None:
    """Replace `path`; a reader sees the old content or the new, never a part.

    A mounted bucket, which does not rename, shows a file when it is closed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".tmp") if by_rename else path
    with draft.open("w", encoding="utf-8") as stream:
        json.dump(tree, stream, indent=1, allow_nan=False)
        stream.flush()
        os.fsync(stream.fileno())
    if by_rename:
        draft.replace(path)


def finite(value: Any) -> Any:
    """Return `value` with NaN and infinities as None, which JSON has no numbers for."""
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _utc(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")
