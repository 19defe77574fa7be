"""The commands that follow runs: ps, status, logs, cancel, retry, resume, compare and results."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.cli_command import count, guarded
from trainwright.errors import EXIT_FAILED, UserError

if TYPE_CHECKING:
    from trainwright.follow.overview import Overview

SCHEMA_VERSION = 1
RUN = "run id, unique prefix of one, path, or -1 for the newest, -2 for the one before"


def add_to(commands: Any) -> None:
    """Add these commands to the sub-commands of the command line."""
    ps = add_command(commands, "ps", _ps, "list runs, oldest first")
    ps.add_argument("--state", action="append", metavar="STATE", help="only runs in this state (repeatable)")
    ps.add_argument("-n", "--last", type=count, metavar="N", help="only the N newest")
    add_command(commands, "status", _status, "show all that is known of a run").add_argument(
        "target", metavar="RUN", help=RUN
    )
    logs = add_command(commands, "logs", _logs, "print what a rank of a run prints")
    logs.add_argument("target", metavar="RUN", help=RUN)
    logs.add_argument(
        "-f", "--follow", action="store_true", help="go on until the run is over; exit code 1 if it fails"
    )
    logs.add_argument("--rank", type=int, help="global rank (default: the first that failed, else 0)")
    logs.add_argument("--stage", help="stage of the run (default: the newest that started)")
    logs.add_argument("--attempt", type=int, help="attempt at the run (default: the newest that started)")
    cancel = add_command(commands, "cancel", _cancel, "end a run, or all runs of a sweep", takes_sweeps=True)
    cancel.add_argument("--yes", action="store_true", help="do not ask (not a terminal: it never asks)")
    retry = add_command(
        commands, "retry", _retry, "start again, under the same run ids, what did not succeed", takes_sweeps=True
    )
    retry.add_argument("--failed", action="store_true", help="only what failed, not what never started or was stopped")
    retry.add_argument(
        "--accept-changes", action="store_true", help="although the files in conf/ now compose to another config"
    )
    for parser in (cancel, retry):
        parser.add_argument("target", metavar="RUN|SWEEP", help=f"sweep id, or {RUN}")
    resume = add_command(commands, "resume", _resume, "continue a run from its newest complete checkpoint")
    resume.add_argument("target", metavar="RUN", help=RUN)
    resume.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes, such as trainer.max_steps=2000")
    compare = add_command(
        commands, "compare", _side_by_side, "show in which keys runs differ, and their metrics", takes_sweeps=True
    )
    compare.add_argument("target", metavar="RUN", nargs="+", help=RUN)
    results = add_command(
        commands,
        "results",
        _side_by_side,
        "show a sweep as a table of its differing keys and metrics",
        takes_sweeps=True,
    )
    results.add_argument("target", metavar="RUN|SWEEP", help=f"sweep id, or {RUN}")


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], help: str, *, takes_sweeps: bool = False
) -> argparse.ArgumentParser:
    """Add a command that names runs, with the options that all of these have, and return its parser."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=help)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--exp-dir",
        action="append",
        default=[],
        metavar="PATH",
        help=(
            "where runs are looked for, a folder or gs://BUCKET/FOLDER (repeatable; default: exp_manager.exp_dir of "
            "each launcher, as conf/ has it)"
        ),
    )
    parser.set_defaults(run=lambda options: sys.exit(guarded(run, options)), takes_sweeps=takes_sweeps)
    return parser


# ---- looking


