"""exp_manager.max_time_per_run, train_time_interval and create_preemption_callback: when a run saves and stops."""

import time
from pathlib import Path

import pytest

from tests.backends.native.ranks import join, start_ranks
from tests.backends.native.runs import MakeConfig, losses, wait_for_steps
from trainwright.backends.native.retention import saved_checkpoints
from trainwright.backends.native.train import train
from trainwright.node.results import read as read_results
from trainwright.node.run_paths import RunPaths

ENDLESS = {"trainer__max_steps": 100_000, "trainer__limit_val_batches": 0}
NEVER = {"exp_manager__checkpoint_callback_params__every_n_train_steps": 100_000}


def test_a_run_whose_time_is_over_saves_once_and_loses_or_repeats_no_step(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    limited, unlimited = (make_config(**ENDLESS, **NEVER, exp_manager__max_time_per_run=limit) for limit in (1, None))
    for attempt in (1, 2):
        assert join(start_ranks(limited, tmp_path, attempt=attempt)) == [75, 75], (tmp_path / "rank0.log").read_text()
        newest = saved_checkpoints(tmp_path / "checkpoints")[-1]
        stopped = read_results(RunPaths(tmp_path).results)
        assert stopped is not None
        assert (stopped["stop_reason"], stopped["steps"]) == ("max_time_per_run", newest.step)
    first, second = losses(tmp_path), losses(tmp_path, attempt=2)
    assert [*first, *second] == list(range(1, newest.step + 1))
    ranks = start_ranks(unlimited, tmp_path / "whole")
    wait_for_steps(tmp_path / "whole", newest.step)
    ranks[0].terminate()
    assert join(ranks) == [75, 75]
    whole = losses(tmp_path / "whole")
    assert first | second == {step: whole[step] for step in range(1, newest.step + 1)}


def test_a_run_saves_when_the_last_save_is_too_long_ago(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(
        **ENDLESS,
        **NEVER,
        exp_manager__create_preemption_callback=False,  # so that the signal below saves nothing
        exp_manager__checkpoint_callback_params__train_time_interval=1,
        exp_manager__checkpoint_callback_params__save_top_k=-1,
    )
    ranks = start_ranks(config, tmp_path)
    deadline = time.monotonic() + 60
    while len(saved_checkpoints(tmp_path / "checkpoints")) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)  # polling other processes, not synchronising with them
    ranks[0].terminate()
    assert join(ranks) == [75, 75]


@pytest.mark.parametrize("saves", [True, False])
def test_a_signal_ends_all_ranks_and_saves_unless_that_is_switched_off(
    make_config: MakeConfig, tmp_path: Path, saves: bool
) -> None:
    config = make_config(**ENDLESS, **NEVER, exp_manager__create_preemption_callback=saves)
    ranks = start_ranks(config, tmp_path)
    wait_for_steps(tmp_path, 5)
    ranks[1].terminate()
    assert join(ranks) == [75, 75]
    results = read_results(RunPaths(tmp_path).results)
    assert results is not None
    assert results["stop_reason"] == "preempted"
    assert [saved.step for saved in saved_checkpoints(tmp_path / "checkpoints")] == (
        [results["steps"]] if saves else []
    )


def test_the_last_step_is_a_success_even_when_time_is_over(make_config: MakeConfig, tmp_path: Path) -> None:
    results = train(make_config(exp_manager__max_time_per_run=1, trainer__max_steps=1), tmp_path, 1)
    assert results["stop_reason"] == "max_steps"
