"""Damaged checkpoints and disks that do not take new ones: nothing is lost, and the message says what to do."""

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.backends.native.misfortune import enlarge, small_disk, with_small_files, without_override
from tests.backends.native.ranks import join, start_ranks
from tests.backends.native.runs import MakeConfig, forget_after, losses
from trainwright.backends.native.retention import saved_checkpoints
from trainwright.backends.native.train import train
from trainwright.errors import UserError
from trainwright.node import commit

SAVE_AT_2_4_6_8 = {
    "model__attention_dropout": 0.1,
    "exp_manager__checkpoint_callback_params__every_n_train_steps": 2,
    "exp_manager__checkpoint_callback_params__save_top_k": -1,
}


def _steps(run_dir: Path) -> list[int]:
    return [saved.step for saved in saved_checkpoints(run_dir / "checkpoints")]


def _largest_file(checkpoint: Path) -> Path:
    return max(checkpoint.iterdir(), key=lambda path: path.stat().st_size)


def _truncate(checkpoint: Path) -> None:
    os.truncate(_largest_file(checkpoint), 1000)


def _flip_a_byte(checkpoint: Path) -> None:
    path = _largest_file(checkpoint)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _delete_a_shard(checkpoint: Path) -> None:
    _largest_file(checkpoint).unlink()


def _delete_the_commit(checkpoint: Path) -> None:
    (checkpoint / commit.COMMIT_FILE).unlink()


def _truncate_the_commit(checkpoint: Path) -> None:
    os.truncate(checkpoint / commit.COMMIT_FILE, 100)


