"""Which checkpoints are found, resumed from and kept."""

import math
from pathlib import Path

import pytest
import yaml

from trainwright.backends.native.retention import (
    SavedCheckpoint,
    checkpoint_name,
    choose_resume,
    delete,
    saved_checkpoints,
    superseded,
    unused_path,
)
from trainwright.config_exp_manager import CheckpointCallbackParams
from trainwright.errors import UserError
from trainwright.node import commit
from trainwright.places import CONF


def _params(save_top_k: int, mode: str = "min", monitor: str = "val_loss") -> CheckpointCallbackParams:
    defaults = yaml.safe_load((CONF / "exp_manager" / "default.yaml").read_text())["checkpoint_callback_params"]
    return CheckpointCallbackParams.model_validate(
        {**defaults, "monitor": monitor, "mode": mode, "save_top_k": save_top_k}
    )


def _saved(values: dict[int, float | None]) -> list[SavedCheckpoint]:
    return [
        SavedCheckpoint(
            path=Path(f"val_loss=0.0-{step}"),  # a misleading name, which nobody reads
            step=step,
            consumed_samples=step,
            world_size=1,
            sample_requests=(),
            metrics={} if value is None else {"val_loss": value},
        )
        for step, value in values.items()
    ]


def _write(checkpoints: Path, step: int) -> Path:
    directory = checkpoints / f"step={step}"
    directory.mkdir(parents=True)
    (directory / "weights").write_bytes(b"0123456789")
    metadata = {"step": step, "consumed_samples": 4 * step, "world_size": 1, "metrics": {}, "sample_requests": []}
    commit.write_commit(directory, metadata)
    return directory


@pytest.mark.parametrize(
    ("values", "save_top_k", "mode", "kept"),
    [
        ({1: 3.0, 2: 1.0, 3: 2.0, 4: 9.0}, 2, "min", [2, 3, 4]),
        ({1: 3.0, 2: 1.0, 3: 2.0, 4: 9.0}, 2, "max", [1, 4]),
        ({1: 3.0, 2: 1.0, 3: 2.0}, 0, "min", [3]),
        ({1: 3.0, 2: 1.0, 3: 2.0}, -1, "min", [1, 2, 3]),
        ({1: math.nan, 2: math.inf, 3: 1.0, 4: math.nan}, 2, "min", [2, 3, 4]),
        ({1: math.nan, 2: -math.inf, 3: 1.0, 4: None}, 1, "max", [3, 4]),
        ({1: 2.0, 2: None, 3: None}, 3, "min", [1, 3]),
        ({1: 1e-05, 2: -1.0, 3: 5.0}, 1, "min", [2, 3]),
        ({1: 2.0, 2: 2.0, 3: 2.0}, 1, "min", [3]),
        ({}, 3, "min", []),
    ],
)
def test_the_newest_and_the_best_by_their_commits_are_kept(
    values: dict[int, float | None], save_top_k: int, mode: str, kept: list[int]
) -> None:
    deleted = {saved.step for saved in superseded(_saved(values), _params(save_top_k, mode))}
    assert sorted(set(values) - deleted) == kept


def test_step_can_be_monitored() -> None:
    deleted = superseded(_saved({1: 1.0, 2: 2.0, 3: 3.0}), _params(2, mode="max", monitor="step"))
    assert [saved.step for saved in deleted] == [1]


@pytest.mark.parametrize(
    ("template", "values", "name"),
    [
        (
            "{name}--{val_loss:.2f}-{step}-{consumed_samples}",
            {"name": "gpt", "val_loss": 8.014, "step": 50, "consumed_samples": 12800},
            "gpt--val_loss=8.01-step=50-consumed_samples=12800",
        ),
        ("{name}-{val_loss:.2f}-{step}", {"name": "gpt", "step": 5}, "gpt-val_loss=nan-step=5"),
        ("{step}", {"step": 1}, "step=1"),
    ],
)
def test_names_follow_nemos_template(template: str, values: dict[str, str | float], name: str) -> None:
    assert checkpoint_name(template, values) == name


def test_resume_takes_the_newest_by_step(tmp_path: Path) -> None:
    for step in (100, 9, 20):
        _write(tmp_path, step)
    resumed = choose_resume(tmp_path, may_be_none=True)
    assert resumed is not None
    assert (resumed.step, resumed.consumed_samples) == (100, 400)


def test_an_interrupted_save_is_swept_and_the_one_before_taken(tmp_path: Path) -> None:
    _write(tmp_path, 10)
    interrupted = _write(tmp_path, 20)
    (interrupted / commit.COMMIT_FILE).unlink()
    resumed = choose_resume(tmp_path, may_be_none=True)
    assert resumed is not None
    assert resumed.step == 10
    assert not interrupted.exists()


def test_a_flipped_byte_is_found_and_the_one_before_taken(tmp_path: Path) -> None:
    _write(tmp_path, 10)
    damaged = _write(tmp_path, 20)
    (damaged / "weights").write_bytes(b"01234X6789")
    resumed = choose_resume(tmp_path, may_be_none=True)
    assert resumed is not None
    assert resumed.step == 10
    assert damaged.exists()
    assert unused_path(damaged) == tmp_path / "step=20-v1"


def test_damaged_checkpoints_only_are_an_error_that_lists_each(tmp_path: Path) -> None:
    for step in (10, 20):
        (_write(tmp_path, step) / "weights").write_bytes(b"short")
    with pytest.raises(UserError, match=r"step=10: weights has 5 bytes, 10 .*\n.*step=20: weights"):
        choose_resume(tmp_path, may_be_none=True)
    assert len(list(tmp_path.iterdir())) == 2


def test_no_checkpoint_is_an_error_only_where_asked(tmp_path: Path) -> None:
    assert choose_resume(tmp_path / "checkpoints", may_be_none=True) is None
    with pytest.raises(UserError, match="resume_ignore_no_checkpoint=false"):
        choose_resume(tmp_path / "checkpoints", may_be_none=False)


def test_a_deleted_checkpoint_is_gone_from_the_list(tmp_path: Path) -> None:
    for step in (1, 2):
        _write(tmp_path, step)
    delete(saved_checkpoints(tmp_path)[0])
    assert [saved.step for saved in saved_checkpoints(tmp_path)] == [2]
