"""What the options of `trainwright data` mean, and what its commands share: errors, tokenizers, runs, progress."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.errors import UserError

if TYPE_CHECKING:
    from trainwright.config import RunConfig
    from trainwright.dataset.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Inspected:
    """What was found out about one file, or one data set."""

    content: dict[str, Any]  # as JSON
    exit_code: int
    show: Callable[[], None]


def guarded(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Run a command and return its exit code; what is a user's to mend is printed as errors."""
    try:
        code = run(options)
        sys.stdout.flush()
    except UserError as error:
        for line in str(error).splitlines():
            print(line if line.startswith((" ", "error ")) else f"error: {line}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # `| head` has seen enough; Python would complain once more when it closes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        print("error: numpy is not installed: pip install 'trainwright[native]'", file=sys.stderr)
        return UserError.exit_code
    return code


def compose_run(overrides: Sequence[str]) -> "RunConfig":
    """Return the run that overrides compose. Raises UserError where they do not."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from trainwright.config import RunConfig
    from trainwright.places import CONF

    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return RunConfig.from_hydra(compose("config", list(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(str(error)) from error


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


def count(text: str) -> int:
    """Return a number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return int(text)
