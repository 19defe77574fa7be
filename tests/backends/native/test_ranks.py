"""Runs of several ranks: real processes over gloo."""

from pathlib import Path

import pytest

from tests.backends.native.ranks import join, start_ranks
from tests.backends.native.runs import MakeConfig, losses, wait_for_steps
from trainwright.backends.native.retention import saved_checkpoints
from trainwright.backends.native.train import train


def _numbers(run_dir: Path, attempt: int = 1) -> list[float]:
    return [float.fromhex(loss) for loss in losses(run_dir, attempt).values()]


def test_one_rank_two_ranks_and_two_nodes_give_the_same_losses(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config()
    ranks = start_ranks(config, tmp_path / "ranks", nodes=1, devices=2)
    nodes = start_ranks(config, tmp_path / "nodes", nodes=2, devices=1)
    one = train(config, tmp_path / "one", 1)
    assert join(ranks) == join(nodes) == [0, 0]
    expected = _numbers(tmp_path / "one")
    assert _numbers(tmp_path / "ranks") == pytest.approx(expected, rel=1e-5)  # another order of additions in float32
    assert _numbers(tmp_path / "nodes") == pytest.approx(expected, rel=1e-5)
    for name in ("ranks", "nodes"):
        validation = saved_checkpoints(tmp_path / name / "checkpoints")[-1].metrics["val_loss"]
        assert validation == pytest.approx(one["val_loss"], rel=1e-5)


def test_sigterm_on_one_rank_saves_on_all_and_loses_no_step(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(trainer__max_steps=120, trainer__val_check_interval=120, model__attention_dropout=0.1)
    ranks = start_ranks(config, tmp_path / "stopped")
    wait_for_steps(tmp_path / "stopped", 2)
    ranks[1].terminate()
    assert join(ranks) == [75, 75]
    (saved,) = saved_checkpoints(tmp_path / "stopped" / "checkpoints")
    assert 2 <= saved.step < 120
    assert saved.consumed_samples == saved.step * 4
    assert join(start_ranks(config, tmp_path / "stopped", attempt=2)) == [0, 0]
    assert join(start_ranks(config, tmp_path / "whole")) == [0, 0]
    pieces = losses(tmp_path / "stopped") | losses(tmp_path / "stopped", attempt=2)
    assert pieces == losses(tmp_path / "whole")


def test_a_mistake_is_told_once_and_exits_2(make_config: MakeConfig, tmp_path: Path) -> None:
    assert join(start_ranks(make_config(data__global_batch_size=6), tmp_path)) == [2, 2]
    first, second = ((tmp_path / f"rank{rank}.log").read_text() for rank in (0, 1))
    assert first.startswith("error: data.global_batch_size=6 ")
    assert "Traceback" not in first
    assert second == ""
