"""`trainwright data build`: texts become a Megatron data set."""

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.cli_command import count, guarded
from trainwright.cli_data_options import tokenizer_parts
from trainwright.errors import UserError

if TYPE_CHECKING:
    from trainwright.dataset.build_prefix import BuiltPair
    from trainwright.dataset.part_run import BuildProgress

SCHEMA_VERSION = 1
_LINES = 20  # where there is no terminal: one for each twentieth
_DOCUMENTS = ("file", "line", "blank-line", "form-feed")  # as dataset.text_files has them; that needs numpy


def add_to(kinds: Any) -> None:
    """Add the command to those of `trainwright data`."""
    told = "make a Megatron data set, PREFIX.bin and PREFIX.idx, of text and jsonl files"
    build = kinds.add_parser(
        "build",
        help=told,
        description=f"{told}. An interrupted build goes on when it is started again. Exit code 0: built, or it was "
        "there; 2: files, options or the disk are at fault.",
    )
    build.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help=".jsonl with a text in each line's object, or .txt; .gz, .xz and .zst of both; a path or a URL",
    )
    build.add_argument("--output", type=Path, required=True, metavar="PREFIX", help="path without an ending")
    build.add_argument(
        "--tokenizer", required=True, metavar="NAME", help="gpt2_bpe, a directory with tokenizer.json, or a hub id"
    )
    build.add_argument("--json-key", default="text", metavar="NAME", help="field of an object with the text (text)")
    build.add_argument(
        "--document", choices=_DOCUMENTS, default="file", help="what a document of .txt is, or ends with (file)"
    )
    build.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end each document with the tokenizer's end-of-document token (the default)",
    )
    build.add_argument(
        "--sequence-tokens",
        type=count,
        metavar="N",
        help="cut documents into sequences of N tokens, by which Megatron splits and shuffles (default: uncut)",
    )
    build.add_argument("--workers", type=count, metavar="N", help="processes that tokenize (default: the cores)")
    build.add_argument("--skip-bad", action="store_true", help="leave out documents with faults, and count them")
    build.add_argument("--overwrite", action="store_true", help="replace another data set at PREFIX")
    build.add_argument("--json", action="store_true", help="print JSON")
    build.set_defaults(run=lambda options: sys.exit(guarded(_build, options, extra="native")))


def _build(options: argparse.Namespace) -> int:
    from trainwright.dataset.build_prefix import build_prefix
    from trainwright.dataset.parts import PairRecipe
    from trainwright.dataset.text_files import find_text_files

    if "://" in str(options.output) or ":/" in str(options.output):
        raise UserError(f"--output {options.output}: a data set is built on a disk; copy it to its bucket afterwards")
    kind, name = tokenizer_parts(options.tokenizer)
    recipe = PairRecipe(
        tokenizer_type=kind,
        tokenizer_name=name,
        json_key=options.json_key,
        append_eod=options.append_eod,
        sequence_tokens=options.sequence_tokens,
    )
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # --workers says how many cores
    files = find_text_files(options.inputs, options.document)
    started = time.perf_counter()
    try:
        with _shown(options.output.name, started) as on_progress:
            built = build_prefix(
                files,
                options.output,
                recipe,
                workers=options.workers or len(os.sched_getaffinity(0)),
                skip_bad=options.skip_bad,
                overwrite=options.overwrite,
                on_progress=on_progress,
            )
    except KeyboardInterrupt:
        print("interrupted; the same command goes on with what is done so far", file=sys.stderr)
        return 128 + signal.SIGINT
    seconds = round(time.perf_counter() - started, 3)
    if options.json:
        report = {"schema_version": SCHEMA_VERSION, "prefix": str(options.output), **asdict(built), "seconds": seconds}
        print(json.dumps(report, indent=1))
    else:
        _show(options.output, built, seconds)
    return 0


def _show(prefix: Path, built: "BuiltPair", seconds: float) -> None:
    print(
        f"{prefix}: {built.documents:,} documents, {built.sequences:,} sequences, "
        f"{built.tokens:,} {built.dtype} tokens ({built.bytes / 1e6:.1f} MB)"
    )
    if built.skipped:
        print(f"{built.skipped:,} documents with faults are left out")
    if built.empty:
        print(f"{built.empty:,} documents without any text are left out")
    if built.was_there:
        print("it was there already, made of the same")
    else:
        found = f", {built.parts_found:,} of {built.parts:,} parts found from before" if built.parts_found else ""
        print(f"{seconds:.1f} s, {built.tokens / seconds:,.0f} tokens/s{found}; crc32 {built.crc32}")


@contextlib.contextmanager
def _shown(title: str, started: float) -> Iterator[Callable[["BuildProgress"], None]]:
    """Yield what hears of progress: a bar on a terminal, a line for each twentieth elsewhere, on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    if not sys.stderr.isatty():
        yield _lines(title, started)
        return
    columns = (TextColumn(title), BarColumn(), DownloadColumn(binary_units=True), TextColumn("{task.description}"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done: bar.update(
            task, completed=done.read_bytes, total=done.total_bytes, description=_told(done, started)
        )


def _lines(title: str, started: float) -> Callable[["BuildProgress"], None]:
    shown_twentieths = 0

    def report(done: "BuildProgress") -> None:
        nonlocal shown_twentieths
        twentieths = done.read_bytes * _LINES // max(1, done.total_bytes)
        if twentieths > shown_twentieths:
            shown_twentieths = twentieths
            read = f"{done.read_bytes / 2**20:.1f} of {done.total_bytes / 2**20:.1f} MiB"
            print(f"{title}: {read}, {_told(done, started)}", file=sys.stderr, flush=True)

    return report


def _told(done: "BuildProgress", started: float) -> str:
    rate = done.counts.tokens / (time.perf_counter() - started)
    return f"{done.counts.documents:,} documents, {done.counts.tokens:,} tokens, {rate:,.0f} tokens/s"
