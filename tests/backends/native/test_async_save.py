"""Saving while training goes on."""

import functools
from pathlib import Path

import pytest

from tests.backends.native.ranks import join, start_ranks
from tests.backends.native.resave import tensors
from tests.backends.native.runs import MakeConfig, losses, wait_for_steps
from tests.kills.trace import CHOICE, COMMIT, DELETION, SHARD_WRITE, STEP, parse, run_traced
from trainwright.backends.native.retention import saved_checkpoints
from trainwright.node import commit

SAVE_ALWAYS = {
    "model__attention_dropout": 0.1,
    "exp_manager__ema__enable": True,
    "exp_manager__checkpoint_callback_params__every_n_train_steps": 1,
}
IN_BACKGROUND = {"exp_manager__checkpoint_callback_params__async_save": True}


@pytest.mark.parametrize(("strategy", "devices"), [("ddp", 1), ("ddp", 2), ("fsdp", 2)])
def test_what_is_saved_in_the_background_is_what_stood_at_that_step(
    make_config: MakeConfig, tmp_path: Path, strategy: str, devices: int
) -> None:
    every = {**SAVE_ALWAYS, "exp_manager__checkpoint_callback_params__save_top_k": -1}
    config = make_config(**every, parallelism__strategy=strategy)
    waiting = start_ranks(config, tmp_path / "sync", devices=devices)
    going_on = start_ranks(
        make_config(**every, **IN_BACKGROUND, parallelism__strategy=strategy), tmp_path / "async", devices=devices
    )
    assert set(join(waiting)) == set(join(going_on)) == {0}, (tmp_path / "async" / "rank0.log").read_text()
    assert losses(tmp_path / "async") == losses(tmp_path / "sync")
    held = [
        [tensors(saved.path, tmp_path / "held.pt") for saved in saved_checkpoints(tmp_path / name / "checkpoints")]
        for name in ("sync", "async")
    ]
    assert len(held[0]) == 8
    assert held[0] == held[1]


def test_the_best_and_the_newest_are_kept_and_all_is_committed_at_the_end(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    best = {
        "exp_manager__checkpoint_callback_params__save_top_k": 2,
        "exp_manager__checkpoint_callback_params__monitor": "train_loss",
        "exp_manager__checkpoint_callback_params__mode": "max",
    }
    assert join(start_ranks(make_config(**SAVE_ALWAYS, **best, **IN_BACKGROUND), tmp_path)) == [0, 0]
    by_loss = sorted(losses(tmp_path), key=lambda step: -float.fromhex(losses(tmp_path)[step]))
    saved = saved_checkpoints(tmp_path / "checkpoints")
    assert {one.step for one in saved} == {*by_loss[:2], 8}
    assert len(list((tmp_path / "checkpoints").iterdir())) == len(saved)
    assert not any(commit.verify(one.path) for one in saved)


def test_a_save_waits_for_the_commit_of_the_one_before(make_config: MakeConfig, tmp_path: Path) -> None:
    """So at most one copy of the state is held."""
    traced = functools.partial(run_traced, trace=tmp_path / "trace")
    newest_only = {"exp_manager__checkpoint_callback_params__save_top_k": 0}
    config = make_config(**SAVE_ALWAYS, **newest_only, **IN_BACKGROUND)
    assert join(start_ranks(config, tmp_path, run=traced)) == [0, 0]
    names = [phase.name for phase in parse((tmp_path / "trace").read_bytes())]
    assert names == [SHARD_WRITE, COMMIT, CHOICE] + [SHARD_WRITE, COMMIT, CHOICE, DELETION, STEP] * 7


def test_a_run_that_is_told_to_stop_commits_first(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(**SAVE_ALWAYS, **IN_BACKGROUND, trainer__max_steps=2000, trainer__val_check_interval=2000)
    ranks = start_ranks(config, tmp_path)
    wait_for_steps(tmp_path, 3)
    ranks[1].terminate()
    assert join(ranks) == [75, 75]
    newest = saved_checkpoints(tmp_path / "checkpoints")[-1]
    assert newest.step == max(losses(tmp_path)) >= 3
    assert commit.verify(newest.path) == []
