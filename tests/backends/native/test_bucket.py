"""A run in a mounted bucket: nothing appended, renamed or changed in place, and yet all of it there in the end."""

import functools
import json
import os
import shutil
from pathlib import Path

import pytest

from tests import bucket_mount
from tests.backends.native.ranks import join, run_training, start_ranks
from tests.backends.native.runs import MakeConfig, losses, scalar_steps, wait_for_steps
from trainwright.backends.native.retention import saved_checkpoints
from trainwright.backends.native.train import train
from trainwright.node.growing import SCRATCH, Mirror
from trainwright.node.results import read
from trainwright.node.run_paths import RunPaths

EVERY_STEP = {"trainer__log_every_n_steps": 1, "exp_manager__checkpoint_callback_params__every_n_train_steps": 5}


def train_in_a_bucket(run_dir: Path, attempt: int, *, scratch: Path, refused: Path) -> int:
    """Train with files that grow below `scratch`, as the worker would have it."""
    os.environ.update({SCRATCH: str(scratch), bucket_mount.ROOT: str(run_dir), bucket_mount.REFUSED: str(refused)})
    bucket_mount.mount()
    return run_training(run_dir, attempt)


def test_event_files_that_vertex_ai_is_to_show_lie_in_the_folder_that_it_watches(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIP_TENSORBOARD_LOG_DIR", "gs://bucket/run/logs/")
    for attempt, max_steps in ((1, 4), (2, 6)):
        train(make_config(**EVERY_STEP, trainer__max_steps=max_steps), tmp_path, attempt)
    steps = scalar_steps(tmp_path / "logs")
    assert (steps["train_loss"], len(steps["_hparams_/session_start_info"])) == ([*range(1, 7)], 1)


@pytest.mark.parametrize("in_background", [False, True])
def test_two_ranks_train_where_files_are_written_once(
    make_config: MakeConfig, tmp_path: Path, in_background: bool
) -> None:
    run_dir, scratch, refused = tmp_path / "run", tmp_path / "scratch", tmp_path / "refused"
    config = make_config(
        **EVERY_STEP,
        trainer__max_steps=15,
        exp_manager__checkpoint_callback_params__async_save=in_background,
        exp_manager__checkpoint_callback_params__save_top_k=1,
    )
    run_dir.mkdir()
    run = functools.partial(train_in_a_bucket, scratch=scratch, refused=refused)
    assert join(start_ranks(config, run_dir, run=run)) == [0, 0], (run_dir / "rank0.log").read_text()
    Mirror(scratch, run_dir).copy()  # by the worker, when its ranks have ended
    assert not refused.exists(), refused.read_text()
    assert [saved.step for saved in saved_checkpoints(RunPaths(run_dir).checkpoints)][-1] == 15
    assert scalar_steps(run_dir)["train_loss"] == list(losses(run_dir)) == list(range(1, 16))
    results = read(RunPaths(run_dir).results)
    assert results is not None
    assert (results["steps"], results["stop_reason"]) == (15, "max_steps")


def test_a_machine_that_is_lost_with_its_disk_costs_no_step_and_repeats_none(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    run_dir, refused = tmp_path / "run", tmp_path / "refused"
    config = make_config(**EVERY_STEP, trainer__max_steps=60)
    run_dir.mkdir()
    run = functools.partial(train_in_a_bucket, refused=refused)
    first = start_ranks(config, run_dir, run=functools.partial(run, scratch=tmp_path / "first"))
    wait_for_steps(tmp_path / "first", 13)
    for rank in first:
        rank.kill()
        rank.join()
    shutil.rmtree(tmp_path / "first")
    saved = saved_checkpoints(RunPaths(run_dir).checkpoints)[-1].step
    second = functools.partial(run, scratch=tmp_path / "second")
    assert join(start_ranks(config, run_dir, attempt=2, run=second)) == [0, 0], (run_dir / "rank0.log").read_text()
    Mirror(tmp_path / "second", run_dir).copy()
    assert not refused.exists(), refused.read_text()
    assert scalar_steps(run_dir)["train_loss"] == list(range(1, 61))
    assert len(scalar_steps(run_dir)["_hparams_/session_start_info"]) == 1
    assert list(losses(run_dir, attempt=2)) == list(range(saved + 1, 61))
    assert max(map(int, losses(run_dir))) >= saved  # what a checkpoint builds on was safe before it counted
    lines = RunPaths(run_dir).metrics(1).read_text().splitlines()
    assert all(json.loads(line) for line in lines)