@pytest.mark.parametrize("damage", [_truncate, _flip_a_byte, _delete_a_shard, _delete_the_commit, _truncate_the_commit])
def test_a_damaged_checkpoint_is_named_and_the_one_before_continues_bit_for_bit(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    config = make_config(**SAVE_AT_2_4_6_8)
    train(config, tmp_path, 1)
    newest = saved_checkpoints(tmp_path / "checkpoints")[-1].path
    damage(newest)
    train(config, tmp_path, 2)
    assert str(newest) in caplog.text
    whole = losses(tmp_path)
    assert losses(tmp_path, attempt=2) == {step: whole[step] for step in (7, 8)}
    assert _steps(tmp_path)[-1] == 8
    assert commit.verify(saved_checkpoints(tmp_path / "checkpoints")[-1].path) == []


def test_where_all_are_damaged_each_is_listed_and_only_a_key_starts_anew(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(**SAVE_AT_2_4_6_8)
    train(config, tmp_path, 1)
    for saved, damage in zip(
        saved_checkpoints(tmp_path / "checkpoints"),
        [_truncate, _flip_a_byte, _delete_a_shard, _delete_the_commit],
        strict=True,
    ):
        damage(saved.path)
    with pytest.raises(UserError) as refused:
        train(config, tmp_path, 2)
    message = str(refused.value)
    for reason in ("step=2-.*: .* has 1000 bytes", "step=4-.*: .* has checksum", "step=6-.*: .* is missing"):
        assert re.search(reason, message)
    assert "exp_manager.resume_ignore_damaged=true" in message
    before = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert len(before) == 4
    train(make_config(**SAVE_AT_2_4_6_8, exp_manager__resume_ignore_damaged=True), tmp_path, 3)
    assert losses(tmp_path, attempt=3) == losses(tmp_path)
    assert set(before) < {path.name for path in (tmp_path / "checkpoints").iterdir()}


def test_the_checkpoint_resumed_from_outlives_newer_damaged_ones_until_a_newer_one_is_committed(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    train(make_config(**SAVE_AT_2_4_6_8), tmp_path, 1)
    for saved in saved_checkpoints(tmp_path / "checkpoints")[1:]:
        _flip_a_byte(saved.path)
    changes = {"trainer__max_steps": 5, "exp_manager__checkpoint_callback_params__save_top_k": 0}
    (refused,) = join(
        start_ranks(
            make_config(**{**SAVE_AT_2_4_6_8, **changes}),
            tmp_path,
            attempt=2,
            devices=1,
            run=functools.partial(with_small_files, largest_bytes=50_000),
        )
    )
    assert refused == 1
    assert _steps(tmp_path) == [2, 4, 6, 8]
    train(make_config(**{**SAVE_AT_2_4_6_8, **changes}), tmp_path, 3)
    intact = [saved.step for saved in saved_checkpoints(tmp_path / "checkpoints") if not commit.verify(saved.path)]
    assert intact == [5]


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_a_full_disk_fails_the_run_and_costs_no_checkpoint(
    make_config: MakeConfig, tmp_path: Path, async_save: bool
) -> None:
    changes = {**SAVE_AT_2_4_6_8, "exp_manager__checkpoint_callback_params__async_save": async_save}
    config = make_config(**changes)
    run_dir = tmp_path / "disk" / "run"
    with small_disk(tmp_path / "disk", "1200k") as is_small:
        if not is_small:
            pytest.skip("this process may not mount a disk")
        assert join(start_ranks(config, run_dir)) == [1, 1]
        logs = [(run_dir / f"rank{rank}.log").read_text() for rank in (0, 1)]
        assert "error: " in logs[0]
        assert "could not be written: [Errno 28] No space left on device" in logs[0]
        assert "make room there" in logs[0]
        assert "Traceback" not in logs[0] + logs[1]
        kept = _steps(run_dir)
        assert kept
        assert max(kept) < 8
        enlarge(tmp_path / "disk", "20m")
        assert join(start_ranks(config, run_dir, attempt=2)) == [0, 0]
        assert join(start_ranks(config, tmp_path / "whole")) == [0, 0]
        assert losses(run_dir) | losses(run_dir, attempt=2) == losses(tmp_path / "whole")


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_a_shard_that_cannot_be_written_fails_all_ranks_with_the_reason(
    make_config: MakeConfig, tmp_path: Path, async_save: bool
) -> None:
    config = make_config(**SAVE_AT_2_4_6_8, exp_manager__checkpoint_callback_params__async_save=async_save)
    assert join(start_ranks(config, tmp_path)) == [0, 0]
    forget_after(tmp_path, 4)
    limited = functools.partial(with_small_files, largest_bytes=50_000)
    assert join(start_ranks(config, tmp_path, attempt=2, run=limited)) == [1, 1]
    log = (tmp_path / "rank0.log").read_text()
    assert "could not be written: [Errno 27] File too large" in log
    assert _steps(tmp_path) == [2, 4]
    assert join(start_ranks(config, tmp_path, attempt=3)) == [0, 0]
    whole = losses(tmp_path)
    assert losses(tmp_path, attempt=3) == {step: whole[step] for step in (5, 6, 7, 8)}


def test_a_directory_that_may_not_be_written_fails_all_ranks_with_the_reason(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(**SAVE_AT_2_4_6_8)
    assert join(start_ranks(config, tmp_path)) == [0, 0]
    forget_after(tmp_path, 4)
    checkpoints = tmp_path / "checkpoints"
    checkpoints.chmod(0o555)
    try:
        assert join(start_ranks(config, tmp_path, attempt=2, run=without_override)) == [1, 1]
    finally:
        checkpoints.chmod(0o755)
    assert "could not be written: [Errno 13] Permission denied" in (tmp_path / "rank0.log").read_text()
    assert _steps(tmp_path) == [2, 4]


def test_a_clock_that_went_backwards_changes_no_order(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(**SAVE_AT_2_4_6_8)
    train(config, tmp_path, 1)
    forget_after(tmp_path, 6)
    for saved in saved_checkpoints(tmp_path / "checkpoints"):
        for path in (*saved.path.iterdir(), saved.path):
            os.utime(path, (2e9 - saved.step, 2e9 - saved.step))  # the newest looks oldest, and all lie in the future
    train(config, tmp_path, 2)
    assert list(losses(tmp_path, attempt=2)) == [7, 8]
