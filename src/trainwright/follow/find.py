"""Runs and sweeps found on disk by id, prefix, path or age: all that a command line may call one."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright import report, storage
from trainwright.errors import UserError
from trainwright.node import events
from trainwright.node.run_paths import RunPaths, SweepPaths

_AGE = re.compile(r"-[1-9]\d*")
_SHOWN_CANDIDATES = 20


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a word on the command line stands for: one run, or the runs of a sweep."""

    id: str
    runs: tuple[Path, ...]  # directories, in the order of the sweep; some may never have been made
    is_sweep: bool


def exp_dirs(given: Sequence[str]) -> list[Path]:
    """Return where runs are looked for: `given`, else where the config tree puts those of each installed launcher.

    Raises UserError when a given directory does not exist. A bucket of the config tree that cannot be reached is named
    on stderr and left out: there are other runs.
    """
    places = [storage.at(path) for path in given]
    for text, place in zip(given, places, strict=True):
        with storage.reached(place, "--exp-dir"):
            if not storage.is_folder(place):
                raise UserError(f"--exp-dir: {text} is no directory; give the exp_manager.exp_dir of the runs")
    return places or composed_exp_dirs()


def composed_exp_dirs(*overrides: str) -> list[Path]:
    """Compose each launcher's exp_manager.exp_dir, with this machine's own facts; what is unset there is left out."""
    from hydra import compose, initialize_config_dir

    from trainwright.places import CONF
    from trainwright.scheduler import installed

    with initialize_config_dir(str(CONF), version_base="1.3"):
        trees = [compose("config", [f"launcher={kind}", *overrides]) for kind in sorted(installed())]
    found: dict[Path, None] = {}
    for tree in trees:
        if "<site." not in tree.exp_manager.exp_dir:
            try:
                found[_place_of(tree)] = None
            except UserError as error:
                report.warn(f"runs of launcher={tree.launcher.kind} are left out: {error}")
    return list(found)


def _place_of(tree: Any) -> Path:
    """Return the exp_dir of a composed config as seen from here. Raises UserError when its bucket cannot be reached."""
    path, launcher = str(tree.exp_manager.exp_dir), tree.launcher
    if launcher.kind != "vertex":
        return storage.at(path)
    place = storage.mapped(path, launcher.bucket_mount, launcher.bucket_url)
    with storage.reached(place, "exp_manager.exp_dir"):
        storage.is_folder(place)
    return place


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Return the directories of all runs below some exp_dirs, in the order of their names."""
    found: list[Path] = []
    for exp_dir in folders:
        if storage.is_bucket(exp_dir):
            found += dict.fromkeys(RunPaths.of_event(file).run_dir for file in event_files(exp_dir))
        else:
            names = storage.subfolders(exp_dir)
            found += [run for name in names for run in storage.subfolders(name) if _is_run(run)]
    return found


def event_files(exp_dir: Path) -> list[Path]:
    """Return the files among the events of all runs below an exp_dir on a bucket, by one listing."""
    with storage.reached(exp_dir, "--exp-dir"):
        return storage.find_files(exp_dir, RunPaths(exp_dir / "*" / "*").events / "*")


def _is_run(place: Path) -> bool:
    return storage.is_folder(RunPaths(place).events)


def find_sweeps(folders: Sequence[Path]) -> list[Path]:
    """Return the lists of jobs of all sweeps below some exp_dirs."""
    found: list[Path] = []
    for exp_dir in folders:
        if storage.is_bucket(exp_dir):
            with storage.reached(exp_dir, "--exp-dir"):
                found += storage.find_files(exp_dir, SweepPaths(exp_dir, "*", "*").jobs)
            continue
        for name in storage.subfolders(exp_dir):
            sweeps = storage.subfolders(SweepPaths.all_below(exp_dir, name.name))
            jobs = [SweepPaths(exp_dir, name.name, sweep.name).jobs for sweep in sweeps]
            found += [path for path in jobs if path.is_file()]
    return found


def resolve_run(word: str, folders: Sequence[Path]) -> Path:
    """Return the one run that `word` names. Raises UserError when none or several do, or a sweep does."""
    target = resolve(word, folders)
    if target.is_sweep:
        raise UserError(f"{word}: this is a sweep of {len(target.runs)} runs, and one run is needed")
    return target.runs[0]


def resolve(word: str, folders: Sequence[Path]) -> Target:
    """Return what `word` names: a path, an id, a unique prefix of one, or -N for the N-th newest run.

    Raises UserError when nothing has that name, and with all candidates when several have.
    """
    if os.sep in word or _is_run(storage.at(word)):
        return _at_path(word)
    runs = find_runs(folders)
    if _AGE.fullmatch(word):
        ages = dict(zip(runs, storage.in_parallel(_created, runs, runs), strict=True))
        newest = sorted(runs, key=lambda run: ages[run], reverse=True)
        if int(word) < -len(newest):
            raise UserError(f"{word}: there are {len(newest)} runs below {listed(folders)}")
        return _run(newest[-int(word) - 1])
    sweeps = find_sweeps(folders)
    places = [*runs, *(jobs.parent for jobs in sweeps)]
    found = [place for place in places if place.name == word] or [
        place for place in places if place.name.startswith(word)
    ]
    if not found:
        raise UserError(f"{word}: no run or sweep below {listed(folders)} has this id; `trainwright ps` lists them")
    if len(found) > 1:
        shown = "".join(f"\n  {place}" for place in found[:_SHOWN_CANDIDATES])
        more = f"\n  and {len(found) - _SHOWN_CANDIDATES} more" if len(found) > _SHOWN_CANDIDATES else ""
        raise UserError(f"{word}: {len(found)} runs and sweeps have ids that begin so; give more of one{shown}{more}")
    return _run(found[0]) if found[0] in runs else _sweep(SweepPaths.at(found[0]))


def _at_path(word: str) -> Target:
    path = storage.at(word)
    with storage.reached(path, word):
        if _is_run(path):
            return _run(path)
        sweep = SweepPaths.at(path) if len(path.parents) > 2 else None
        if sweep is not None and sweep.jobs.is_file():
            return _sweep(sweep)
    raise UserError(f"{word}: neither a run's directory nor a sweep's")


def _run(run: Path) -> Target:
    return Target(id=run.name, runs=(run,), is_sweep=False)


def _sweep(paths: SweepPaths) -> Target:
    listing = json.loads(paths.jobs.read_text(encoding="utf-8"))
    runs = tuple(storage.at(job["run_dir"]) for job in listing["jobs"])
    return Target(id=paths.sweep_dir.name, runs=runs, is_sweep=True)


def _created(run: Path) -> str:
    planned = events.find(RunPaths(run), [events.SUBMIT], [events.PLANNED])
    return planned[0].time if planned else ""


def listed(folders: Sequence[Path]) -> str:
    """Return where runs were looked for, in words."""
    return ", ".join(map(str, folders)) or "any exp_dir, since none is set (--exp-dir PATH)"
