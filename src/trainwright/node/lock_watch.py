"""Keeps a run from waiting for locks in the compiler's cache that nobody will ever release."""

from __future__ import annotations

from pathlib import Path

from . import neuron_cache
from .compile_gate import CompileGate
from .neuron_cache import Clearing

WAIT_S = 600.0  # a graph that has waited so long for a lock gets it looked at, and again after as long


class LockWatch:
    """The locks of a cache as one run meets them, on its node 0. Methods return what is to be said, line by line."""

    def __init__(self, cache: Path, run_dir: Path, num_nodes: int) -> None:
        self._cache, self._run_dir, self._num_nodes = cache, str(run_dir), num_nodes
        self._next_look_s = 0.0

    def before_start(self) -> list[str]:
        """Clear stale locks. Other nodes of the run may use the cache already but must not have started to compile."""
        return _told(neuron_cache.clear_stale_locks(self._cache, own=self._run_dir))

    def look(self, gate: CompileGate, now_s: float) -> list[str]:
        """Clear the locks that the compiler has waited for too long, if nobody is behind them. Cheap to ask often."""
        waiting = gate.waiting(now_s, for_s=WAIT_S)
        if not waiting or now_s < self._next_look_s:
            return []
        self._next_look_s = now_s + WAIT_S
        done = neuron_cache.clear_stale_locks(
            self._cache,
            own=self._run_dir if self._num_nodes == 1 else None,  # what another node of ours does is not seen from here
            only=None if "" in waiting else waiting,
            compiles_here=True,
        )
        graphs = ", ".join(name for name in waiting if name) or "a graph"
        return [f"the compiler has waited {WAIT_S:.0f} s for the lock of {graphs}", *_told(done)]


def _told(done: Clearing) -> list[str]:
    cleared = [f"cleared the stale lock {lock}" for lock in done.cleared]
    return cleared + [f"left the lock {lock}: {why}" for lock, why in done.kept.items()]
