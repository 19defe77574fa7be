"""Puts NeMo's checkpoints in order before NeMo starts, and chooses the one that a run goes on from.

What NeMo itself would do (1.23.0 and 2.7.3, exp_manager.check_resume and NeMoModelCheckpoint): it looks for names that
end in `-last`, fails if there are two, starts at step 0 if there is none whatever else is there, takes one that was cut
short, and fails on any checkpoint whose name has `nan` where it looks for the metric. So it is not asked: it is told by
`resume_from_checkpoint`, with `resume_if_exists` false, which turns all of that off (see `nemo_config`). The best
checkpoints and the last one it then knows from the state in the checkpoint. What is left to put in order:

- a save or removal that was interrupted is removed, with its marker: a save of that name would be skipped (1.23, if it
  has metadata.json) or refused (if it has none), and NeMo 2.7 removes what has a marker, or fails to,
- a checkpoint that is newer than the chosen one and broken is set aside for the same reason, not removed,
- a `-last` that a newer one has replaced is removed, as NeMo was about to,
- NeMo counts the folders `run_0`, `run_1` and so on for the next name, and fails where one was removed before the last.

Nothing is renamed where it lies: a bucket has no rename, and no checkpoint's name needs to change.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import List, Sequence, Tuple

from .janitor import JanitorError
from .nemo_checkpoints import MARKER, Checkpoint, find, problem


@dataclass(frozen=True)
class Order:
    """What the janitor leaves behind."""

    checkpoint: Checkpoint | None  # the one to resume from; None: there is none
    actions: Tuple[str, ...]  # what was done, a line each


@dataclass(frozen=True)
class _Broken:
    checkpoint: Checkpoint
    why: str


def tidy(
    checkpoints: Path,
    damaged: Path,
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    needs_averaged: bool = False,
    has_resumed: bool = False,
    may_ignore_damaged: bool = False,
) -> Order:
    """Put the directory in order and return the newest whole checkpoint in it. `damaged` is for what is set aside.

    `has_resumed`: an attempt before this one has found a checkpoint, so that there must be one.
    Raises JanitorError, before anything was changed, where checkpoints exist but none is whole. One save that was
    interrupted before any was whole is no such case: nothing but the steps since the start is lost.
    """
    found = find(checkpoints, tensor_parallel=tensor_parallel, pipeline_parallel=pipeline_parallel)
    chosen, broken, spared = _choose(found, needs_averaged)
    if chosen is None:
        _refuse_lost(checkpoints, broken, has_resumed=has_resumed, may_ignore_damaged=may_ignore_damaged)
    why = {one.checkpoint.name: one.why for one in broken}
    actions: List[str] = []
    for one in found:
        if one is chosen or one.step is None or one.name in spared:
            continue
        if one.interrupted is not None or one.is_marked:
            actions.append(_remove(one, one.interrupted or "NeMo's marker says that it is unfinished"))
        elif one.name in why:
            actions.append(_set_aside(one, damaged, why[one.name]))
        elif chosen is not None and chosen.is_last and one.is_last:
            actions.append(_remove(one, f"{chosen.name} has replaced it"))
    actions += [f"left {one.checkpoint.name}: {one.why}" for one in broken if one.checkpoint.step is None]
    return Order(chosen, (*actions, *_remove_markers(checkpoints)))


def prepare_archive(log_dir: Path) -> Tuple[str, ...]:
    """Make the name free under which NeMo puts away the files of the process before: `run_` and how many there are."""
    made: List[str] = []
    while True:
        taken = {path.name for path in log_dir.glob("run_*") if path.is_dir()}
        if f"run_{len(taken)}" not in taken:
            return tuple(made)
        number = next(number for number in range(len(taken)) if f"run_{number}" not in taken)
        (log_dir / f"run_{number}").mkdir(parents=True)
        made.append(f"made an empty run_{number}: NeMo would have failed at making run_{len(taken)} once more")


def _choose(
    found: Sequence[Checkpoint], needs_averaged: bool
) -> Tuple[Checkpoint | None, List[_Broken], Tuple[str, ...]]:
    """Return the newest whole checkpoint, what is broken among the newer ones, and names whose marker is wrong.

    Markers that NeMo did not come to remove (its issue 14994) count for nothing where there is nothing else.
    """
    broken: List[_Broken] = []
    unmarked = [one for one in reversed(found) if not one.is_marked]
    for one in unmarked:
        why = problem(one, needs_averaged=needs_averaged)
        if why is None:
            return one, broken, ()
        broken.append(_Broken(one, why))
    marked = [one for one in reversed(found) if one.is_marked]
    whys = {one.name: problem(one, needs_averaged=needs_averaged) for one in marked}
    broken += [_Broken(one, f"NeMo's marker is beside it; {whys[one.name]}") for one in marked if whys[one.name]]
    whole = [one for one in marked if whys[one.name] is None]
    if not whole:
        return None, broken, ()
    newer = [one for one in broken if one.checkpoint.age_key > whole[0].age_key]
    return whole[0], newer, tuple(one.name for one in whole)


def _refuse_lost(checkpoints: Path, broken: Sequence[_Broken], *, has_resumed: bool, may_ignore_damaged: bool) -> None:
    cut = [one for one in broken if one.checkpoint.interrupted is not None or one.checkpoint.is_marked]
    is_first_save = len(broken) <= 1 and broken == cut
    if may_ignore_damaged or (is_first_save and not has_resumed):
        return
    why = "\n".join(f"  {one.checkpoint.name}: {one.why}" for one in broken) or "  there is none left"
    raise JanitorError(
        f"no checkpoint in {checkpoints} can be resumed from:\n{why}\n"
        "repair one, set exp_manager.resume_ignore_damaged=true to start this run at step 0, or start a new run "
        "by leaving run_id out"
    )


def _remove(one: Checkpoint, why: str) -> str:
    for path in one.paths:
        if path.is_dir():
            (path / "metadata.json").unlink(missing_ok=True)  # first: a removal that is cut short must show
            shutil.rmtree(path)
        else:
            path.unlink()
    return f"removed {one.name}: {why}"


def _set_aside(one: Checkpoint, damaged: Path, why: str) -> str:
    """Move what NeMo would take for a checkpoint out of its sight; between buckets' folders that is a copy."""
    folder = damaged / one.name
    number = 1
    while folder.exists():
        number += 1
        folder = damaged / f"{one.name}.{number}"
    for path in one.paths:
        target = folder / (path.name if path.is_dir() else f"{path.parent.name}-{path.name}")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(path, target)
        except OSError:
            if path.is_dir():
                shutil.copytree(path, target, copy_function=shutil.copyfile)
                shutil.rmtree(path)
            else:
                shutil.copyfile(path, target)
                path.unlink()
    return f"set aside {one.name} in {folder}: {why}"


def _remove_markers(checkpoints: Path) -> List[str]:
    """Remove NeMo's markers: what they stood for is gone, or was found to be whole."""
    actions = []
    for marker in sorted(checkpoints.glob(f"*{MARKER}")):
        if marker.is_file():
            marker.unlink()
            actions.append(f"removed NeMo's marker {marker.name}")
    return actions
