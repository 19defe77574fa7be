"""Trees like those that NxDT and NeMo leave, some of them by a save that was interrupted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainwright.node.foreign_checkpoints import saved_checkpoints

NXDT = "hf_tanuki--step=50-consumed_samples=328.0.ckpt"
NEMO = "megatron_gpt--val_loss=8.01-step=50-consumed_samples=12800.0"


def tree(folder: Path, *files: str) -> None:
    """Write files of ten bytes, each ten seconds after the one before."""
    for number, name in enumerate(files):
        path = folder / "checkpoints" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(10))
        os.utime(path, (1e9, 1e9 + 10 * number))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param((f"{NXDT}/checkpoint", f"{NXDT}/model/a.pt", f"{NXDT}/done"), (NXDT, 30, 20.0), id="nxdt"),
        pytest.param((f"{NXDT}/checkpoint", f"{NXDT}/model/a.pt"), None, id="nxdt, interrupted"),
        pytest.param((f"{NEMO}/common.pt", f"{NEMO}/metadata.json"), (NEMO, 20, 10.0), id="nemo"),
        pytest.param((f"{NEMO}-last/common.pt", f"{NEMO}-last/metadata.json"), (f"{NEMO}-last", 20, 10.0), id="last"),
        pytest.param((f"{NEMO}/common.pt",), None, id="nemo, interrupted"),
        pytest.param((f"{NEMO}/metadata.json", f"{NEMO}-unfinished"), None, id="nemo, marked"),
        pytest.param((f"{NEMO}.ckpt",), (f"{NEMO}.ckpt", 10, None), id="file"),
        pytest.param((f"{NEMO}.ckpt", f"{NEMO}-unfinished"), None, id="file, marked"),
        pytest.param((f"{NEMO}.ckpt", f"{NEMO}-EMA.ckpt"), (f"{NEMO}.ckpt", 10, None), id="average beside it"),
        pytest.param(
            (f"mp_rank_00/{NEMO}.ckpt", f"mp_rank_01/{NEMO}.ckpt"), (f"{NEMO}.ckpt", 20, 10.0), id="a file a rank"
        ),
        pytest.param((f"tp_rank_00_pp_rank_001/{NEMO}.ckpt", f"{NEMO}-unfinished"), None, id="a file a rank, marked"),
        pytest.param(("megatron_gpt.nemo", "notes.txt"), None, id="no checkpoint"),
        pytest.param((), None, id="nothing"),
    ],
)
def test_complete_checkpoints_are_listed(
    tmp_path: Path, files: tuple[str, ...], expected: tuple[str, int, float | None] | None
) -> None:
    tree(tmp_path, *files)
    found = saved_checkpoints(tmp_path, tmp_path / "checkpoints")
    assert [(saved["name"], saved["bytes"], saved["save_s"]) for saved in found] == ([expected] if expected else [])
    assert all(saved["step"] == 50 and (tmp_path / saved["path"]).exists() for saved in found)


def test_the_oldest_step_comes_first(tmp_path: Path) -> None:
    names = [f"tanuki--step={step}.ckpt" for step in (100, 50, 9)]
    tree(tmp_path, *(f"{name}/done" for name in names))
    assert [saved["step"] for saved in saved_checkpoints(tmp_path, tmp_path / "checkpoints")] == [9, 50, 100]
