"""`trainwright`: the commands around runs. Starts fast: what a command needs is imported when it runs."""

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.metadata import version

from trainwright import cli_cloud, cli_convert, cli_data, cli_image, cli_neuron_cache, cli_runs, cli_tensorboard
from trainwright.cli_command import guarded

_LISTS = ("overrides", "targets", "target", "inputs")  # words that a command takes any number of


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and exit with its code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["train"]:  # all that follows is Hydra's, its own flags included
        from trainwright.app import main as train

        sys.argv[0] = "trainwright train"
        train(arguments[1:])
    parser = _parser()
    options, late = parser.parse_known_args(arguments)
    if late and not _takes(options, late):
        parser.error(f"unrecognized arguments: {' '.join(late)}")
    options.run(options)


def _takes(options: argparse.Namespace, late: Sequence[str]) -> bool:
    """Add words behind an option to the command's list of words, which argparse takes to be over there."""
    if any(word.startswith("-") for word in late):
        return False
    for name in _LISTS:
        words = getattr(options, name, None)
        if isinstance(words, list):
            words.extend(late)
            return True
    return False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainwright", description="Train language models here, on Slurm and Vertex AI."
    )
    parser.add_argument("--version", action="version", version=f"trainwright {version('trainwright')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    commands.add_parser("train", help="what `python train.py` does: GROUP=OPTION KEY=VALUE ..., -m for a sweep")
    rules = commands.add_parser("rules", help="list the rules that a run must meet; allow=[ID] on a run relaxes one")
    rules.add_argument("--json", action="store_true", help="print JSON")
    rules.set_defaults(run=lambda options: sys.exit(guarded(_rules, options)))
    cli_runs.add_to(commands)
    cli_convert.add_to(commands)
    cli_neuron_cache.add_to(commands)
    cli_data.add_to(commands)
    cli_image.add_to(commands)
    cli_cloud.add_to(commands)
    cli_tensorboard.add_to(commands)
    return parser


def _rules(options: argparse.Namespace) -> int:
    from trainwright.rules import RULES

    rows = [
        {"id": rule.id, "severity": rule.severity, "condition": rule.condition, "source": rule.source} for rule in RULES
    ]
    if options.json:
        print(json.dumps({"schema_version": 1, "rules": rows}, indent=1))
        return 0
    for row in rows:
        print(f"{row['id']:<16} {row['severity']:<8} {row['condition']}\n{'':<25} source: {row['source']}")
    return 0
