"""Several runs side by side: the keys in which their configs differ, and what came of them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainwright import registry
from trainwright.follow.overview import Overview

_OF_ONE_RUN = frozenset({"run_id", "exp_manager.version", "exp_manager.explicit_log_dir"})


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a config by key path; a list is a leaf."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            leaves.update(flatten(value, f"{prefix}{key}."))
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def recorded_config(run: Path) -> dict[str, Any]:
    """Return the leaves of the config of a run's newest attempt."""
    return flatten(registry.read_record(run, registry.last_attempt(run))["config"])


def differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys that do not have the same value in all configs; a run's own name is no difference."""
    keys = dict.fromkeys(key for config in configs for key in config if key not in _OF_ONE_RUN)
    return [key for key in keys if any(_spelled(config, key) != _spelled(configs[0], key) for config in configs[1:])]


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return `key: old -> new` for each difference of two configs; a key that one lacks reads as absent."""
    return [f"{key}: {_spelled(old, key)} -> {_spelled(new, key)}" for key in differing([old, new])]


def side_by_side(runs: Sequence[Overview]) -> list[dict[str, Any]]:
    """Return a row for each run: its differing keys under `config`, its state, and its metrics."""
    configs = [recorded_config(run.run_dir) for run in runs]
    keys = differing(configs) if configs else []
    return [
        {
            "run_id": run.run_id,
            "config": {key: config.get(key) for key in keys},
            "state": run.state.state,
            "step": run.metrics.step,
            "max_steps": run.metrics.max_steps,
            "metrics": _measured(run),
        }
        for run, config in zip(runs, configs, strict=True)
    ]


def as_text(value: Any) -> str:
    """Return a value as a table shows it."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _measured(run: Overview) -> dict[str, Any]:
    results = registry.results(run.run_dir) or {}
    best = results.get("best_val_loss") or {}
    return {
        "train_loss": run.metrics.train_loss,
        "val_loss": run.metrics.val_loss,
        "best_val_loss": best.get("val_loss"),
        "tokens_per_s": results.get("tokens_per_s"),
        "wall_s": results.get("wall_s"),
    }


def _spelled(config: Mapping[str, Any], key: str) -> str:
    return json.dumps(config[key], ensure_ascii=False) if key in config else "absent"
