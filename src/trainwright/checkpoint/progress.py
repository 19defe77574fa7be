"""What a user sees while a conversion runs: a bar with bytes and rate on a terminal, a few lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from trainwright.checkpoint.convert import ReportBytes

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_LINES = 20  # where there is no terminal: one for each twentieth


@contextlib.contextmanager
def shown(title: str) -> Iterator[ReportBytes]:
    """Yield what a conversion reports its bytes to; all is shown on standard error."""
    if not sys.stderr.isatty():
        yield _lines(title)
        return
    columns = (TextColumn(title), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(title: str) -> ReportBytes:
    started, shown_twentieths = time.perf_counter(), 0

    def report(done: int, total: int) -> None:
        nonlocal shown_twentieths
        twentieths = done * _LINES // total
        unit, size = next(of for of in _UNITS if total >= of[1] or of == _UNITS[-1])
        if twentieths > shown_twentieths:
            shown_twentieths = twentieths
            rate = done / 2**20 / (time.perf_counter() - started)
            print(
                f"{title}: {done / size:.2f} of {total / size:.2f} {unit}, {rate:.0f} MiB/s",
                file=sys.stderr,
                flush=True,
            )

    return report
