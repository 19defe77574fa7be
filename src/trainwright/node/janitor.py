"""Puts a directory of NxDT's checkpoints in order before NxDT looks at it, and says whether the run is resumed.

NxDT resumes from the newest `checkpoints/**/*.ckpt` by time of change, whether its save came to an end or not, and
NeMo below it fails on what an interrupted save leaves: it calls os.remove on a directory (nemo_toolkit 2.1.0,
exp_manager; neuronx-distributed-training, utils/exp_manager.py). So before each start, on one node:

- directories without `done`, which NxD writes last, are removed, and NeMo's `NAME-unfinished` markers,
- the newest complete checkpoint by STEP is made the newest by time,
- where checkpoints exist but none is complete, the run is refused: it would start from step 0 without a word.
"""

from __future__ import annotations

import os
import pickletools
import re
import shutil
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Sequence

DONE_FILE = "done"
_UNFINISHED = "-unfinished"
_STEP = re.compile(r"step=(\d+)")
_SHARD = re.compile(r"^dp_rank_(\d+)_.*tp_rank_(\d+)_pp_rank_(\d+)\.pt$")


class JanitorError(Exception):
    """A run that must not start as its directory stands. The message names what, why and the remedy."""


@dataclass(frozen=True)
class Checkpoint:
    """One directory that NxDT would take for a checkpoint."""

    path: Path
    step: int | None  # None: neither its name nor its content tells
    problem: str | None  # why it cannot be resumed from; None: it is complete
    is_interrupted: bool  # its save never came to an end; what else is wrong with one is damage


@dataclass(frozen=True)
class Order:
    """What the janitor leaves behind."""

    checkpoint: Checkpoint | None  # the one that NxDT will find; None: the run starts at step 0
    actions: tuple[str, ...]  # what was done, a line each


def tidy(checkpoints: Path, *, has_resumed: bool, may_ignore_damaged: bool = False) -> Order:
    """Put the directory in order and return what NxDT will find there.

    `has_resumed`: an attempt before this one found a complete checkpoint, so that there must be one.
    Raises JanitorError for a path that NxDT would misread, and where checkpoints exist but none is complete. One save
    that was interrupted before any was complete is no such case: nothing but the steps since the start is lost.
    """
    refuse_version_mark(checkpoints)
    found = look(checkpoints)
    complete = [one for one in found if one.problem is None]
    if not complete:
        _refuse_lost(checkpoints, found, has_resumed=has_resumed, may_ignore_damaged=may_ignore_damaged)
    actions = [_remove(one) for one in found if one.is_interrupted]
    if not complete and may_ignore_damaged:
        actions += [_set_aside(one) for one in found if not one.is_interrupted]
    actions += _remove_markers(checkpoints)
    if not complete:
        return Order(None, tuple(actions))
    newest = max(complete, key=lambda one: (-1 if one.step is None else one.step, one.path.stat().st_mtime))
    actions += [
        f"passed over {one.path.name}: {one.problem}; it stays"
        for one in found
        if one.problem and not one.is_interrupted
    ]
    actions += _make_newest(newest, [one for one in found if one is not newest and one.path.exists()])
    return Order(newest, tuple(actions))


def refuse_version_mark(checkpoints: Path) -> None:
    """Raise JanitorError for a path with "-v": NxDT cuts the path of a checkpoint at its first one."""
    if "-v" in str(checkpoints):
        before, _, after = str(checkpoints).partition("-v")
        raise JanitorError(
            f'{before}-v{after}: NxDT cuts the path of a checkpoint at the first "-v" (nlp_overrides, '
            f"_remove_version_count) and would save to {before}.ckpt; choose exp_manager.exp_dir, name and run_id "
            'without "-v"'
        )


def look(checkpoints: Path) -> list[Checkpoint]:
    """Return all that NxDT would take for checkpoints, sorted by path. Reads names and sizes only, mostly."""
    return [_judge(path) for path in sorted(checkpoints.glob("**/*.ckpt"))]


