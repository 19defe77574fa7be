"""The complete checkpoints of NxDT and NeMo, their sizes, and how long it took to write them.

NxDT: a directory `NAME.ckpt`, in which `checkpoint` is written first and `done` last (neuronx_distributed/trainer).
NeMo: a directory with `metadata.json`, or a file `NAME.ckpt`, also one a rank in `mp_rank_00/` and the like; a file
`NAME-unfinished` lies beside it while it is written or deleted (nemo/utils/callbacks/nemo_model_checkpoint.py).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

_STEP = re.compile(r"step=(\d+)")
_RANK_FOLDER = re.compile(r"^(mp_rank_\d+|tp_rank_\d+_pp_rank_\d+|fsdp_shard_\d+)")
_MARKER = "-unfinished"
_AVERAGED = "-EMA"  # weights only, beside the checkpoint that they belong to


def saved_checkpoints(run_dir: Path, checkpoints: Path) -> list[dict[str, Any]]:
    """Return the complete checkpoints as results.json lists them, oldest step first.

    Times run from the first file that was written to the last one; None: there is one file only, or none of its times.
    """
    entries = _entries(checkpoints)
    unfinished = {name for name in entries if name.endswith(_MARKER)}
    found = []
    for name, parts in entries.items():
        step = _STEP.search(name)
        plain = name[: -len(".ckpt")] if name.endswith(".ckpt") else name
        if step is None or plain.endswith((_MARKER, _AVERAGED)) or name.endswith(".nemo"):
            continue
        if not _is_complete(parts[0], plain + _MARKER in unfinished):
            continue
        times, size = _measure(parts)
        found.append(
            {
                "step": int(step.group(1)),
                "path": parts[0].relative_to(run_dir).as_posix(),
                "metrics": {},
                "name": name,
                "bytes": size,
                "save_s": max(times) - min(times) if len(times) > 1 else None,
            }
        )
    return sorted(found, key=lambda saved: (saved["step"], saved["name"]))


def _entries(checkpoints: Path) -> dict[str, list[Path]]:
    """Return files and directories by the name of the checkpoint; of one in rank folders, a file for each rank."""
    entries: dict[str, list[Path]] = {}
    if not checkpoints.is_dir():
        return entries
    for path in sorted(checkpoints.iterdir()):
        members = sorted(path.iterdir()) if path.is_dir() and _RANK_FOLDER.match(path.name) else [path]
        for member in members:
            entries.setdefault(member.name, []).append(member)
    return entries


def _is_complete(path: Path, is_marked: bool) -> bool:
    if (path / "done").is_file():
        return True
    if path.is_dir() and not (path / "metadata.json").is_file():
        return False
    return not is_marked


def _measure(parts: list[Path]) -> tuple[list[float], int]:
    """Return when each file was last written, and the bytes of all of them."""
    files = [part for part in parts if part.is_file()]
    for part in parts:
        files += [Path(folder, name) for folder, _, names in os.walk(part) for name in names]
    states = [file.stat() for file in files]
    return [state.st_mtime for state in states], sum(state.st_size for state in states)
