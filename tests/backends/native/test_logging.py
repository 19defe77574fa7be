"""What a run writes down: event files across kills, results, names of checkpoints, copied files, step times."""

import json
import math
import struct
from collections import Counter
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from tests.backends.native.ranks import join, start_ranks
from tests.backends.native.runs import MakeConfig, scalar_steps, wait_for_steps
from trainwright.backends.native.event_files import cut_event_files
from trainwright.backends.native.retention import saved_checkpoints
from trainwright.backends.native.step_timing import StepTimes
from trainwright.backends.native.train import train
from trainwright.config_exp_manager import StepTimingKwargs
from trainwright.errors import RunFailedError, UserError
from trainwright.node.results import read as read_results
from trainwright.node.run_paths import RunPaths
from trainwright.plan import train_flops_per_token


@pytest.mark.parametrize("every", [1, 1000])
def test_scalars_survive_a_kill_without_duplicate_or_missing_steps(
    make_config: MakeConfig, tmp_path: Path, every: int
) -> None:
    config = make_config(
        trainer__max_steps=120,
        trainer__val_check_interval=7,
        trainer__limit_val_batches=1,
        trainer__log_every_n_steps=every,
        exp_manager__checkpoint_callback_params__every_n_train_steps=25,
    )
    (rank,) = start_ranks(config, tmp_path, devices=1)
    wait_for_steps(tmp_path, 40)
    rank.kill()
    rank.join()
    assert join(start_ranks(config, tmp_path, attempt=2, devices=1)) == [0]
    points, steps = scalar_steps(tmp_path), sorted({*range(every, 121, every), 120})
    for tag in ("train_loss", "lr", "grad_norm", "param_norm", "consumed_samples", "step_time_s", "tokens_per_s"):
        assert points[tag] == steps, tag
    assert points["val_loss"] == sorted([*range(7, 121, 7), 120])
    assert len(points["_hparams_/session_start_info"]) == 1
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("train_loss")] == steps


