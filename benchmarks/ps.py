"""`trainwright ps` over many runs, against the floor: a walk that opens the same files and looks at nothing.

    python benchmarks/ps.py [--runs 2000] [--folder DIR]

Prints both times, the best of five each, and their ratio. Files are in the page cache, as on a second look.
"""

import argparse
import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from trainwright.follow import find, observe, overview, tables
from trainwright.node import events
from trainwright.node.run_paths import RunPaths

_REPEATS = 5
_STEPS = 50


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare `trainwright ps` with a plain walk over the same files.")
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--folder", type=Path, help="where the runs are made (default: a temporary directory)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for number in range(options.runs):
            _make(Path(folder) / "name" / f"name-20260101-000000-{number:04x}")
        floor_s = _best(lambda: _walk(folder))
        ours_s = _best(lambda: _list(Path(folder)))
    print(f"{options.runs} runs: walk {floor_s:.3f} s, ps {ours_s:.3f} s, ratio {ours_s / floor_s:.2f}")


def _make(run: Path) -> None:
    """Write what a finished run of one stage and one node leaves of what a list reads."""
    paths = RunPaths(run)
    paths.own.mkdir(parents=True)
    planned = {"stages": ["train"], "num_nodes": 1, "launcher": "local", "max_steps": _STEPS, "overrides": ["seed=1"]}
    events.append(paths, events.PLANNED, who=events.SUBMIT, stage=None, attempt=1, **planned)
    events.append(paths, events.SUBMITTED, who=events.SUBMIT, stage="train", attempt=1, job_id=str(run))
    for state in (events.RUNNING, events.SUCCEEDED):
        events.append(paths, state, who=events.node_who(1, 0), stage="train", attempt=1, num_nodes=1, exit_code=0)
    results = {"attempt": 1, "steps": _STEPS, "max_steps": _STEPS, "train_loss": 4.0, "val_loss": 4.5}
    paths.results.write_text(json.dumps(results))


def _walk(folder: str) -> None:
    """Read every file below `folder`."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(parent, name), "rb") as file:
                file.read()


def _list(folder: Path) -> None:
    runs = observe.confirm([overview.look(run) for run in find.find_runs([folder])])
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        tables.show([{"run": run.run_id, "state": run.state.state, "age": tables.age(run.created)} for run in runs])


def _best(action: Callable[[], None]) -> float:
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


if __name__ == "__main__":
    main()
