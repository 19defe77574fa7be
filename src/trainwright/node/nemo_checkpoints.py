"""What NeMo has saved in a directory: which checkpoints there are, of which step, and whether one is whole.

    distributed  a directory: metadata.json, which megatron-core writes last, common.pt, and the tensors as torch_dist
                 (.metadata and *.distcp) or as zarr (a folder for each tensor)
    file         NAME.ckpt
    ranks        mp_rank_00/NAME.ckpt or tp_rank_00_pp_rank_000/NAME.ckpt and so on, a file for each rank

Beside one lies `NAME-unfinished` while NeMo 2.x writes or deletes it; `NAME-EMA.ckpt` holds averaged weights.
Sources: NeMo 1.23.0 and 2.7.3, nemo_model_checkpoint.py and model_utils.py; megatron-core 0.5.0 and 0.16.1,
dist_checkpointing.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import re
import zipfile
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Dict, List, Sequence, Tuple

MARKER = "-unfinished"
_METADATA = "metadata.json"
_EXTENSION = ".ckpt"
_AVERAGED = "-EMA"
_STEP = re.compile(r"step=(\d+)")
_CONSUMED = re.compile(r"consumed_samples\=([0-9]+.[0-9]+)")  # NeMo's own; the point stands for any character
_LAST = re.compile(r"-last(-v(\d+))?$")
# What megatron-core writes: common.pt, shards, hidden files, drafts; for each tensor or object a folder of parts.
_SAVED = re.compile(r"^(common\.pt|.*\.distcp|\..*|.*\.tmp)$")
_PART = re.compile(r"^(\.|\d+(\.\d+)*(\.|$)|shard_.*\.pt)")
_RANK_FOLDER = re.compile(r"^(mp_rank_\d+|tp_rank_\d+_pp_rank_\d+|fsdp_shard_\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint, all its files together."""

    name: str  # without the extension
    paths: Tuple[Path, ...]  # a directory, or the file of each rank; files of averaged weights are behind these
    layout: str  # distributed, file or ranks
    resume_path: Path  # what NeMo takes for `resume_from_checkpoint`; of ranks, it adds their folders itself
    step: int | None  # None: the name does not tell
    is_marked: bool  # NeMo was writing or deleting it
    interrupted: str | None  # how it shows that its save never came to an end; None: it does not
    unfit: str | None = None  # why the ranks of this run cannot take it, by the names of its files; None: they can

    @property
    def is_last(self) -> bool:
        """Whether it is one that NeMo keeps beside the best, and replaces at each save."""
        return _LAST.search(self.name) is not None

    @property
    def age_key(self) -> Tuple[int, bool, int]:
        """Sorts older before newer. Of one step, a `-last` is the later save, and of those a higher version."""
        last = _LAST.search(self.name)
        return (-1 if self.step is None else self.step, last is not None, int(last.group(2) or 0) if last else 0)

    @property
    def has_consumed_samples(self) -> bool:
        return _CONSUMED.search(str(self.resume_path)) is not None


def find(checkpoints: Path, *, tensor_parallel: int = 1, pipeline_parallel: int = 1) -> List[Checkpoint]:
    """Return all checkpoints, oldest first. Looks at names, and for metadata.json.

    A directory that is no checkpoint, by name or content, is none of them.
    """
    if not checkpoints.is_dir():
        return []
    files: Dict[str, List[Path]] = {}
    found: List[Checkpoint] = []
    marked = {name[: -len(MARKER)] for name in os.listdir(checkpoints) if name.endswith(MARKER)}
    for path in sorted(checkpoints.iterdir()):
        if not path.is_dir():
            members = [path]
        elif _RANK_FOLDER.match(path.name):
            members = sorted(path.iterdir())
        else:
            name = path.name[: -len(_EXTENSION)] if path.name.endswith(_EXTENSION) else path.name
            found += _distributed(path, name, name in marked)
            continue
        for member in members:
            if member.name.endswith(_EXTENSION):
                files.setdefault(member.name[: -len(_EXTENSION)], []).append(member)
    ranks = _rank_folders(tensor_parallel, pipeline_parallel)
    for name in files:
        if not name.endswith(_AVERAGED):
            averaged = files.get(name + _AVERAGED, [])
            found.append(_of_files(checkpoints, name, files[name], averaged, ranks, name in marked))
    return sorted(found, key=lambda one: (one.age_key, one.name))