def global_step(user_content: Path) -> int | None:
    """Return the step that a checkpoint's own `user_content.pt` tells, without running its pickle; None: it does not.

    The pickle holds objects of OmegaConf and Lightning, which are not here; its text is enough: the key is followed by
    the number.
    """
    try:
        with zipfile.ZipFile(user_content) as archive:
            (name,) = [name for name in archive.namelist() if name.endswith("data.pkl")]
            content = archive.read(name)
        is_next = False
        for code, argument, _ in pickletools.genops(content):
            if isinstance(argument, str) and code.name.endswith("UNICODE"):
                is_next = argument == "global_step"
            elif is_next and isinstance(argument, int) and "PUT" not in code.name:
                return argument
            elif code.name not in ("BINPUT", "LONG_BINPUT", "MEMOIZE", "FRAME"):
                is_next = False
    except (OSError, ValueError, zipfile.BadZipFile):
        return None
    return None


def _judge(path: Path) -> Checkpoint:
    is_interrupted = path.is_dir() and not (path / DONE_FILE).exists()
    problem = "its save was interrupted: it has no `done`" if is_interrupted else _damage(path)
    step = _STEP.search(path.name)
    number = int(step.group(1)) if step else global_step(path / "user_content.pt")
    return Checkpoint(path, number, problem, is_interrupted)


def _damage(path: Path) -> str | None:
    """Return what a checkpoint lacks whose save came to an end; None: nothing that names and sizes show."""
    if not path.is_dir():
        return "it is a file, NxDT's checkpoints are directories"
    model = path / "model"
    if not model.is_dir():
        return "it has no model/"
    content = path / "user_content.pt"
    if not content.exists() or content.stat().st_size == 0:
        return "user_content.pt is missing or empty"
    shards = {match.group(0): match.groups() for name in os.listdir(model) for match in [_SHARD.match(name)] if match}
    if not shards:
        return "model/ has no shards"
    ranks = {(int(tensor), int(pipeline)) for _, tensor, pipeline in shards.values()}
    tensors, pipelines = max(t for t, _ in ranks) + 1, max(p for _, p in ranks) + 1
    missing = [(t, p) for p in range(pipelines) for t in range(tensors) if (t, p) not in ranks]
    if missing:
        t, p = missing[0]
        return f"model/ lacks {len(missing)} of {tensors * pipelines} shards, first tp_rank_{t:02d}_pp_rank_{p:02d}"
    empty = sorted(name for name in shards if (model / name).stat().st_size == 0)
    return f"model/{empty[0]} is empty" if empty else None


def _refuse_lost(
    checkpoints: Path, found: Sequence[Checkpoint], *, has_resumed: bool, may_ignore_damaged: bool
) -> None:
    damaged = [one for one in found if not one.is_interrupted]
    if may_ignore_damaged or (len(found) <= 1 and not damaged and not has_resumed):
        return
    why = "\n".join(f"  {one.path.name}: {one.problem}" for one in found) or "  there is none left"
    raise JanitorError(
        f"no checkpoint in {checkpoints} can be resumed from:\n{why}\n"
        "repair one, set exp_manager.resume_ignore_damaged=true to start this run at step 0, or start a new run "
        "by leaving run_id out"
    )


def _remove(one: Checkpoint) -> str:
    shutil.rmtree(one.path)
    return f"removed {one.path.name}: {one.problem}"


def _set_aside(one: Checkpoint) -> str:
    """Rename what NxDT would take for a checkpoint so that it does not; on request only."""
    aside = one.path.with_name(f"{one.path.name}.damaged")
    number = 1
    while aside.exists():
        number += 1
        aside = one.path.with_name(f"{one.path.name}.damaged{number}")
    one.path.rename(aside)
    return f"set aside {one.path.name} as {aside.name}: {one.problem}"


def _remove_markers(checkpoints: Path) -> list[str]:
    """Remove NeMo's markers, after their directories: one beside a complete checkpoint would get that deleted."""
    actions = []
    for marker in sorted(checkpoints.glob(f"**/*{_UNFINISHED}")):
        if marker.is_file():
            marker.unlink()
            actions.append(f"removed NeMo's marker {marker.name}")
    return actions


def _make_newest(newest: Checkpoint, others: Sequence[Checkpoint]) -> list[str]:
    latest = max((one.path.stat().st_mtime for one in others), default=0.0)
    if newest.path.stat().st_mtime > latest:
        return []
    os.utime(newest.path, (latest + 1, latest + 1))
    (by_time,) = [one.path.name for one in others if one.path.stat().st_mtime == latest][:1]
    return [f"made {newest.path.name} the newest by time, which {by_time} was"]
