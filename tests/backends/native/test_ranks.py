"""Runs of several ranks: real processes over gloo."""

import time
from pathlib import Path

import pytest

from tests.backends.native.ranks import join, start_ranks
from tests.backends.native.runs import MakeConfig, losses
from trainwright.backends.native.retention import delete, saved_checkpoints
from trainwright.backends.native.train import train
from trainwright.node.run_paths import RunPaths

SAVE_AT_4 = {"exp_manager__checkpoint_callback_params__every_n_train_steps": 4}


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


def test_two_ranks_resume_bit_for_bit(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(model__attention_dropout=0.1, **SAVE_AT_4)
    assert join(start_ranks(config, tmp_path)) == [0, 0]
    _forget_the_end(tmp_path)
    assert join(start_ranks(config, tmp_path, attempt=2)) == [0, 0]
    whole = losses(tmp_path)
    assert losses(tmp_path, attempt=2) == {step: whole[step] for step in range(5, 9)}


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_continues_with_the_same_losses(
    make_config: MakeConfig, tmp_path: Path, before: int, after: int
) -> None:
    config = make_config(**SAVE_AT_4)
    assert set(join(start_ranks(config, tmp_path, devices=before))) == {0}
    _forget_the_end(tmp_path)
    assert set(join(start_ranks(config, tmp_path, attempt=2, devices=after))) == {0}
    assert list(losses(tmp_path, attempt=2)) == [5, 6, 7, 8]
    assert _numbers(tmp_path, attempt=2) == pytest.approx(_numbers(tmp_path)[4:], rel=1e-5)
    assert saved_checkpoints(tmp_path / "checkpoints")[-1].consumed_samples == 32
    assert "dropout streams start anew" in (tmp_path / "rank0.log").read_text()


def test_sigterm_on_one_rank_saves_on_all_and_loses_no_step(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(trainer__max_steps=120, trainer__val_check_interval=120, model__attention_dropout=0.1)
    ranks = start_ranks(config, tmp_path / "stopped")
    _wait_for_steps(tmp_path / "stopped", 2)
    ranks[1].terminate()
    assert join(ranks) == [75, 75]
    (saved,) = saved_checkpoints(tmp_path / "stopped" / "checkpoints")
    assert 2 <= saved.step < 120
    assert saved.consumed_samples == saved.step * 4
    assert join(start_ranks(config, tmp_path / "stopped", attempt=2)) == [0, 0]
    assert join(start_ranks(config, tmp_path / "whole")) == [0, 0]
    pieces = losses(tmp_path / "stopped") | losses(tmp_path / "stopped", attempt=2)
    assert pieces == losses(tmp_path / "whole")


def _forget_the_end(run_dir: Path) -> None:
    *_, last = saved_checkpoints(run_dir / "checkpoints")
    delete(last)


def _wait_for_steps(run_dir: Path, num_steps: int) -> None:
    metrics = RunPaths(run_dir).own / "metrics-a1.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= num_steps):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_mistake_is_told_once_and_exits_2(make_config: MakeConfig, tmp_path: Path) -> None:
    assert join(start_ranks(make_config(data__global_batch_size=6), tmp_path)) == [2, 2]
    first, second = ((tmp_path / f"rank{rank}.log").read_text() for rank in (0, 1))
    assert first.startswith("error: data.global_batch_size=6 ")
    assert "Traceback" not in first
    assert second == ""