def _ps(options: argparse.Namespace) -> int:
    from trainwright.follow import find, listing, tables
    from trainwright.follow.observe import confirm

    folders = find.exp_dirs(options.exp_dir)
    runs = sorted(confirm(listing.all_runs(folders)), key=lambda run: (run.created or "", run.run_id))
    if options.state:
        runs = [run for run in runs if run.state.state in [state.upper() for state in options.state]]
    runs = runs[-options.last :] if options.last else runs
    if options.json:
        return _print_json(runs=[run.to_json() for run in runs])
    if not runs:
        print(f"no such runs below {find.listed(folders)}", file=sys.stderr)
    exp_dirs = {run.run_dir.parent.parent for run in runs}
    launchers = {run.launcher for run in runs}
    tables.show(
        [
            {
                "run": run.run_id,
                "exp_dir": str(run.run_dir.parent.parent) if len(exp_dirs) > 1 else "",
                "state": run.state.state,
                "attempt": str(run.state.attempt) if any(other.state.attempt > 1 for other in runs) else "",
                "launcher": (run.launcher or "") if len(launchers) > 1 else "",
                "step": tables.progress(run.metrics.step, run.metrics.max_steps),
                "train_loss": tables.loss(run.metrics.train_loss),
                "val_loss": tables.loss(run.metrics.val_loss),
                "age": tables.age(run.created),
            }
            for run in runs
        ]
    )
    return 0


def _status(options: argparse.Namespace) -> int:
    from trainwright import registry
    from trainwright.follow import tables
    from trainwright.follow.node_findings import as_line, node_findings
    from trainwright.node.run_paths import RunPaths

    (run,) = _overviews(options)
    paths = RunPaths(run.run_dir)
    if options.json:
        return _print_json(run=run.to_json(), node_findings=node_findings(run))
    told = {
        "run": run.run_id,
        "state": run.state.state,
        "reason": run.state.reason,
        "exit_code": None if run.state.exit_code is None else str(run.state.exit_code),
        "step": tables.progress(run.metrics.step, run.metrics.max_steps),
        "train_loss": tables.loss(run.metrics.train_loss),
        "val_loss": tables.loss(run.metrics.val_loss),
        "attempt": str(run.state.attempt),
        "launcher": run.launcher,
        "overrides": " ".join(run.overrides),
        "age": tables.age(run.created),
        "directory": str(run.run_dir),
        "export": str(registry.newest_export(run.run_dir) or ""),
        "code": str(paths.code(run.state.attempt)) if paths.code(run.state.attempt).is_dir() else None,
        "unreadable": ", ".join(run.unreadable),
    }
    for key, value in told.items():
        if value:
            print(f"{key:<12} {value}")
    for finding in node_findings(run):
        print(f"{'finding':<12} {as_line(finding)}")
    if len(run.state.stages) > 1 or run.launcher != "local":
        print()
        tables.show(
            [
                {
                    "stage": str(stage.stage),
                    "state": stage.state,
                    "attempt": str(stage.attempt),
                    "job": run.job_ids.get(str(stage.stage), "") if run.launcher != "local" else "",
                    "nodes": str(len(stage.nodes)) if len(stage.nodes) > 1 else "",
                    "reason": stage.reason or "",
                }
                for stage in run.state.stages
            ]
        )
    for line in run.state.last_lines:
        print(f"  | {line}")
    return 0


def _logs(options: argparse.Namespace) -> int:
    from trainwright.follow import logs
    from trainwright.node import events, growing

    (run,) = _overviews(options)
    chosen = {"stage": options.stage, "rank": options.rank, "attempt": options.attempt}
    found = logs.find_log(run, **chosen)
    if options.json:
        if options.follow:
            raise UserError("--json: gives what there is now; leave out --follow")
        text = growing.read_bytes(found.path).decode("utf-8", "replace") if found is not None else ""
        whose = {key: getattr(found, key, None) for key in ("stage", "attempt", "rank")}
        path = None if found is None else str(found.path)
        return _print_json(run_id=run.run_id, **whose, path=path, lines=text.splitlines())
    if options.follow:
        ended = logs.follow(run.run_dir, lambda now: logs.find_log(now, **chosen), sys.stdout.buffer)
        print(f"{ended.run_id} {ended.state.state}" + _because(ended), file=sys.stderr)
        return 0 if ended.state.state == events.SUCCEEDED else EXIT_FAILED
    if found is None:
        raise UserError(f"{run.run_id} is {run.state.state}{_because(run)}; nothing has written a log yet")
    logs.copy(found, sys.stdout.buffer)
    return 0


