"""All runs below some exp_dirs, as `ps` lists them: a walk on a disk; on a bucket one listing and all reads at once."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from trainwright import storage
from trainwright.follow import find, overview
from trainwright.follow.overview import Overview
from trainwright.node import events
from trainwright.node.run_paths import RunPaths


def all_runs(folders: Sequence[Path]) -> list[Overview]:
    """Return how each run below some exp_dirs stands. Raises UserError when a bucket cannot be reached."""
    runs = []
    for exp_dir in folders:
        if storage.is_bucket(exp_dir):
            with storage.reached(exp_dir, "--exp-dir"):
                runs += _in_bucket(exp_dir)
        else:
            runs += [overview.look(run) for run in find.find_runs([exp_dir])]
    return runs


def _in_bucket(exp_dir: Path) -> list[Overview]:
    files: dict[Path, list[Path]] = {}
    for file in find.event_files(exp_dir):
        files.setdefault(RunPaths.of_event(file).run_dir, []).append(file)
    results = [RunPaths(run).results for run in files]
    contents = storage.read_many([*(file for of_run in files.values() for file in of_run), *results])

    def look(run: Path) -> Overview:
        paths = RunPaths(run)
        history = events.history((file.name, partial(bytes, contents[file])) for file in files[run] if file in contents)
        return overview.stand(paths, history, json.loads(contents.get(paths.results, b"{}")))

    return storage.in_parallel(look, list(files), files)  # those without results are asked for their metrics
