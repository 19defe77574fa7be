"""Checkpoints as NeMo and megatron-core lay them out, small, and what a kill leaves of them."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

TEMPLATE = "megatron_gpt--val_loss={loss}-step={step}-consumed_samples={consumed}{suffix}"


def name_of(step: int, *, loss: str = "8.01", suffix: str = "", consumed: str | None = None) -> str:
    """The name that NeMo gives a checkpoint of the first article, whose batch is 256."""
    return TEMPLATE.format(loss=loss, step=step, consumed=consumed or f"{step * 256}.0", suffix=suffix)


def distributed(checkpoints: Path, name: str, *, is_whole: bool = True, lacks: str | None = None) -> Path:
    """A directory as megatron-core 0.5 writes it, tensors in zarr. Not whole: killed before metadata.json."""
    path = checkpoints / name
    tensor = path / "model.embedding.word_embeddings.weight"
    tensor.mkdir(parents=True)
    header = {"chunks": [2, 4], "shape": [4, 4], "dtype": "<f4", "compressor": None, "order": "C", "zarr_format": 2}
    (tensor / ".zarray").write_text(json.dumps(header))
    for chunk in ("0.0", "1.0"):
        (tensor / chunk).write_bytes(bytes(32))
    state = path / "model.embedding._extra_state" / "shard_0_1.pt"  # an object of which each rank has a part
    archive(state)
    archive(path / "common.pt")
    if is_whole:
        (path / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    if lacks is not None:
        (path / lacks).unlink()
    return path


def archive(path: Path, *, is_whole: bool = True) -> Path:
    """A file as torch.save writes it: a zip, whose directory comes last."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", bytes(200))
    if not is_whole:
        path.write_bytes(path.read_bytes()[:100])
    return path


def ranks(checkpoints: Path, name: str, *, folders: tuple[str, ...] = ("mp_rank_00", "mp_rank_01")) -> list[Path]:
    """A file for each rank of a model in parts."""
    return [archive(checkpoints / folder / f"{name}.ckpt") for folder in folders]


def marker(checkpoints: Path, name: str) -> Path:
    """What NeMo 2.x puts beside a checkpoint while it writes or removes it."""
    path = checkpoints / f"{name}-unfinished"
    path.touch()
    return path
