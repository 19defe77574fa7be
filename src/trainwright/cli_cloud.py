"""`trainwright cloud setup`: prepares the site's Google Cloud project for its first run."""

import argparse
import json
import shlex
import sys
from typing import TYPE_CHECKING, Any

from trainwright.cli_command import guarded

if TYPE_CHECKING:
    from trainwright.cloud_setup import Step

SCHEMA_VERSION = 1


def add_to(commands: Any) -> None:
    """Add the command to the sub-commands of the command line."""
    command = commands.add_parser("cloud", help="prepare a Google Cloud project for runs on Vertex AI")
    kinds = command.add_subparsers(title="what to do", metavar="KIND", required=True)
    told = "print a script that makes what runs need (services, bucket, repository), as far as it is not there"
    setup = kinds.add_parser("setup", help=told, description=f"{told}. For the project of site.vertex.")
    setup.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as site.vertex.project=my-project")
    setup.add_argument("--yes", action="store_true", help="run it, to the first step that fails")
    setup.add_argument("--json", action="store_true", help="print JSON: the steps, and with --yes what became of them")
    setup.set_defaults(run=lambda options: sys.exit(guarded(_setup, options)))


def _setup(options: argparse.Namespace) -> int:
    from trainwright import cloud_setup
    from trainwright.cli_command import compose_run

    site = compose_run(options.overrides).site.vertex
    steps = cloud_setup.steps(site)
    if options.yes:
        return _run(steps, cloud_setup.hints(site), as_json=options.json)
    if options.json:
        return _print_json(steps, {}, cloud_setup.hints(site))
    print(cloud_setup.script(site), end="")
    return 0


def _run(steps: "tuple[Step, ...]", hints: tuple[str, ...], *, as_json: bool) -> int:
    """Make what is missing, in order; stop at the first failure."""
    from trainwright import gcloud
    from trainwright.report import warn

    gcloud.refuse_missing("run what `trainwright cloud setup` prints")
    outcomes: dict[str, str] = {}
    code = 0

    def say(line: str) -> None:
        print(line, file=sys.stderr if as_json else sys.stdout, flush=True)

    for number, step in enumerate(steps, 1):
        title = f"{number}/{len(steps)} {step.name}"
        if step.check is not None and gcloud.succeeds(step.check):
            outcomes[step.name] = "there"
            say(f"{title}: is there")
            continue
        say(f"{title}: {shlex.join(step.make)}")
        if step.is_interactive and not sys.stdin.isatty():
            warn(f"{step.name}: run this yourself, on a terminal: {shlex.join(step.make)}")
            outcomes[step.name] = "left to you"
            continue
        code = gcloud.run(step.make, to_stderr=as_json)
        outcomes[step.name] = "failed" if code else "made"
        if code:
            warn(f"step {title} failed with exit code {code}; what comes after it was not tried; then run this again")
            break
    if as_json:
        _print_json(steps, outcomes, hints)
    elif not code:
        for hint in hints:
            say(hint)
    return code


def _print_json(steps: "tuple[Step, ...]", outcomes: dict[str, str], hints: tuple[str, ...]) -> int:
    rows = [
        {"name": step.name, "check": step.check, "make": step.make, "outcome": outcomes.get(step.name)}
        for step in steps
    ]
    print(json.dumps({"schema_version": SCHEMA_VERSION, "steps": rows, "hints": hints}, indent=1))
    return 0