def _side_by_side(options: argparse.Namespace) -> int:
    from trainwright.follow import compare, tables

    rows = compare.side_by_side(_overviews(options))
    if options.json:
        return _print_json(runs=rows)
    tables.show(
        [
            {
                "run": row["run_id"],
                **{key: compare.as_text(value) for key, value in row["config"].items()},
                "state": row["state"],
                "step": tables.progress(row["step"], row["max_steps"]),
                **{name: compare.as_text(value) for name, value in row["metrics"].items()},
            }
            for row in rows
        ]
    )
    return 0


# ---- acting


def _cancel(options: argparse.Namespace) -> int:
    from trainwright.follow.cancel import cancel
    from trainwright.report import asks

    runs = _overviews(options)
    over = [run for run in runs if run.is_over]
    if len(over) < len(runs) and not options.yes and sys.stdin.isatty():
        states = ", ".join(f"{run.run_id} {run.state.state}" for run in runs if not run.is_over)
        if not asks(f"cancel {len(runs) - len(over)} of {len(runs)} runs ({states})?"):
            return EXIT_FAILED
    done = [cancel(run) for run in runs]
    if options.json:
        return _print_json(
            runs=[
                {
                    "run_id": one.run.run_id,
                    "state_before": one.state_before,
                    "state": one.run.state.state,
                    "is_cancelled_now": one.is_cancelled_now,
                }
                for one in done
            ]
        )
    for one in done:
        print(f"{one.run.run_id}  " + ("CANCELLED" if one.is_cancelled_now else f"was over: {one.state_before}"))
    return 0


def _retry(options: argparse.Namespace) -> int:
    from trainwright.follow.retry import retry, to_retry

    chosen = to_retry(_overviews(options), only_failed=options.failed)
    with _stdout_for_json(options.json):
        outcomes = retry(chosen, accept_changes=options.accept_changes) if chosen else []
    if options.json:
        rows = [{"run_id": one.run_id, "state": one.state, "attempt": one.attempt} for one in outcomes]
        _print_json(runs=rows)
    elif not chosen:
        print("nothing to start again: no run " + ("failed" if options.failed else "failed, stopped or never started"))
    return max((outcome.exit_code for outcome in outcomes), default=0)


def _resume(options: argparse.Namespace) -> int:
    from trainwright import app
    from trainwright.follow.retry import directory
    from trainwright.registry import last_attempt, read_record

    (run,) = _overviews(options)
    record = read_record(run.run_dir, last_attempt(run.run_dir))
    os.chdir(directory(record))
    with _stdout_for_json(options.json):
        code = app.run([*record["overrides"], *options.overrides, f"run_id={run.run_id}"])
    if options.json:
        _print_json(run=_look(run.run_dir).to_json())
    return code


# ---- what they share


def _overviews(options: argparse.Namespace) -> "list[Overview]":
    """Return all runs that the command names, as they stand."""
    from trainwright import storage
    from trainwright.follow import find, overview
    from trainwright.follow.observe import confirm

    words = options.target if isinstance(options.target, list) else [options.target]
    is_path = all(os.sep in word for word in words)
    folders = [] if is_path and not options.exp_dir else find.exp_dirs(options.exp_dir)
    if options.takes_sweeps:
        places = [run for word in words for run in find.resolve(word, folders).runs]
    else:
        places = [find.resolve_run(word, folders) for word in words]
    runs = list(dict.fromkeys(places))
    return confirm(storage.in_parallel(overview.look, runs, runs))


def _look(run: Path) -> "Overview":
    from trainwright.follow import overview

    return overview.look(run)


def _because(run: "Overview") -> str:
    return f": {run.state.reason}" if run.state.reason else ""


@contextlib.contextmanager
def _stdout_for_json(is_json: bool) -> Iterator[None]:
    """Send what is said on the way, by jobs too, to stderr where stdout shall be JSON."""
    if not is_json:
        yield
        return
    sys.stdout.flush()
    saved = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, sys.stdout.fileno())
        os.close(saved)


def _print_json(**content: Any) -> int:
    print(json.dumps({"schema_version": SCHEMA_VERSION, **content}, indent=1))
    return 0
