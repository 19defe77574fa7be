"""`trainwright data`: what training data holds and what a run would make of it, and data sets made of texts."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright import cli_data_build
from trainwright.cli_command import compose_run, count, guarded
from trainwright.cli_data_options import Inspected
from trainwright.errors import UserError

if TYPE_CHECKING:
    from trainwright.config import RunConfig

SCHEMA_VERSION = 1
_RECORDS = (".jsonl", ".json")
_PAIR = (".bin", ".idx")


@dataclass(frozen=True, kw_only=True)
class _Target:
    """What to look into."""

    key: str  # what named it
    records: Path | None = None  # a file of instruction data; None: it is a data set
    data_prefix: tuple[float | str, ...] = ()


def add_to(commands: Any) -> None:
    """Add the command to the sub-commands of the command line."""
    data = commands.add_parser("data", help="look into training data, or make it of texts")
    kinds = data.add_subparsers(title="what to do", metavar="KIND", required=True)
    told = "show what data hold, what a run would make of them, and what would be lost or trained wrongly"
    inspect = kinds.add_parser(
        "inspect",
        help=told,
        description=f"{told}. Exit code 0: fine, warnings included; 1: records would be lost or the run would fail; "
        "2: the files themselves are at fault.",
    )
    inspect.add_argument(
        "targets",
        nargs="+",
        metavar="FILE|PREFIX|WEIGHT|KEY=VALUE",
        help='jsonl of {"input", "output"}; Megatron data sets PREFIX.bin and PREFIX.idx, or a blend WEIGHT PREFIX '
        "WEIGHT PREFIX; with overrides such as model=tanuki_8b hardware=trn1 the rest, and without FILE and PREFIX the "
        "data too, are taken from that run",
    )
    inspect.add_argument("--tokenizer", metavar="NAME", help="gpt2_bpe, a directory with tokenizer.json, or a hub id")
    inspect.add_argument("--seq-length", type=count, metavar="N", help="tokens a sample")
    inspect.add_argument("--vocab-size", type=count, metavar="N", help="entries of the model's vocabulary")
    inspect.add_argument("--samples", type=count, default=0, metavar="K", help="show the first K samples, too")
    inspect.add_argument("--json", action="store_true", help="print JSON; --samples then gives all columns")
    records = inspect.add_argument_group("jsonl")
    records.add_argument("--backend", choices=["nxdt", "native"], help="who reads it (default nxdt)")
    records.add_argument(
        "--packing", action=argparse.BooleanOptionalAction, help="NxDT's: several records in a sample (the default)"
    )
    records.add_argument("--global-batch-size", type=count, metavar="N", help="samples an optimizer step")
    records.add_argument("--data-parallel-size", type=count, metavar="N", help="replicas of the model (default 1)")
    records.add_argument("--max-steps", type=count, metavar="N", help="optimizer steps of the run")
    pairs = inspect.add_argument_group("data sets")
    pairs.add_argument("--splits", metavar="A,B,C", help="data.splits_string: parts to train, validate and test")
    pairs.add_argument("--num-samples", type=count, metavar="N", help="training samples of the run")
    pairs.add_argument("--seed", type=int, metavar="N", help="of the order of samples (default 1234, as in Megatron)")
    inspect.set_defaults(run=lambda options: sys.exit(guarded(_inspect, options, extra="native")))
    cli_data_build.add_to(kinds)


def _inspect(options: argparse.Namespace) -> int:
    overrides = [text for text in options.targets if _is_override(text)]
    config = compose_run(overrides) if overrides else None
    targets, problems = _targets([text for text in options.targets if text not in overrides], config)
    inspected = []
    for target in targets:
        try:
            inspected.append(_look_into(target, options, config))
        except UserError as error:
            problems.append(str(error))
    if options.json and inspected:
        found = {"schema_version": SCHEMA_VERSION, "files": [one.content for one in inspected]}
        print(json.dumps(found, indent=1))
    else:
        for number, one in enumerate(inspected):
            print(end="\n" if number else "")
            one.show()
    if problems:
        raise UserError("\n".join(dict.fromkeys(problems)))
    return max(one.exit_code for one in inspected)


def _is_override(text: str) -> bool:
    return ("=" in text or text.startswith("~")) and not os.path.exists(text)


def _targets(texts: Sequence[str], config: "RunConfig | None") -> tuple[list[_Target], list[str]]:
    """Return what is to be inspected, and what cannot be."""
    if not texts:
        assert config is not None  # there is a target, and it is an override
        return _targets_of_run(config), []
    if any(_is_number(text) for text in texts):
        return [_Target(key="PREFIX", data_prefix=tuple(map(_without_ending, texts)))], []
    targets, problems = [], []
    for text in texts:
        if Path(text).suffix.lower() in _RECORDS:
            targets.append(_Target(key=f"FILE {text}", records=Path(text)))
        elif text.endswith(_PAIR) or any(os.path.exists(text + ending) for ending in _PAIR):
            targets.append(_Target(key=f"PREFIX {text}", data_prefix=(_without_ending(text),)))
        else:
            problems.append(
                f"{text}: cannot be inspected; give a {' or '.join(_RECORDS)} file, or a path to which .bin and .idx "
                "can be added"
            )
    return targets, problems


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return not os.path.exists(f"{text}.idx")


def _without_ending(text: str) -> str:
    return text[:-4] if text.endswith(_PAIR) else text


def _targets_of_run(config: "RunConfig") -> list[_Target]:
    data = config.data
    if data.data_prefix is not None:
        targets = [_Target(key="data.data_prefix", data_prefix=data.data_prefix)]
    else:
        files = (("data.train_path", data.train_path), ("data.val_path", data.val_path))
        targets = [_Target(key=key, records=Path(path)) for key, path in files if path is not None]
    if not targets:
        raise UserError(f"data={data.name} names no data.train_path and no data.data_prefix; give FILE or PREFIX")
    named = [(target.key, str(part)) for target in targets for part in (target.records, *target.data_prefix) if part]
    unset = [f"{key}={part} needs a fact of the site" for key, part in named if "<site." in part]
    if unset:
        raise UserError("\n".join(f"{line}; set it in conf/local/default.yaml, or give FILE" for line in unset))
    return targets


def _look_into(target: _Target, options: argparse.Namespace, config: "RunConfig | None") -> Inspected:
    if target.records is not None:
        from trainwright.cli_data_sft import inspect_file

        return inspect_file(target.records, target.key, options, config)
    from trainwright.cli_data_pair import inspect_pairs

    return inspect_pairs(target.data_prefix, target.key, options, config)
