"""Ends a run when validation no longer improves. Source: lightning 2.6, pytorch/callbacks/early_stopping.py."""

import math
from collections.abc import Mapping
from typing import Any

from trainwright.config_exp_manager import EarlyStoppingParams


class EarlyStopping:
    """Looks at the monitored metric after each validation. Its state travels with the checkpoints."""

    def __init__(self, params: EarlyStoppingParams) -> None:
        self._params = params
        self._best = math.inf if params.mode == "min" else -math.inf
        self._last: float | None = None  # None: nothing looked at so far
        self._without_improvement = 0

    def look(self, metrics: Mapping[str, float]) -> None:
        """Take in the metrics of a validation."""
        self._last = metrics[self._params.monitor]
        margin = -self._params.min_delta if self._params.mode == "min" else self._params.min_delta
        if self._is_better(self._last - margin, self._best):
            if self._params.verbose:
                print(f"{self._params.monitor} improved to {self._last:.4f}", flush=True)
            self._best, self._without_improvement = self._last, 0
        else:
            self._without_improvement += 1

    @property
    def reason(self) -> str | None:
        """Why the run is to end, by the parameters of this attempt; None to go on."""
        monitor, last, params = self._params.monitor, self._last, self._params
        if last is None:
            return None
        if params.check_finite and not math.isfinite(last):
            return f"{monitor} is {last}"
        good, bad = params.stopping_threshold, params.divergence_threshold
        if good is not None and self._is_better(last, good):
            return f"{monitor} {last:.4f} is better than stopping_threshold={good}"
        if bad is not None and self._is_better(bad, last):
            return f"{monitor} {last:.4f} is worse than divergence_threshold={bad}"
        if self._without_improvement >= params.patience:
            return f"{monitor} did not improve on {self._best:.4f} in {self._without_improvement} validations"
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"best": self._best, "last": self._last, "without_improvement": self._without_improvement}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._best, self._last = state["best"], state["last"]
        self._without_improvement = state["without_improvement"]

    def _is_better(self, value: float, other: float) -> bool:
        return value < other if self._params.mode == "min" else value > other
