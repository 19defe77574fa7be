"""The time of a step as NeMo's timers give it: reduced over the last steps."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from trainwright.config_exp_manager import StepTimingKwargs

_REDUCTIONS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda times: sum(times) / len(times),
    "sum": sum,
    "min": min,
    "max": max,
    "none": lambda times: times[-1],  # NeMo gives a list, which no logger takes
}


class StepTimes:
    """The last `buffer_size` times and their reduction. Source: NeMo 1.23, nemo/utils/timers.py, NamedTimer."""

    def __init__(self, kwargs: StepTimingKwargs) -> None:
        self._times_s: deque[float] = deque(maxlen=max(1, kwargs.buffer_size))
        self._reduce = _REDUCTIONS[kwargs.reduction]

    def add(self, time_s: float) -> float:
        """Take a step's time in and return the time to log."""
        self._times_s.append(time_s)
        return self._reduce(self._times_s)
