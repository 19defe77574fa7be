"""The export stage writes the newest complete checkpoint as the base model but for its values."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.backends.nxdt.runs import TEMPLATE, Record, tiny_model, tiny_tensors, trained
from tests.checkpoint.models import differing, read_model, tree
from trainwright.backends.nxdt import export
from trainwright.checkpoint.nxd_checkpoint import shard_name
from trainwright.node import commit


def test_the_newest_complete_checkpoint_is_exported_in_the_bases_types_files_and_names(
    record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tiny_model(tmp_path / "fsx" / "models" / "tanuki_8b")
    run = record(f"model.chat_template='{TEMPLATE}'")
    for step in (9, 50, 100):
        trained(run, step, tiny_tensors(seed=step), is_done=step != 100)
    assert run.stage(export.main) == 0
    written = run.paths.export(50)
    assert not differing(read_model(written), tiny_tensors(seed=50))  # bf16 again, bit for bit
    theirs, ours = (
        json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"] for folder in (base, written)
    )
    assert theirs == ours
    for name in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (written / name).read_bytes() == (base / name).read_bytes()
    assert json.loads((written / "tokenizer_config.json").read_text())["chat_template"] == TEMPLATE
    assert commit.read_commit(written) is not None
    before = tree(run.paths.exports)
    capsys.readouterr()
    assert run.stage(export.main) == 0
    assert f"{written} is there, from the same values" in capsys.readouterr().out
    assert tree(run.paths.exports) == before


def test_an_older_export_stays_and_one_that_was_killed_is_done_again(record: Record, tmp_path: Path) -> None:
    tiny_model(tmp_path / "fsx" / "models" / "tanuki_8b")
    run = record()
    trained(run, 50, tiny_tensors(seed=50))
    assert run.stage(export.main) == 0
    first = tree(run.paths.export(50))
    shutil.rmtree(trained(run, 100, tiny_tensors(seed=100)).parent / "hf_tanuki--step=50-consumed_samples=400.0.ckpt")
    assert run.stage(export.main) == 0
    (run.paths.export(100) / "commit.json").unlink()
    assert run.stage(export.main) == 0
    assert commit.read_commit(run.paths.export(100)) is not None
    assert tree(run.paths.export(50)) == first


def test_without_a_complete_checkpoint_each_is_listed_with_its_reason(
    record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model(tmp_path / "fsx" / "models" / "tanuki_8b")
    run = record()
    trained(run, 50, tiny_tensors(), is_done=False)
    shutil.rmtree(trained(run, 100, tiny_tensors()) / "model")
    assert run.stage(export.main) == 2
    told = capsys.readouterr().err.splitlines()
    assert "no complete checkpoint is there to export; train first (stages_from=train)" in told[0]
    assert told[1:] == [
        "error: hf_tanuki--step=100-consumed_samples=800.0.ckpt: it has no model/",
        "error: hf_tanuki--step=50-consumed_samples=400.0.ckpt: its save was interrupted: it has no `done`",
    ]


def test_an_export_made_of_other_values_of_that_step_is_not_taken_for_it(
    record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model(tmp_path / "fsx" / "models" / "tanuki_8b")
    run = record()
    trained(run, 50, tiny_tensors(seed=1))
    assert run.stage(export.main) == 0
    shutil.rmtree(run.paths.checkpoints)
    trained(run, 50, tiny_tensors(seed=2))
    assert run.stage(export.main) == 2
    assert "complete, but made from other values of" in capsys.readouterr().err


def test_copies_that_came_apart_are_refused_with_the_command_that_averages_them(
    record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model(tmp_path / "fsx" / "models" / "tanuki_8b")
    run = record()
    checkpoint = trained(run, 50, tiny_tensors())
    tensors = (checkpoint / "model" / f"{shard_name(2, 0)}.tensors").iterdir()
    (norm, *_) = [path for path in sorted(tensors) if torch.load(path, weights_only=True).shape == (16,)]
    torch.save(torch.load(norm, weights_only=True) + 1, norm)
    assert run.stage(export.main) == 2
    told = capsys.readouterr().err
    assert "--on-difference average takes their mean: trainwright convert nxd-to-hf --input" in told
    assert not any(run.paths.export(50).iterdir())
