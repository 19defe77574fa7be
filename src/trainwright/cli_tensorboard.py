"""`trainwright tensorboard`: the curves of runs, here or on Vertex AI TensorBoard."""

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.cli_runs import RUN, add_command
from trainwright.errors import EXIT_FAILED, UserError

if TYPE_CHECKING:
    from trainwright.config import RunConfig
    from trainwright.follow.event_files import LocalCopy

SCHEMA_VERSION = 1
_REFRESH_S = 15.0  # nodes copy their files twice a minute


def add_to(commands: Any) -> None:
    """Add the command to the sub-commands of the command line."""
    told = "show the curves of runs in TensorBoard here, until Ctrl-C; or on Vertex AI TensorBoard"
    parser = add_command(commands, "tensorboard", _tensorboard, told, takes_sweeps=True)
    parser.add_argument("target", metavar="RUN|SWEEP", nargs="+", help=f"sweep id, or {RUN}")
    parser.add_argument("--port", type=int, default=6006, metavar="N", help="of the page (default 6006; 0: any)")
    there = parser.add_mutually_exclusive_group()
    there.add_argument(
        "--upload",
        action="store_true",
        help="bring the scalars to Vertex AI: an experiment a run, in launcher.tensorboard or an instance that is made",
    )
    there.add_argument("--delete", action="store_true", help="delete that instance with all that it holds")
    parser.add_argument("--yes", action="store_true", help="do not ask before deleting")
    parser.add_argument("--force", action="store_true", help="delete experiments of other runs, too")


def _tensorboard(options: argparse.Namespace) -> int:
    runs = _runs(options)
    if options.upload:
        return _upload(runs, as_json=options.json)
    if options.delete:
        return _delete(runs, options)
    if options.json:
        raise UserError("--json: goes with --upload and --delete")
    return _show(runs, options.port)


# ---- here


def _show(runs: Sequence[Path], port: int) -> int:
    from trainwright.report import say

    if importlib.util.find_spec("tensorboard") is None:
        raise UserError("tensorboard is not installed: pip install 'trainwright[native]'")
    with tempfile.TemporaryDirectory(prefix="trainwright-tensorboard-") as made:
        folder, copies = _gathered(runs, Path(made))
        say(f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}; TensorBoard names its address; Ctrl-C ends it")
        # SIGTERM as Ctrl-C: else TensorBoard would outlive this command.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", str(port)]
        page = subprocess.Popen(command)
        try:
            return _keep_fresh(page, copies)
        except KeyboardInterrupt:
            return 0
        finally:
            page.terminate()
            page.wait()


def _gathered(runs: Sequence[Path], made: Path) -> "tuple[Path, list[LocalCopy]]":
    """Return the one folder that shows all runs, and the copies in it that must be kept fresh."""
    from trainwright import storage
    from trainwright.follow.event_files import LocalCopy

    if len(runs) == 1 and not storage.is_bucket(runs[0]):
        return runs[0], []
    copies = []
    for run in runs:
        if not storage.is_bucket(run):
            (made / run.name).symlink_to(run)
            continue
        copies.append(LocalCopy(run, made / run.name))
        with storage.reached(run, run.name):
            copies[-1].refresh()
    return made, copies


def _keep_fresh(page: "subprocess.Popen[bytes]", copies: "Sequence[LocalCopy]") -> int:
    """Return the exit code of TensorBoard, once it has ended."""
    from trainwright.report import warn

    while True:
        try:
            return page.wait(_REFRESH_S if copies else None)
        except subprocess.TimeoutExpired:
            for copy in copies:
                try:
                    copy.refresh()
                except copy.failures as error:  # the next round may find the way
                    warn(str(error))


# ---- on Vertex AI


def _upload(runs: Sequence[Path], *, as_json: bool) -> int:
    from trainwright import storage
    from trainwright.follow.event_files import LocalCopy, read
    from trainwright.tensorboard_service import open_tensorboards

    rows = []
    for run in runs:
        service = open_tensorboards(_config(run))
        with tempfile.TemporaryDirectory(prefix="trainwright-tensorboard-") as made:
            if storage.is_bucket(run):
                with storage.reached(run, run.name):
                    LocalCopy(run, Path(made)).refresh()
            curves = read(Path(made) if storage.is_bucket(run) else run)
        if not curves:
            raise UserError(f"{run.name}: has no scalars yet, nothing to upload; see trainwright status {run}")
        with _bar(run.name) as on_progress:
            done = service.upload(run.name, curves, on_progress)
        rows.append({"run_id": run.name, **vars(done)})
        if not as_json:
            print(f"{run.name}  {done.num_new:,} new of {done.num_points:,} points  {done.url}")
    if as_json:
        print(json.dumps({"schema_version": SCHEMA_VERSION, "runs": rows}, indent=1))
    return 0


def _delete(runs: Sequence[Path], options: argparse.Namespace) -> int:
    from trainwright.report import asks
    from trainwright.tensorboard_service import open_tensorboards

    question = f"delete the instance of Vertex AI TensorBoard that shows {', '.join(run.name for run in runs)}?"
    if not options.yes and not sys.stdin.isatty():
        raise UserError(f"tensorboard --delete: {question} Add --yes if you mean it")
    if not options.yes and not asks(question):
        return EXIT_FAILED
    services = {(config.launcher.model_dump_json()): config for config in map(_config, runs)}
    names = [run.name for run in runs]
    deleted = [open_tensorboards(config).delete(names, others_too=options.force) for config in services.values()]
    gone = [name for name in dict.fromkeys(deleted) if name is not None]
    if options.json:
        print(json.dumps({"schema_version": SCHEMA_VERSION, "deleted": gone}, indent=1))
    for name in gone if not options.json else ():
        print(f"deleted {name}")
    if not gone and not options.json:
        print("there is none: nothing to delete")
    return 0


def _config(run: Path) -> "RunConfig":
    """Return whose project and region a run's curves go to: the run's own, else this machine's launcher=vertex."""
    from trainwright.cli_command import compose_run
    from trainwright.follow.observe import config_of

    config = config_of(run)
    if config.launcher.kind != "vertex":
        config = compose_run(["launcher=vertex"])
    assert config.launcher.kind == "vertex"
    unset = [
        f"site.vertex.{key}={value} is not set; set it in conf/local/default.yaml"
        for key, value in (("project", config.launcher.project), ("location", config.launcher.location))
        if "<site." in value
    ]
    if unset:
        raise UserError("\n".join(unset))
    return config


@contextlib.contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield what hears of the progress; a bar on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _runs(options: argparse.Namespace) -> list[Path]:
    """Return the directories of all runs that the command names."""
    from trainwright.follow import find

    is_path = all(os.sep in word for word in options.target)
    folders = [] if is_path and not options.exp_dir else find.exp_dirs(options.exp_dir)
    return list(dict.fromkeys(run for word in options.target for run in find.resolve(word, folders).runs))