def test_two_ranks_log_once(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(trainer__max_steps=3, trainer__log_every_n_steps=1)
    assert join(start_ranks(config, tmp_path)) == [0, 0]
    assert scalar_steps(tmp_path)["train_loss"] == [1, 2, 3]
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1


@pytest.mark.parametrize("tail", [b"", b"\x05", struct.pack("<Q", 999) + b"0000half of it", bytes(64)])
def test_a_torn_end_of_an_event_file_is_cut_off(tmp_path: Path, tail: bytes) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(1, 6):
            writer.add_scalar("loss", float(step), step)
    (path,) = tmp_path.iterdir()
    with path.open("ab") as stream:
        stream.write(tail)
    assert not cut_event_files(tmp_path, 3)
    assert scalar_steps(tmp_path) == {"loss": [1, 2, 3]}
    with path.open("ab") as stream:
        stream.write(tail)
    assert not cut_event_files(tmp_path, 3)
    assert scalar_steps(tmp_path) == {"loss": [1, 2, 3]}


def test_what_is_known_of_a_step_is_logged_under_its_name(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(hardware__peak_tflops=2.0, trainer__max_steps=2, trainer__log_every_n_steps=1)
    results = train(config, tmp_path, 1)
    flops = train_flops_per_token(config.model, 32, 512)
    lines = [json.loads(line) for line in RunPaths(tmp_path).metrics(1).read_text().splitlines()]
    events = EventAccumulator(str(tmp_path)).Reload()
    for line in lines:
        assert line["tflops_per_s"] == pytest.approx(line["tokens_per_s"] * flops / 1e12)
        assert line["mfu"] == pytest.approx(line["tflops_per_s"] / 2.0)
        assert line["samples_per_s"] == pytest.approx(line["tokens_per_s"] / 32)
        (logged,) = [event.value for event in events.Scalars("mfu") if event.step == line["step"]]
        assert logged == pytest.approx(line["mfu"])  # float32 in the event file
    assert results["mfu"] == pytest.approx(results["tokens_per_s"] * flops / 2e12)
    unknown = train(make_config(hardware__peak_tflops=None, trainer__max_steps=2), tmp_path / "unknown", 1)
    assert unknown["mfu"] is None
    assert "mfu" not in scalar_steps(tmp_path / "unknown")


@pytest.mark.parametrize(
    ("changes", "absent", "present"),
    [
        ({"exp_manager__log_step_timing": False}, "step_time_s", "tflops_per_s"),
        ({"exp_manager__log_tflops_per_sec_per_gpu": False}, "tflops_per_s", "step_time_s"),
        ({"exp_manager__log_delta_step_timing": True}, "step_time_s", "delta_time_s"),
    ],
)
def test_a_timing_key_decides_which_times_are_logged(
    make_config: MakeConfig, tmp_path: Path, changes: dict[str, object], absent: str, present: str
) -> None:
    train(make_config(**changes, trainer__max_steps=2, trainer__log_every_n_steps=1), tmp_path, 1)
    points = scalar_steps(tmp_path)
    assert absent not in points
    assert present in points


@pytest.mark.parametrize(
    ("reduction", "buffer_size", "logged"),
    [
        ("mean", 1, [1.0, 3.0, 2.0]),
        ("mean", 2, [1.0, 2.0, 2.5]),
        ("sum", 2, [1.0, 4.0, 5.0]),
        ("min", 3, [1.0, 1.0, 1.0]),
        ("max", 3, [1.0, 3.0, 3.0]),
        ("none", 3, [1.0, 3.0, 2.0]),
        ("sum", -1, [1.0, 3.0, 2.0]),
    ],
)
def test_step_times_are_reduced_over_the_buffer(reduction: str, buffer_size: int, logged: list[float]) -> None:
    times = StepTimes(
        StepTimingKwargs.model_validate({"reduction": reduction, "sync_cuda": False, "buffer_size": buffer_size})
    )
    assert [times.add(time_s) for time_s in (1.0, 3.0, 2.0)] == logged


def test_names_of_checkpoints_hold_that_steps_own_numbers(make_config: MakeConfig, tmp_path: Path) -> None:
    template = "{name}--{val_loss:.6f}-{train_loss:.6f}-{step}-{consumed_samples}"
    config = make_config(
        exp_manager__name="other",
        exp_manager__checkpoint_callback_params__filename=template,
        exp_manager__checkpoint_callback_params__every_n_train_steps=2,
        exp_manager__checkpoint_callback_params__save_top_k=-1,
        trainer__val_check_interval=4,
        trainer__log_every_n_steps=1000,
    )
    train(config, tmp_path, 1)
    lines = [json.loads(line) for line in RunPaths(tmp_path).metrics(1).read_text().splitlines()]
    expected = []
    for line in lines[1::2]:
        val_loss = math.nan if line["val_loss"] is None else line["val_loss"]
        losses = f"val_loss={val_loss:.6f}-train_loss={line['train_loss']:.6f}"
        expected.append(f"other--{losses}-step={line['step']}-consumed_samples={line['step'] * 4}")
    assert [saved.path.name for saved in saved_checkpoints(tmp_path / "checkpoints")] == expected
    assert Counter("val_loss=nan" in name for name in expected) == {True: 2, False: 2}


def test_results_tell_the_commit_that_the_record_names(make_config: MakeConfig, tmp_path: Path) -> None:
    git = {"commit": "0123abc", "is_dirty": True}
    record = RunPaths(tmp_path).record(1)
    record.parent.mkdir(parents=True)
    record.write_text(yaml.safe_dump({"git": git}), encoding="utf-8")
    results = train(make_config(trainer__max_steps=1), tmp_path, 1)
    assert (results["git"], results["stop_reason"], results["stop_message"]) == (git, "max_steps", None)


def test_a_run_that_diverges_leaves_results_too(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(optim__lr=1e30, optim__sched__warmup_steps=0, trainer__gradient_clip_val=None)
    with pytest.raises(RunFailedError, match="training diverged"):
        train(config, tmp_path, 1)
    results = read_results(RunPaths(tmp_path).results)
    assert results is not None
    assert (results["stop_reason"], results["train_loss"]) == ("diverged", None)
    assert "Lower optim.lr" in results["stop_message"]


def test_files_to_copy_lie_in_the_attempts_own_directory(make_config: MakeConfig, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    for attempt, text in ((1, "first"), (2, "second")):
        notes.write_text(text)
        config = make_config(exp_manager__files_to_copy=[str(notes)], trainer__max_steps=attempt)
        train(config, tmp_path / "run", attempt)
    own = RunPaths(tmp_path / "run").own
    assert (own / "files" / "notes.txt").read_text() == "first"
    assert (own / "files-a2" / "notes.txt").read_text() == "second"
    assert not list((tmp_path / "run").glob("*.txt"))


def test_a_file_to_copy_that_is_gone_is_an_error(make_config: MakeConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"exp_manager\.files_to_copy: /no/such cannot be copied: No such file"):
        train(make_config(exp_manager__files_to_copy=["/no/such"]), tmp_path, 1)
