"""What lines of Neuron's compiler and runtime mean, and what to do about it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Pattern


@dataclass(frozen=True)
class Cause:
    """A known reason why a stage on Neuron devices fails."""

    name: str
    pattern: Pattern[str]
    meaning: str  # {0}: what the pattern's first group found
    remedy: str  # {cache}: the compiler's cache
    is_weak: bool = False  # a line that good runs print too, or that only follows from another cause
    fails_compile: bool = False  # graphs are missing whatever else the compile stage prints


# Sources: the third article's list of failed compilations; aws-neuron-sdk issues 713, 1014, 1097 and 1299; the Neuron
# documentation of neuron_parallel_compile.
CAUSES = (
    Cause(
        "device-memory",
        re.compile(r"Failed to allocate (\d+) bytes on DEVICE"),
        "the memory of a NeuronCore is full ({0} bytes more were asked for)",
        "raise parallelism.tensor_model_parallel_size, recompute more activations or shorten data.seq_length; "
        "`neuron-ls` shows whether another process holds memory",
    ),
    Cause(
        "collectives-init",
        re.compile(r"ncclInitComm|neuronInitComm"),
        "the NeuronCores could not set up their collectives",
        "see that no other process holds cores (`neuron-ls`), that the EFA devices and the FI_ variables of "
        "hardware.env are there on several nodes, and that the ports are reserved (findings above)",
    ),
    Cause(
        "staging",
        re.compile(r"NMGR:.*Failed to stage graph"),
        "a compiled graph could not be loaded onto a NeuronCore",
        "see that no other process holds cores (`neuron-ls`) and that driver, runtime and compiler are of one SDK; "
        "then compile anew: `trainwright neuron-cache clean --cache {cache}`",
    ),
    Cause(
        "cached-failure",
        re.compile(r"Got a cached failed neff(?: at (\S*[^.\s]))?"),
        "the cache remembers that this graph failed, so it was not compiled again",
        "`trainwright neuron-cache clean --failed --cache {cache}` forgets the failures and keeps the rest; "
        "--retry_failed_compilation in backend.compiler_flags does so on each start",
        fails_compile=True,
    ),
    Cause(
        "host-memory",
        re.compile(r"\[F137\]|neuronx-cc was forcibly killed"),
        "the compiler was killed, most likely since the node's own memory was full",
        "start the stage again (what is compiled stays in the cache); if it repeats, see what else runs on the node, "
        "or take a machine with more memory",
    ),
    Cause(
        "cache-file",
        re.compile(r"FileNotFoundError"),  # counts in a traceback through libneuronxla only
        "the compiler lost a file of its cache, which another process moved or removed",
        "start the stage again (what is compiled stays in the cache); if it repeats, see that no other job uses {cache}"
        " at the same time and clean it: `trainwright neuron-cache clean --cache {cache}`",
        fails_compile=True,
    ),
    Cause(
        "lost-artifact",
        re.compile(r"path should be string, bytes, os\.PathLike or integer, not NoneType"),
        "the compiler finished a graph but its file never reached the cache",
        "start the stage again: what is compiled stays in the cache",
        fails_compile=True,
    ),
    Cause(
        "collectives-timeout",
        re.compile(r"Timeout waiting for RX"),
        "ranks waited in vain for others",
        "look for the rank that ended or still compiles; on several nodes see that EFA is up (findings above) and "
        "that the compile stage ran before train",
        is_weak=True,
    ),
    Cause(
        "stale-lock",
        re.compile(r"Another process must be compiling"),
        "a graph waits for a lock in the cache that its owner left behind",
        "with no other job on this cache: `trainwright neuron-cache clear-locks --cache {cache}`",
        is_weak=True,
    ),
    Cause(
        "compiler",
        re.compile(r"Failed compilation with|Compilation failed for"),
        "the compiler does not manage this graph",
        "read its own message above and model.log beside the graph in {cache}; another model or version of the SDK, "
        "--optlevel or shapes change the graph",
        is_weak=True,
    ),
)
_TRACEBACK_LINES = 40  # of a Python traceback that leads to its exception, at most


class CauseFinder:
    """Reads the lines of a stage in order and remembers the first known cause of a failure."""

    def __init__(self, cache: str) -> None:
        self._cache = cache
        self._strong: tuple[Cause, str] | None = None
        self._weak: tuple[Cause, str] | None = None
        self._since_libneuronxla = _TRACEBACK_LINES
        self.fatal_line: str | None = None  # the first line that fails a compile stage whatever follows

    def feed(self, line: str) -> None:
        """Look at one line."""
        in_libneuronxla = "libneuronxla" in line or "parallel_compile" in line
        self._since_libneuronxla = 0 if in_libneuronxla else self._since_libneuronxla + 1
        for cause in CAUSES:
            match = cause.pattern.search(line)
            if match is None or (cause.name == "cache-file" and self._since_libneuronxla >= _TRACEBACK_LINES):
                continue
            said = cause.meaning.format(match.group(1)) if match.groups() else cause.meaning
            if cause.fails_compile and self.fatal_line is None:
                self.fatal_line = line
            if cause.is_weak:
                self._weak = self._weak or (cause, said)
            else:
                self._strong = self._strong or (cause, said)

    @property
    def name(self) -> str | None:
        """The name of the first cause; None: no line told of one."""
        found = self._strong or self._weak
        return found[0].name if found else None

    def __str__(self) -> str:
        """Return the first cause with its remedy; empty if no line told of one."""
        found = self._strong or self._weak
        if found is None:
            return ""
        cause, said = found
        return f"known cause ({cause.name}): {said}; {cause.remedy.format(cache=self._cache)}"
