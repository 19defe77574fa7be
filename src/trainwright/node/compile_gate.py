"""Decides from what neuron_parallel_compile prints whether all graphs are compiled. Its exit code alone tells nothing.

Sources: the third article, step "AOT compile"; Neuron documentation, neuron_parallel_compile. The end of a good log:

    2025-06-25 05:58:16.000194: 58408 INFO ||NEURON_PARALLEL_COMPILE||: Total graphs: 18
    2025-06-25 05:58:16.000194: 58408 INFO ||NEURON_PARALLEL_COMPILE||: Total successful compilations: 18
    2025-06-25 05:58:16.000194: 58408 INFO ||NEURON_PARALLEL_COMPILE||: Total failed compilations: 0
"""

from __future__ import annotations

import re
from typing import Callable

from .neuron_causes import CauseFinder

_TOTAL = re.compile(r"\|\|(?:NEURON_)?PARALLEL_COMPILE\|\|: Total (graphs|failed compilations): (\d+)")
# A log level or an outcry stands alone. What has more letters, digits or underscores around it is a name
# (HYDRA_FULL_ERROR=1, SOME_ERROR_CODE); in quotes it is a key or value of JSON or an argument; behind =, "level " or
# "logging." a setting. "[ERROR]" and "SG-ERROR:" count.
_ERROR = re.compile(r"(?<![\w=\"'])(?<!\w\.)(?<!level )ERROR(?![\w=\"'])")
_MODULE = re.compile(r"MODULE_[0-9A-Za-z]+(?:\+[0-9A-Za-z]+)?")
_CACHED = re.compile(r"(neuronxcc-[^/\s]+/MODULE_[^/\s]+)/model\.")
_REPORTED = re.compile(r'"(\S*MODULE_[^"]*)": \{')
_STATUS = re.compile(r'"status": (true|false)')
_PROGRESS = re.compile(
    r"remaining items are (\d+), (?:locked are (\d+), )?failed are (\d+), done are (\d+), total is (\d+)"
)
_FOUND = "Using a cached neff"
_WAITS = "Another process must be compiling"
_SILENT_S = 180.0  # a wait is told once a minute: one that was not told for so long is over
_LINE_LENGTH = 400  # of a line that is quoted: compiler command lines are longer than a table cell takes


class CompileGate:
    """Reads the output of one node's compile stage line by line."""

    def __init__(self, cache: str) -> None:
        self.causes = CauseFinder(cache)
        self.graphs: set[str] = set()  # neuronxcc-VERSION/MODULE_x that the training script asked for
        self._found: set[str] = set()  # those of them that were compiled before
        self._totals: dict[str, int] = {}
        self._errors = 0
        self._first_error: str | None = None
        self._in_report: str | None = None  # the graph whose status the report tells next
        self._first_failed: str | None = None
        self._waiting: dict[str, tuple[float, float]] = {}  # module -> first and last time that it was waited for, s
        self._progress: tuple[int, ...] | None = None

    def feed(self, line: str, now_s: float) -> None:
        """Look at one line, without its end, that was printed at `now_s` (any clock that only goes on)."""
        self.causes.feed(line)
        if _ERROR.search(line):
            self._errors += 1
            self._first_error = self._first_error or line.strip()
        for what, number in _TOTAL.findall(line):
            self._totals[what] = self._totals.get(what, 0) + int(number)
        self._read_report(line)
        named = _CACHED.findall(line)
        self.graphs.update(named)
        if _FOUND in line:
            self._found.update(named)
        progress = _PROGRESS.search(line)
        if progress:
            self._progress = tuple(int(number or 0) for number in progress.groups())
        if _WAITS in line:
            for module in _MODULE.findall(line) or [""]:
                first, last = self._waiting.get(module, (now_s, now_s))
                self._waiting[module] = (first if now_s - last < _SILENT_S else now_s, now_s)

    def progress(self) -> str | None:
        """Return how far the compiler is; None: it has not begun."""
        if self._progress is None:
            return None
        _, locked, failed, done, total = self._progress
        waiting = f", {locked} locked" if locked else ""
        return f"{done} of {total} graphs done{waiting}, {failed} failed"

    def waiting(self, now_s: float, *, for_s: float) -> list[str]:
        """Return the modules that have been waited for since `for_s` and still are; "" where a line names none."""
        return sorted(
            module
            for module, (first, last) in self._waiting.items()
            if now_s - first >= for_s and now_s - last < _SILENT_S
        )

    def problem(self, exit_code: int, is_done: Callable[[str], bool]) -> str | None:
        """Return in a line why the stage failed, with the first bad graph or line and a known cause; None: it did not.

        `is_done` tells of a graph whether the cache holds it: a node whose graphs were all compiled before, or by
        another node, compiles 0.
        """
        complaints = self._complaints(is_done)
        if exit_code and not complaints:
            complaints = ["it printed no error"]
        if not complaints:
            return None
        if exit_code:
            complaints.append(f"exit code {exit_code}")
        first = self._first_failed or self._first_error or self.causes.fatal_line
        if first is not None:
            complaints.append(f"first: {shortened(first)}")
        return "; ".join(complaints + [str(self.causes)] * bool(str(self.causes)))

    def _complaints(self, is_done: Callable[[str], bool]) -> list[str]:
        total, failed = self._totals.get("graphs"), self._totals.get("failed compilations")
        complaints = []
        if failed:
            complaints.append(f"{failed} of {total} graphs failed to compile")
        if self._first_failed is not None and not failed:
            complaints.append("the compilation report tells of a failed graph")
        if self._errors:
            complaints.append(f"lines with ERROR: {self._errors}")
        if self.causes.fatal_line is not None and not self._errors and not failed:
            complaints.append("graphs are missing")
        if complaints:
            return complaints
        if failed is None or total is None:
            return ["neuron_parallel_compile did not come to its end: no line 'Total failed compilations'"]
        if total == 0 and not (self.graphs and all(graph in self._found or is_done(graph) for graph in self.graphs)):
            return ["Total graphs: 0: the training script made no graph, so train would have to compile them all"]
        return []

    def _read_report(self, line: str) -> None:
        """Follow the JSON report, "PATH": {"status": false, ...}, which may have a log's prefix on each line."""
        graph = _REPORTED.search(line)
        if graph is not None:
            self._in_report = graph.group(1)
        status = _STATUS.search(line)
        if status is not None and self._in_report is not None:
            if status.group(1) == "false" and self._first_failed is None:
                self._first_failed = self._in_report
            self._in_report = None


def shortened(line: str) -> str:
    """Return a line as it can be quoted in a table; of a long one the ends, where cause and path stand."""
    text = " ".join(line.split())
    half = _LINE_LENGTH // 2
    return text if len(text) <= _LINE_LENGTH else f"{text[:half]} ... {text[-half:]}"
