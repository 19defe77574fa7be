"""`trainwright image`: the container image that runs on Vertex AI use unless they name another."""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.cli_command import guarded
from trainwright.errors import EXIT_FAILED, UserError

if TYPE_CHECKING:
    from trainwright.config import RunConfig
    from trainwright.image import Image

SCHEMA_VERSION = 1


def add_to(commands: Any) -> None:
    """Add the command to the sub-commands of the command line."""
    command = commands.add_parser("image", help="make the container image of runs on Vertex AI")
    kinds = command.add_subparsers(title="what to do", metavar="KIND", required=True)
    told = "write what the image is built from, and show the command that builds it"
    render = _add(kinds, "render", _render, f"{told}; its tag is a digest of that")
    render.add_argument(
        "--output", type=Path, metavar="DIR", help="a new folder, or one of this command (default outputs/images/NAME)"
    )
    render.add_argument("--json", action="store_true", help="print JSON")
    build = _add(kinds, "build", _build, "have Cloud Build make the image, unless it is there; exit code is gcloud's")
    build.add_argument("--yes", action="store_true", help="do not ask")


def _add(kinds: Any, name: str, run: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(name, help=help, description=help)
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="those of the run, such as model=gpt_small hardware=t4"
    )
    parser.set_defaults(run=lambda options: sys.exit(guarded(run, options)))
    return parser


def _render(options: argparse.Namespace) -> int:
    from trainwright import image

    config, made = _image(options)
    name = made.name.rpartition("/")[2].replace(":", "-")
    folder = options.output or Path("outputs", "images", name)
    image.write(made, folder)
    command = image.build_command(config, made, folder)
    if options.json:
        told = {"image": made.name, "folder": str(folder), "files": sorted(made.files), "command": list(command)}
        print(json.dumps({"schema_version": SCHEMA_VERSION, **told}, indent=1))
        return 0
    size = sum(map(len, made.files.values()))
    print(f"image      {made.name}")
    print(f"folder     {folder} ({len(made.files)} files, {size / 2**20:.1f} MiB)")
    print(f"by hand    {shlex.join(command)}")
    for note in _notes(config, made):
        print(f"note       {note}")
    return 0


def _build(options: argparse.Namespace) -> int:
    from trainwright import gcloud, image
    from trainwright.report import asks, say

    config, made = _image(options)
    gcloud.refuse_missing("run the command that `trainwright image render` shows")
    for note in _notes(config, made):
        say(note)
    if gcloud.succeeds(image.look_command(made)):
        say(f"{made.name} is there already, from the same content")
        return 0
    question = f"have Cloud Build make {made.name}, in project {config.site.vertex.project}, which pays for it?"
    if not options.yes and not sys.stdin.isatty():
        raise UserError(f"image build: {question} Add --yes if you mean it")
    if not options.yes and not asks(question):
        return EXIT_FAILED
    with tempfile.TemporaryDirectory(prefix="trainwright-image-") as folder:
        image.write(made, Path(folder))
        command = image.build_command(config, made, Path(folder))
        say(shlex.join(command))
        return gcloud.run(command)


def _image(options: argparse.Namespace) -> "tuple[RunConfig, Image]":
    from trainwright.cli_command import compose_run
    from trainwright.image import to_build

    config = compose_run(options.overrides)
    if config.launcher.kind != "vertex":
        raise UserError(
            f"launcher={config.launcher.kind}: images are for runs on Vertex AI; give the run's overrides, such as "
            "hardware=t4"
        )
    return config, to_build(config)


def _notes(config: "RunConfig", made: "Image") -> list[str]:
    """Return why runs with these overrides would not use the image."""
    chosen = {
        "launcher.image": getattr(config.launcher, "image", None),
        "backend.image": getattr(config.backend, "image", None),
    }
    return [f"runs with {key}={value} use that" for key, value in chosen.items() if value not in (None, made.name)][:1]
