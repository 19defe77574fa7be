"""Tables for people: coloured and as wide as the terminal, plain and uncut when piped."""

import shutil
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone

from trainwright.node import events

_COLOURS = {
    events.SUCCEEDED: "green",
    events.RUNNING: "cyan",
    events.FAILED: "red",
    events.TIMEOUT: "red",
    events.UNKNOWN: "magenta",
    events.NOT_SUBMITTED: "red",
    events.PREEMPTED: "yellow",
    events.CANCELLED: "yellow",
}


def show(rows: Sequence[Mapping[str, str]]) -> None:
    """Print rows under the names of their columns, in the order of the first row; empty columns are left out."""
    columns = [name for name in rows[0] if any(row[name] for row in rows)] if rows else []
    if sys.stdout.isatty():
        _show_on_terminal(rows, columns)
        return
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in columns}
    for row in ({name: name for name in columns}, *rows) if columns else ():
        print("  ".join(row[name].ljust(widths[name]) for name in columns).rstrip())


def _show_on_terminal(rows: Sequence[Mapping[str, str]], columns: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in columns:
        # A run's id is there to be copied, and its state what one looks for: other columns give way first.
        table.add_column(
            name, no_wrap=True, overflow="ellipsis", min_width=_widest(rows, name) if name in ("run", "state") else 0
        )
    for row in rows:
        table.add_row(*(Text(row[name], style=_COLOURS.get(row[name], "")) for name in columns))
    Console().print(table)


def _widest(rows: Sequence[Mapping[str, str]], name: str) -> int:
    return min(max(len(row[name]) for row in rows), shutil.get_terminal_size().columns)


def age(since: str | None) -> str:
    """Return how long ago an event's time is, in its largest unit: 40s, 12m, 5h, 3d; empty where there is none."""
    if since is None:
        return ""
    then = datetime.strptime(since, "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=timezone.utc)
    seconds = max(0, int((datetime.now(timezone.utc) - then).total_seconds()))
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def progress(step: int | None, max_steps: int | None) -> str:
    """Return `120/500`, with what is known of it."""
    if step is None:
        return ""
    return f"{step}" if max_steps is None else f"{step}/{max_steps}"


def loss(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