def problem(one: Checkpoint, *, needs_averaged: bool = False) -> str | None:
    """Return why NeMo cannot go on from a checkpoint; None: it can, by all that names, sizes and indices tell.

    `needs_averaged`: the run averages weights, and NeMo looks for them beside the checkpoint.
    """
    if one.interrupted is not None or one.unfit is not None:
        return one.interrupted or one.unfit
    if one.step is None:
        return "its name does not tell the step"
    if not one.has_consumed_samples:
        return "its name does not tell consumed_samples as digits with a point: NeMo would begin the data anew"
    if one.layout == "distributed":
        return _distributed_problem(one.resume_path)
    if needs_averaged and not any(path.stem.endswith(_AVERAGED) for path in one.paths):
        return f"{one.name}{_AVERAGED}{_EXTENSION} is missing, from which exp_manager.ema goes on"
    for path in one.paths:
        if not zipfile.is_zipfile(path):  # torch writes one; its directory comes last
            return f"{path.parent.name}/{path.name} was cut short"
    return None


def _distributed(path: Path, name: str, is_marked: bool) -> List[Checkpoint]:
    step = _STEP.search(name)
    has_metadata = (path / _METADATA).is_file()
    if step is None and not has_metadata:
        return []
    interrupted = unfit = None
    if not has_metadata:
        foreign = _foreign_part(path)
        if foreign is None:
            interrupted = f"its save was interrupted: it has no {_METADATA}"
        else:
            is_marked = False  # whatever NeMo was at, it was not this
            unfit = f"it has no {_METADATA}, and holds {foreign}, which NeMo does not write: it is no save of NeMo's"
    number = int(step.group(1)) if step else None
    return [Checkpoint(name, (path,), "distributed", path, number, is_marked, interrupted, unfit)]


def _foreign_part(path: Path) -> str | None:
    """Return what megatron-core does not put into a checkpoint; None: nothing is there but what it writes."""
    for part in sorted(path.iterdir()):
        if not (_SAVED.search(part.name) or (part.is_dir() and _is_of_parts(part))):
            return part.name
    return None


def _is_of_parts(folder: Path) -> bool:
    """Return whether a folder is of one tensor or object: its header and parts, as far as these came to be written."""
    return all(_PART.match(name) for name in os.listdir(folder))


def _of_files(
    checkpoints: Path,
    name: str,
    paths: Sequence[Path],
    averaged: Sequence[Path],
    ranks: Sequence[str],
    is_marked: bool,
) -> Checkpoint:
    step = _STEP.search(name)
    folders = [path.parent.name for path in paths if path.parent != checkpoints]
    return Checkpoint(
        name,
        (*paths, *averaged),
        "ranks" if folders else "file",
        checkpoints / f"{name}{_EXTENSION}",
        int(step.group(1)) if step else None,
        is_marked,
        None,
        _unfit(folders, ranks),
    )


def _unfit(folders: Sequence[str], ranks: Sequence[str]) -> str | None:
    """Compare the ranks that have saved with those that will load. What is missing may be of a run of other degrees."""
    missing = [folder for folder in ranks if folder not in folders]
    if any("fsdp_shard" in folder for folder in folders):
        return None  # a file for each data parallel rank: no name tells how many there are to be
    if not folders:
        return f"it is of a model in one piece, this run's is in {len(ranks)}" if ranks else None
    if not ranks:
        return f"it is of a model in {len(folders)} pieces, this run's is in one"
    return f"{len(missing)} of {len(ranks)} ranks are missing, first {missing[0]}" if missing else None


