"""What the options of `trainwright data` mean, and what its commands share: tokenizers, progress."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainwright.config import RunConfig
    from trainwright.dataset.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Inspected:
    """What was found out about one file, or one data set."""

    content: dict[str, Any]  # as JSON
    exit_code: int
    show: Callable[[], None]


def tokenizer_of(options: argparse.Namespace, config: "RunConfig | None") -> "Tokenizer":
    """Return the tokenizer of --tokenizer, else of the run. Raises UserError for one that cannot be had."""
    from trainwright.dataset.tokenizer import load_tokenizer

    if options.tokenizer is not None:
        return load_tokenizer(*tokenizer_parts(options.tokenizer))
    assert config is not None
    fetched = config.backend.model_dir if config.backend.kind == "nxdt" else ""
    if os.path.isfile(os.path.join(fetched, "tokenizer.json")):  # what NxDT will read
        return load_tokenizer("huggingface", fetched)
    return load_tokenizer(config.data.tokenizer.type, config.data.tokenizer.name)


def tokenizer_parts(name: str) -> tuple[str, str | None]:
    """Return data.tokenizer.type and data.tokenizer.name of what --tokenizer names."""
    return ("gpt2_bpe", None) if name == "gpt2_bpe" else ("huggingface", name)


@contextlib.contextmanager
def reading_shown(path: Path) -> Iterator[Callable[[int], None]]:
    """Yield what hears how many bytes are read; a bar on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(path.name), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    size = path.stat().st_size if path.is_file() else None
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(path.name, total=size)
        yield lambda done: bar.update(task, completed=done)


def number_text(value: float) -> str:
    """Return a figure as tables show it."""
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
