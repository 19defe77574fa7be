"""Whole runs of tiny models in this process."""

import json
import math
import shutil
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.backends.native.runs import MakeConfig, forget_after, losses
from trainwright.backends.native.train import train
from trainwright.errors import RunFailedError, UserError
from trainwright.node import commit
from trainwright.node.run_paths import RunPaths

ALL_OF_IT = {
    "exp_manager__checkpoint_callback_params__save_top_k": -1,
    "exp_manager__checkpoint_callback_params__every_n_train_steps": 3,
}


@pytest.mark.parametrize(
    "architecture",
    [
        {"model__attention_dropout": 0.1},
        {"model__architecture": "gpt2", "model__num_query_groups": None, "model__hidden_dropout": 0.1},
    ],
    ids=["llama", "gpt2"],
)
def test_a_resumed_loss_curve_equals_the_uninterrupted_one_bit_for_bit(
    make_config: MakeConfig, tmp_path: Path, architecture: dict[str, object]
) -> None:
    config = make_config(**ALL_OF_IT, **architecture)
    whole = train(config, tmp_path / "whole", 1)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    forget_after(tmp_path / "cut", 3)
    resumed = train(config, tmp_path / "cut", 2)
    uninterrupted = losses(tmp_path / "whole")
    assert list(uninterrupted) == list(range(1, 9))
    assert losses(tmp_path / "cut", attempt=2) == {step: uninterrupted[step] for step in range(4, 9)}
    assert resumed["val_loss"] == whole["val_loss"]
    assert resumed["best_val_loss"] == whole["best_val_loss"]


def test_accumulation_and_validation_in_between_change_no_training_loss(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    dropout = {"model__attention_dropout": 0.1}
    train(make_config(**dropout, trainer__val_check_interval=1), tmp_path / "often", 1)
    train(make_config(**dropout, trainer__limit_val_batches=0), tmp_path / "never", 1)
    train(make_config(data__micro_batch_size=4), tmp_path / "whole", 1)
    train(make_config(data__micro_batch_size=1), tmp_path / "parts", 1)
    assert losses(tmp_path / "often") == losses(tmp_path / "never")
    whole, parts = ([float.fromhex(loss) for loss in losses(tmp_path / name).values()] for name in ("whole", "parts"))
    assert parts == pytest.approx(whole, rel=1e-5)  # another order of additions in float32


def test_the_run_directory_holds_checkpoints_tensorboard_and_results(make_config: MakeConfig, tmp_path: Path) -> None:
    run_dir = tmp_path / "llama_tiny" / "run-1"
    config = make_config(trainer__max_steps=6, trainer__log_every_n_steps=2)
    results = train(config, run_dir, 1)
    assert json.loads(RunPaths(run_dir).results.read_text()) == results
    assert results["run_id"] == "run-1"
    assert results["model"] == {"name": "llama_tiny", "parameters": 31_904}
    assert results["batch"] == {
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "accumulate_grad_batches": 2,
        "world_size": 1,
        "data_parallel_size": 1,
    }
    assert (results["steps"], results["consumed_samples"], results["consumed_tokens"]) == (6, 24, 24 * 32)
    assert (results["data"]["train_tokens"], results["data"]["validation_tokens"]) == (18_000, 2_000)
    assert results["unigram_loss"] == pytest.approx(math.log(500), abs=0.1)
    assert results["margin"] == results["unigram_loss"] - results["val_loss"]
    # Step 4 is at the interval; step 6 is the last and validated and saved besides.
    assert [saved["step"] for saved in results["checkpoints"]] == [4, 6]
    for saved in results["checkpoints"]:
        name = f"llama_tiny--val_loss={saved['metrics']['val_loss']:.2f}-step={saved['step']}"
        assert saved["path"] == f"checkpoints/{name}-consumed_samples={saved['step'] * 4}"
        metadata = commit.read_commit(run_dir / saved["path"])
        assert metadata is not None
        assert metadata["versions"] == results["versions"]
    events = EventAccumulator(str(run_dir)).Reload()
    assert [event.step for event in events.Scalars("train_loss")] == [2, 4, 6]
    assert [event.step for event in events.Scalars("val_loss")] == [4, 6]
    assert {"lr", "grad_norm", "consumed_samples", "step_time_s", "tokens_per_s"} <= set(events.Tags()["scalars"])
    assert sorted(path.name for path in run_dir.iterdir() if path.is_dir()) == ["checkpoints", "run"]


def test_a_finished_run_is_finished(make_config: MakeConfig, tmp_path: Path) -> None:
    first = train(make_config(), tmp_path, 1)
    second = train(make_config(), tmp_path, 2)
    for key in ("steps", "train_loss", "val_loss", "checkpoints"):
        assert second[key] == first[key]


def test_a_validation_that_an_interrupted_run_owes_is_made_up_for(make_config: MakeConfig, tmp_path: Path) -> None:
    every = {"exp_manager__checkpoint_callback_params__every_n_train_steps": 4}
    train(make_config(**every), tmp_path / "whole", 1)
    # What a preempted run leaves at step 4: a checkpoint that was saved before the validation.
    train(make_config(**every, trainer__val_check_interval=5), tmp_path / "cut", 1)
    forget_after(tmp_path / "cut", 4)
    train(make_config(**every), tmp_path / "cut", 2)
    validated = {}
    for name, attempt in (("whole", 1), ("cut", 2)):
        lines = RunPaths(tmp_path / name).metrics(attempt).read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        validated[name] = {step["step"]: step["val_loss"] for step in steps if step["val_loss"] is not None}
    assert validated["cut"] == validated["whole"]


def test_existing_checkpoints_are_never_passed_over_silently(make_config: MakeConfig, tmp_path: Path) -> None:
    train(make_config(), tmp_path, 1)
    with pytest.raises(UserError, match=r"resume_if_exists=false.* step 8"):
        train(make_config(exp_manager__resume_if_exists=False), tmp_path, 2)


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_learning_rate(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    config = make_config(optim__lr=1e30, optim__sched__warmup_steps=0, trainer__gradient_clip_val=None)
    with pytest.raises(RunFailedError, match=r"train_loss is nan at step \d: .*optim.lr=1e\+30") as stopped:
        train(config, tmp_path, 1)
    assert stopped.value.exit_code == 1
    assert not (tmp_path / "checkpoints").exists()


def test_nothing_is_saved_where_nothing_shall_be(make_config: MakeConfig, tmp_path: Path) -> None:
    quiet = {"exp_manager__create_checkpoint_callback": False, "exp_manager__create_tensorboard_logger": False}
    results = train(make_config(**quiet, trainer__max_steps=2), tmp_path, 1)
    assert results["checkpoints"] == []
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    terminal: bool,
) -> None:
    monkeypatch.setenv("TRAINWRIGHT_TTY", "1" if terminal else "0")
    monkeypatch.setenv("COLUMNS", "70")
    train(make_config(trainer__log_every_n_steps=3), tmp_path, 1)
    output = capsys.readouterr().out
    if terminal:
        assert "8/8" in output
        assert max(len(part) for part in output.replace("\n", "\r").split("\r")) <= 70
    else:
        assert [line.split()[1] for line in output.splitlines()] == ["3/8", "4/8", "6/8", "8/8"]


def test_a_schedulers_variables_do_not_change_who_trains(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"JOB_ID": "7", "JOB_NAME": "train", "NTASKS": "4", "PROCID": "1", "LOCALID": "1", "NODEID": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    results = train(make_config(trainer__max_steps=2), tmp_path, 1)
    assert results["batch"]["world_size"] == 1
    assert len(results["checkpoints"]) == 1