def _rank_folders(tensor: int, pipeline: int) -> List[str]:
    """Return the folders in which ranks save; none for a model in one piece."""
    if pipeline > 1:
        return [f"tp_rank_{t:02d}_pp_rank_{p:03d}" for t in range(tensor) for p in range(pipeline)]
    return [f"mp_rank_{t:02d}" for t in range(tensor)] if tensor > 1 else []


# ---- distributed checkpoints


def _distributed_problem(path: Path) -> str | None:
    try:
        backend = json.loads((path / _METADATA).read_text(encoding="utf-8"))["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{_METADATA} cannot be read: {error}"
    common = path / "common.pt"
    if not common.is_file() or not zipfile.is_zipfile(common):
        return "common.pt is missing or was cut short"
    if backend == "torch_dist":
        return _torch_dist_problem(path)
    if backend == "zarr":
        return _zarr_problem(path)
    return f"its tensors are stored as {backend!r}, which trainwright does not know"


def _torch_dist_problem(path: Path) -> str | None:
    """Compare the files of shards with what `.metadata` says of them."""
    try:
        with open(path / ".metadata", "rb") as file:
            ends = _shard_ends(file)
    except (OSError, ValueError, pickle.UnpicklingError, EOFError, AttributeError, KeyError, TypeError) as error:
        return f".metadata cannot be read: {error}"
    for name, end in sorted(ends.items()):
        shard = path / name
        size = shard.stat().st_size if shard.is_file() else None
        if size is None:
            return f"{name} is missing"
        if size < end:
            return f"{name} was cut short: {size} bytes, .metadata speaks of {end}"
    return None


def _shard_ends(file: IO[bytes]) -> Dict[str, int]:
    """Return for each file of shards the byte behind its last tensor."""
    ends: Dict[str, int] = {}
    for info in _Metadata(file).load().storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    if not ends:
        raise ValueError("it names no files")
    return ends


class _Metadata(pickle.Unpickler):
    """Reads a pickle of torch's objects without torch, and without running anything that a pickle may name."""

    def find_class(self, module: str, name: str) -> Any:
        return OrderedDict if (module, name) == ("collections", "OrderedDict") else _Anything

    def persistent_load(self, pid: Any) -> Any:
        return None


class _Anything:
    """An object of which only the attributes count."""

    def __new__(cls, *arguments: Any, **named: Any) -> _Anything:
        return object.__new__(cls)

    def __init__(self, *arguments: Any, **named: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, dict):
                self.__dict__.update(part)

    def append(self, item: Any) -> None: ...

    def extend(self, items: Any) -> None: ...

    def __setitem__(self, key: Any, item: Any) -> None: ...


def _zarr_problem(path: Path) -> str | None:
    """Count the chunks of each tensor. megatron-core writes all of them, those of zeros too."""
    num_tensors = 0
    for folder in sorted(child for child in path.iterdir() if (child / ".zarray").is_file()):
        num_tensors += 1
        try:
            header = json.loads((folder / ".zarray").read_text(encoding="utf-8"))
            shape, chunks = header["shape"], header["chunks"]
            counts = [math.ceil(size / max(chunks[axis], 1)) for axis, size in enumerate(shape)]
        except (OSError, ValueError, LookupError, TypeError) as error:
            return f"{folder.name}/.zarray cannot be read: {error}"
        expected = 1
        for count in counts:
            expected *= count
        there = 0
        for name in os.listdir(folder):
            if not name.startswith("."):
                there += 1
                if not (folder / name).stat().st_size:
                    return f"{folder.name}/{name} is empty"
        if there < expected:
            return f"{folder.name} has {there} of {expected} chunks"
    return None if num_tensors else "it holds no tensors"
