"""`trainwright convert`: checkpoints between the formats of Hugging Face and NxD, and checks of both."""

import argparse
import json
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from trainwright.cli_command import count, guarded
from trainwright.errors import EXIT_FAILED

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def add_to(commands: Any) -> None:
    """Add the command to the sub-commands of the command line."""
    convert = commands.add_parser("convert", help="convert a checkpoint between Hugging Face and NxD, or check one")
    kinds = convert.add_subparsers(title="what to do", metavar="KIND", required=True)
    shards = _add(kinds, "hf-to-nxd", _to_nxd, help="write NxD's shards of a Hugging Face model")
    shards.add_argument("--input", type=Path, required=True, metavar="HF_DIR", help="config.json and safetensors")
    shards.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new directory")
    shards.add_argument("--tp", type=count, required=True, help="tensor_model_parallel_size")
    shards.add_argument("--pp", type=count, default=1, help="pipeline_model_parallel_size (default 1)")
    shards.add_argument("--kv-replicator", type=count, help="copies of each key-value head (default: tp / heads)")
    shards.add_argument(
        "--fuse-qkv", action=argparse.BooleanOptionalAction, default=True, help="one matrix for all three"
    )
    shards.add_argument("--layout", choices=["inline", "xser"], default="inline", help="xser: a file for each tensor")
    shards.add_argument("--hardware", choices=["trn1", "trn2"], default="trn1", help="whose order of heads")
    model = _add(kinds, "nxd-to-hf", _to_hf, help="write a Hugging Face model from NxD's shards")
    model.add_argument("--input", type=Path, required=True, metavar="DIR", help="a checkpoint, or its model/")
    model.add_argument("--output", type=Path, required=True, metavar="HF_DIR", help="a new directory")
    model.add_argument(
        "--base", type=Path, required=True, metavar="HF_DIR", help="gives names, tokenizer, configuration"
    )
    model.add_argument(
        "--max-shard-size",
        type=_num_bytes_or_base,
        default="5GB",
        help="of a weight file (default 5GB); base: tensors in the files where the base has them",
    )
    model.add_argument("--chat-template", type=Path, metavar="FILE", help="replaces the base's chat template")
    model.add_argument(
        "--on-difference", choices=["refuse", "average"], default="refuse", help="where copies of a tensor differ"
    )
    model.add_argument(
        "--dtype", choices=["keep", "bf16", "fp32", "base"], default="keep", help="of the values written"
    )
    shards.add_argument("--dtype", choices=["keep", "bf16", "fp32"], default="keep", help="of the values written")
    for parser in (shards, model):
        parser.add_argument("--allow-extra", action="store_true", help="tolerate tensors that the family does not know")
        parser.add_argument("--workers", type=count, help="threads that write (default: the cores, 4 at most)")
    check = _add(kinds, "verify", _verify, help="check a converted directory; exit code 1 where something is wrong")
    check.add_argument("directory", type=Path, metavar="DIR")
    check.add_argument("--against", type=Path, metavar="HF_DIR", help="the model whose values it should hold")


def _add(kinds: Any, name: str, run: Callable[[argparse.Namespace], int], *, help: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(name, help=help, description=help)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=lambda options: sys.exit(guarded(run, options, extra="convert")))
    return parser


def _to_nxd(options: argparse.Namespace) -> int:
    from trainwright.checkpoint import hf_to_nxd

    convert = partial(
        hf_to_nxd,
        options.input,
        options.output,
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        kv_replicator=options.kv_replicator,
        fuse_qkv=options.fuse_qkv,
        layout=options.layout,
        dtype=options.dtype,
        hardware=options.hardware,
        allow_extra=options.allow_extra,
        workers=options.workers,
    )
    return _convert("hf-to-nxd", convert, as_json=options.json)


def _to_hf(options: argparse.Namespace) -> int:
    from trainwright.checkpoint import nxd_to_hf

    convert = partial(
        nxd_to_hf,
        options.input,
        options.output,
        base=options.base,
        max_shard_bytes=options.max_shard_size,
        dtype=options.dtype,
        on_difference=options.on_difference,
        chat_template=options.chat_template,
        allow_extra=options.allow_extra,
        workers=options.workers,
    )
    return _convert("nxd-to-hf", convert, as_json=options.json)


def _verify(options: argparse.Namespace) -> int:
    from trainwright.checkpoint import verify

    verdict = verify(options.directory, against=options.against)
    if options.json:
        print(json.dumps(verdict.to_dict(), indent=1))
    else:
        print(f"{verdict.directory}: checked {', '.join(verdict.checks)}: {len(verdict.problems)} problems")
        for problem in verdict.problems:
            print(f"error: {problem}", file=sys.stderr)
    return EXIT_FAILED if verdict.problems else 0


def _convert(name: str, convert: Callable[..., Any], *, as_json: bool) -> int:
    """Convert with progress shown, and print what came of it."""
    from trainwright.checkpoint.progress import shown

    with shown(name) as report:
        done = convert(report=report)
    return _print_report(done, as_json=as_json)


def _print_report(report: Any, *, as_json: bool) -> int:
    if as_json:
        print(json.dumps(report.to_dict(), indent=1))
        return 0
    if report.was_complete:
        print(f"{report.output} is complete already, from the same values; nothing was written")
    else:
        gib, rate = report.written_bytes / 2**30, report.written_bytes / 2**20 / report.wall_s
        print(
            f"{report.output}: {report.num_tensors} tensors, {gib:.2f} GiB in {report.wall_s:.1f} s ({rate:.0f} MiB/s)"
        )
    for note in report.notes:
        print(f"note: {note}")
    return 0


def _num_bytes_or_base(text: str) -> int | None:
    return None if text == "base" else _num_bytes(text)


def _num_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]*)", text)
    if match is None or match.group(2).upper() not in _UNITS or float(match.group(1)) == 0:
        raise argparse.ArgumentTypeError(f"{text} is no size; write 5GB (10^9 bytes) or 5GiB (2^30)")
    return int(float(match.group(1)) * _UNITS[match.group(2).upper()])
