"""Runs and sweeps found on disk by id, prefix, path or age: all that a command line may call one."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

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

    Raises UserError when a given directory does not exist.
    """
    absent = [path for path in given if not os.path.isdir(path)]
    if absent:
        raise UserError(f"--exp-dir: {absent[0]} is no directory; give the exp_manager.exp_dir of the runs")
    return [Path(os.path.abspath(path)) for path in given or _composed_exp_dirs()]


def _composed_exp_dirs() -> list[str]:
    """Compose each launcher's exp_manager.exp_dir, with this machine's own facts; what is unset there is left out."""
    from hydra import compose, initialize_config_dir

    from trainwright.places import CONF
    from trainwright.scheduler import installed

    with initialize_config_dir(str(CONF), version_base="1.3"):
        trees = [compose("config", [f"launcher={kind}"]) for kind in sorted(installed())]
    paths = dict.fromkeys(str(tree.exp_manager.exp_dir) for tree in trees)
    return [path for path in paths if "<site." not in path]


def find_runs(folders: Sequence[Path]) -> list[Path]:
    """Return the directories of all runs below some exp_dirs, in the order of their names."""
    return [
        run
        for exp_dir in folders
        for name in _subfolders(exp_dir)
        for run in _subfolders(name)
        if os.path.isdir(RunPaths(run).events)
    ]


def find_sweeps(folders: Sequence[Path]) -> list[Path]:
    """Return the lists of jobs of all sweeps below some exp_dirs."""
    return [
        paths.jobs
        for exp_dir in folders
        for name in _subfolders(exp_dir)
        for sweep in _subfolders(SweepPaths.all_below(exp_dir, name.name))
        if (paths := SweepPaths(exp_dir, name.name, sweep.name)).jobs.is_file()
    ]


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
    if os.sep in word or os.path.isdir(RunPaths(word).events):
        return _at_path(word)
    runs = find_runs(folders)
    if _AGE.fullmatch(word):
        newest = sorted(runs, key=_created, reverse=True)
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
    path = Path(os.path.abspath(word))
    if RunPaths(path).events.is_dir():
        return _run(path)
    sweep = SweepPaths.at(path)
    if sweep.jobs.is_file():
        return _sweep(sweep)
    raise UserError(f"{word}: neither a run's directory nor a sweep's")


def _run(run: Path) -> Target:
    return Target(id=run.name, runs=(run,), is_sweep=False)


def _sweep(paths: SweepPaths) -> Target:
    listing = json.loads(paths.jobs.read_text(encoding="utf-8"))
    runs = tuple(Path(job["run_dir"]) for job in listing["jobs"])
    return Target(id=paths.sweep_dir.name, runs=runs, is_sweep=True)


def _created(run: Path) -> str:
    planned = events.find(RunPaths(run), [events.SUBMIT], [events.PLANNED])
    return planned[0].time if planned else ""


def _subfolders(folder: Path) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return
    yield from (folder / name for name in names)


def listed(folders: Sequence[Path]) -> str:
    """Return where runs were looked for, in words."""
    return ", ".join(map(str, folders)) or "any exp_dir, since none is set (--exp-dir PATH)"
