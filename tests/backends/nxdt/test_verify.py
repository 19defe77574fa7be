"""The verify stage tells a trained model from an untouched, a broken and a diverged one."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends.nxdt.runs import TEMPLATE, Record, Recorded, tiny_model, tiny_tensors, trained
from tests.checkpoint.models import write_model
from trainwright.backends.nxdt import export, verify
from trainwright.node.run_paths import RunPaths

NORM = "model.norm.weight"


def found(paths: RunPaths, step: int) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads(paths.verification(step).read_text())
    return tree


def exported(record: Record, tmp_path: Path, tensors: dict[str, torch.Tensor], *overrides: str) -> Recorded:
    tiny_model(tmp_path / "fsx" / "models" / "tanuki_8b")
    run = record(*overrides)
    trained(run, 50, tensors)
    assert run.stage(export.main) == 0
    return run


def test_differing_weights_are_counted_and_the_model_loads(
    record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = tiny_tensors()
    changed = tensors["model.layers.1.mlp.up_proj.weight"]  # [8, 16]
    changed[2, 3] += 2.0
    changed[7, 15] -= 4.0
    run = exported(record, tmp_path, tensors, f"model.chat_template='{TEMPLATE}'")
    assert run.stage(verify.main) == 0
    report = found(run.paths, 50)
    total = sum(tensor.numel() for tensor in tensors.values())
    assert (report["weights"], report["weights_differing"], report["tensors_differing"]) == (total, 2, 1)
    assert report["share_differing"] == 2 / total
    assert 3.9 < report["largest_difference"] < 4.1  # bf16 rounds the sum
    assert (report["problems"], report["warnings"], report["dtypes"]) == ([], [], ["bfloat16"])
    told = capsys.readouterr().out
    assert "model.layers.1.mlp.up_proj.weight" in told
    assert f"written to {run.paths.verification(50)}" in told


def test_a_model_that_training_did_not_change_is_a_warning(
    record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = exported(record, tmp_path, tiny_tensors())
    assert run.stage(verify.main) == 0
    assert "warning: not one weight differs" in capsys.readouterr().out
    assert found(run.paths, 50)["weights_differing"] == 0


def test_values_that_are_no_numbers_fail(record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = tiny_tensors()
    tensors[NORM][:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    run = exported(record, tmp_path, tensors)
    assert run.stage(verify.main) == 1
    assert f"error: {NORM} has 1 NaN and 2 infinite values of 16" in capsys.readouterr().err
    assert (found(run.paths, 50)["nan"], found(run.paths, 50)["infinite"]) == (1, 2)


def test_a_template_that_does_not_render_and_a_model_that_is_not_the_bases_fail(
    record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = exported(record, tmp_path, tiny_tensors(seed=4), "model.chat_template='{{ nothing.of.it }}'")
    base = tmp_path / "fsx" / "models" / "tanuki_8b"
    shutil.rmtree(base)
    tensors = {name: tensor.float() for name, tensor in tiny_tensors().items()}
    write_model(base, json.loads((run.paths.export(50) / "config.json").read_text()), tensors)
    assert run.stage(verify.main) == 1
    told = capsys.readouterr().err
    assert f"error: {NORM} is bfloat16, not float32" in told
    assert "the chat template does not render" in told


def test_a_damaged_export_is_not_verified_in_place_of_a_whole_one(
    record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = exported(record, tmp_path, tiny_tensors(seed=4))
    (run.paths.export(50) / "model-00001-of-00002.safetensors").write_bytes(b"short")
    assert run.stage(verify.main) == 2
    told = capsys.readouterr().err
    assert "no complete export is there; run the stage export (stages_from=export)" in told
    assert "error: step=50: model-00001-of-00002.safetensors has 5 bytes" in told
