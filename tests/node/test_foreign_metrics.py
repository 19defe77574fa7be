"""Events as NxDT and NeMo log them, by Lightning's own trainer where its conventions matter."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.tensorboard import SummaryWriter

from trainwright.backends.foreign import results_constants
from trainwright.backends.native.step_report import StepReport
from trainwright.config import RunConfig
from trainwright.follow import overview
from trainwright.node import events
from trainwright.node.foreign_metrics import ForeignMetrics
from trainwright.node.results import read
from trainwright.node.run_paths import RunPaths
from trainwright.plan import make_plan

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
]
TAGS = {"NxDT": ("gradient_norm", "parameter_norm"), "NeMo": ("grad_norm", "param_norm")}


@pytest.fixture(scope="module")
def settings(parsed: Callable[..., RunConfig]) -> dict[str, Any]:
    """Return those of the third article's run: 100 steps of 8 samples on 32 devices."""
    config = parsed("model=tanuki_8b", "hardware=trn1")
    return {"results": results_constants(config, make_plan(config)), "versions": {"torch": "2.1"}}


class Framework(pl.LightningModule):
    """Logs what NxDT or NeMo does, when it does. The loss of a step is its number."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = torch.nn.Linear(1, 1)
        self.seconds = 0.0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        before = self.trainer.global_step
        if self.kind == "NeMo" or before % self.trainer.log_every_n_steps == 0:
            grad_norm, param_norm = TAGS[self.kind]
            self.log("reduced_train_loss", float(before + 1))
            self.log("lr", 1e-4 * (before + 1))
            self.log(param_norm, 50.0)
            self.log(grad_norm, 2.0)
            self.log("global_step", float(before))
            self.log("consumed_samples", float((before + 1) * 8))
            if self.kind == "NxDT":
                self.log("throughput", 1.0 if before < 10 else 4.0)
                self.log("throughput_peak", 4.0)
        loss: torch.Tensor = self.layer(batch).sum()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("train_step_timing in s", 60.0 if self.trainer.global_step == 1 else 2.0)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", 5.0 - self.trainer.global_step / 100, batch_size=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


def fit(run_dir: Path, kind: str, *, every: int, max_steps: int, resume: Path | None = None) -> Path:
    """Train as NxDT and NeMo let Lightning train, and return the newest checkpoint; one is saved each 25 steps."""
    saved = run_dir.parent / "saved"
    saver = pl.callbacks.ModelCheckpoint(dirpath=saved, filename="{step}", every_n_train_steps=25)
    trainer = pl.Trainer(
        max_steps=max_steps,
        accelerator="cpu",
        logger=TensorBoardLogger(str(run_dir.parent), name="", version=run_dir.name),
        log_every_n_steps=every,
        val_check_interval=25,
        check_val_every_n_epoch=None,
        callbacks=[saver],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.utils.data.DataLoader(torch.ones(40, 1))
    trainer.fit(Framework(kind), data, data, ckpt_path=resume, weights_only=False)
    return Path(saver.best_model_path)


def log(writer: SummaryWriter, x: int, values: Mapping[str, float], *, time_s: float | None = None) -> None:
    """Write one call of Lightning's logger."""
    for tag, value in {**values, "epoch": 0.0}.items():
        writer.add_scalar(tag, value, x, walltime=time_s)


def nxdt_call(x: int, *, every: int = 1) -> dict[str, float]:
    """Return what NxDT's logger is given at a point of its axis."""
    measured = x // every * every
    return {"reduced_train_loss": 9.0 - measured / 100, "global_step": measured, "consumed_samples": measured * 8 + 8}


def lines(paths: RunPaths, attempt: int = 1) -> list[dict[str, Any]]:
    return [json.loads(line) for line in paths.metrics(attempt).read_text().splitlines()]


def checkpoint(paths: RunPaths, name: str, *, is_done: bool = True) -> None:
    """Write a checkpoint as NxD does, or as far as an interrupted save comes."""
    folder = paths.checkpoints / name
    (folder / "model").mkdir(parents=True)
    for file, size in {"checkpoint": 1, "model/dp_rank_00_tp_rank_00_pp_rank_00.pt": 100, "done": 1}.items():
        if is_done or file != "done":
            (folder / file).write_bytes(bytes(size))


@pytest.mark.parametrize("every", [1, 10])
def test_a_run_of_nxdt_is_told_step_by_step(tmp_path: Path, settings: dict[str, Any], every: int) -> None:
    paths = RunPaths(tmp_path / "run-1")
    fit(paths.run_dir, "NxDT", every=every, max_steps=100)
    constants = {**settings["results"], "log_every_n_steps": every}
    metrics = ForeignMetrics(paths, 1, {**settings, "results": constants})
    metrics.collect()
    written = lines(paths)
    assert all(line["consumed_samples"] == line["step"] * 8 for line in written)
    assert {line["step"]: line["train_loss"] for line in written if line["train_loss"] is not None} == {
        step: float(step) for step in range(1, 101, every)
    }
    assert {line["step"]: line["val_loss"] for line in written if line["val_loss"] is not None} == {
        step: pytest.approx(5 - step / 100) for step in (25, 50, 75, 100)
    }
    assert len({line["step"] for line in written}) == len(written)
    assert all(set(line) == {field.name for field in fields(StepReport)} for line in written)
    assert written[-1]["step"] == 100
    metrics.finish(None)
    results = read(paths.results)
    assert results is not None
    assert (results["steps"], results["consumed_samples"], results["stop_reason"]) == (100, 800, "max_steps")
    assert results["train_loss"] == (100.0 if every == 1 else 91.0)
    assert results["best_val_loss"] == {"step": 100, "val_loss": 4.0}
    assert results["samples_per_s"] == 4.0  # the first window, which holds the start, does not count


def test_a_run_of_nemo_is_told_step_by_step(tmp_path: Path, settings: dict[str, Any]) -> None:
    paths = RunPaths(tmp_path / "run-1")
    fit(paths.run_dir, "NeMo", every=10, max_steps=100)
    metrics = ForeignMetrics(paths, 1, settings)
    metrics.finish(None)
    written = lines(paths)
    assert [line["step"] for line in written if line["train_loss"] is not None] == list(range(10, 101, 10))
    assert all(line["train_loss"] == line["step"] for line in written if line["train_loss"] is not None)
    last = written[-1]
    assert (last["grad_norm"], last["param_norm"], last["step_time_s"], last["samples_per_s"]) == (2.0, 50.0, 2.0, 4.0)
    results = read(paths.results)
    assert results is not None
    assert results["samples_per_s"] == 4.0


def test_lists_of_runs_show_it_while_it_runs(tmp_path: Path, settings: dict[str, Any]) -> None:
    paths = RunPaths(tmp_path)
    events.append(paths, events.PLANNED, who="submit", stage=None, attempt=1, stages=["train"], max_steps=100)
    events.append(paths, events.RUNNING, who="a1-node0", stage="train", attempt=1)
    metrics = ForeignMetrics(paths, 1, settings)
    metrics.collect()
    assert overview.look(tmp_path).metrics == overview.Metrics(max_steps=100)
    with SummaryWriter(str(tmp_path)) as writer:
        log(writer, 41, {**nxdt_call(41), "val_loss": 3.0})
        log(writer, 42, nxdt_call(42))
        writer.flush()
        metrics.collect()
        seen = overview.look(tmp_path).metrics
        assert (seen.step, seen.max_steps, seen.val_loss) == (43, 100, 3.0)
        assert seen.train_loss == pytest.approx(9 - 42 / 100)
    metrics.finish("told to stop")
    seen = overview.look(tmp_path).metrics
    assert (seen.step, seen.max_steps, seen.val_loss) == (43, 100, 3.0)


def test_a_step_is_written_once_however_often_it_is_looked_for(tmp_path: Path, settings: dict[str, Any]) -> None:
    paths = RunPaths(tmp_path)
    metrics = ForeignMetrics(paths, 1, settings)
    with SummaryWriter(str(tmp_path)) as writer:
        for x in range(6):
            log(writer, x, nxdt_call(x))
            writer.flush()
            metrics.collect()
            metrics.collect()
        with paths.metrics(1).open("a") as file:
            file.write('{"step": 7, "consu')  # the worker was killed
        metrics = ForeignMetrics(paths, 1, settings)
        log(writer, 6, nxdt_call(6))
    metrics.collect()
    metrics.finish(None)
    assert [line["step"] for line in lines(paths)] == [1, 2, 3, 4, 5, 6, 7]


def test_a_step_waits_until_all_of_it_is_there(tmp_path: Path, settings: dict[str, Any]) -> None:
    paths = RunPaths(tmp_path)
    metrics = ForeignMetrics(paths, 1, settings)
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("reduced_train_loss", 2.0, 0)
        writer.flush()
        metrics.collect()
        assert not paths.metrics(1).exists()
        writer.add_scalar("lr", 0.5, 0)
        writer.add_scalar("epoch", 0, 0)
        writer.flush()
        metrics.collect()
        (line,) = lines(paths)
        assert (line["step"], line["train_loss"], line["lr"]) == (1, 2.0, 0.5)
        log(writer, 0, {"val_loss": 3.0})
    metrics.collect()
    assert lines(paths)[1:] == [{"step": 1, "val_loss": 3.0}]  # as our own backend adds one that came late


def test_a_file_cut_anywhere_gives_whole_lines_only(tmp_path: Path, settings: dict[str, Any]) -> None:
    with SummaryWriter(str(tmp_path / "whole")) as writer:
        for x in range(3):
            log(writer, x, nxdt_call(x))
    (whole,) = (tmp_path / "whole").iterdir()
    content = whole.read_bytes()
    for cut in range(0, len(content), 7):
        paths = RunPaths(tmp_path / str(cut))
        paths.run_dir.mkdir()
        (paths.run_dir / whole.name).write_bytes(content[:cut])
        metrics = ForeignMetrics(paths, 1, settings)
        metrics.collect()
        (paths.run_dir / whole.name).write_bytes(content)
        metrics.collect()
        assert [(line["step"], line["train_loss"]) for line in lines(paths)] == [
            (step, pytest.approx(9 - (step - 1) / 100)) for step in (1, 2, 3)
        ]


def test_damage_is_told_once(tmp_path: Path, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        log(writer, 0, nxdt_call(0))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes().replace(b"reduced_train_loss", b"Reduced_train_loss", 1))
    metrics = ForeignMetrics(RunPaths(tmp_path), 1, settings)
    metrics.collect()
    metrics.collect()
    assert capsys.readouterr().err.count("is damaged: the checksum of its event does not fit") == 1


def test_numbers_that_are_none_become_null(tmp_path: Path, settings: dict[str, Any]) -> None:
    paths = RunPaths(tmp_path)
    with SummaryWriter(str(tmp_path)) as writer:
        log(writer, 0, {**nxdt_call(0), "reduced_train_loss": math.nan, "val_loss": math.nan})
        log(writer, 1, {**nxdt_call(1), "reduced_train_loss": math.inf})
    ForeignMetrics(paths, 1, settings).finish("failed")
    assert [line["train_loss"] for line in lines(paths)] == [None, None]
    results = read(paths.results)
    assert results is not None
    assert (results["train_loss"], results["val_loss"], results["best_val_loss"]) == (None, None, None)


def test_what_earlier_attempts_and_trial_runs_logged_does_not_count(tmp_path: Path, settings: dict[str, Any]) -> None:
    paths = RunPaths(tmp_path)
    with SummaryWriter(str(tmp_path), filename_suffix=".first") as writer:
        for x in (53, 54):
            log(writer, x, {**nxdt_call(x), "val_loss": 1.0 + (x - 53)})
    first = ForeignMetrics(paths, 1, settings)
    first.finish("preempted")
    events.append(paths, events.RUNNING, who="a2-node0", stage="compile", attempt=2)
    with SummaryWriter(str(tmp_path), filename_suffix=".compile") as writer:
        log(writer, 0, {"reduced_train_loss": 0.0, "global_step": 0.0})
    events.append(paths, events.RUNNING, who="a2-node0", stage="train", attempt=2)
    second = ForeignMetrics(paths, 2, settings)
    second.collect()
    moved = tmp_path / "run_0"  # as NxDT does when it starts
    moved.mkdir()
    for path in tmp_path.glob("events.*"):
        shutil.move(path, moved)
    with SummaryWriter(str(tmp_path), filename_suffix=".second") as writer:
        log(writer, 54, {**nxdt_call(54), "val_loss": 2.5})
    second.collect()
    assert [line["step"] for line in lines(paths, 2)] == [55]
    second.finish("preempted")
    results = read(paths.results)
    assert results is not None
    assert (results["attempt"], results["steps"], results["val_loss"]) == (2, 55, 2.5)
    assert results["best_val_loss"] == {"step": 54, "val_loss": 1.0}  # step 55 was taken again


def test_a_file_that_is_moved_before_it_was_read_to_its_end_is_read_on(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    paths = RunPaths(tmp_path)
    metrics = ForeignMetrics(paths, 1, settings)
    with SummaryWriter(str(tmp_path)) as writer:
        log(writer, 0, nxdt_call(0))
        writer.flush()
        metrics.collect()
        log(writer, 1, nxdt_call(1))
    (tmp_path / "run_0").mkdir()
    shutil.move(next(tmp_path.glob("events.*")), tmp_path / "run_0")
    metrics.collect()
    assert [line["step"] for line in lines(paths)] == [1, 2]


@pytest.mark.parametrize(
    ("kind", "every", "losses"),
    [("NxDT", 1, range(26, 61)), ("NxDT", 10, (31, 41, 51)), ("NeMo", 10, (30, 40, 50, 60))],
)
def test_a_resumed_run_is_told_step_by_step(
    tmp_path: Path, settings: dict[str, Any], kind: str, every: int, losses: Sequence[int]
) -> None:
    paths = RunPaths(tmp_path / "run-1")
    saved = fit(paths.run_dir, kind, every=every, max_steps=30)
    events.append(paths, events.RUNNING, who="a2-node0", stage="train", attempt=2)
    fit(paths.run_dir, kind, every=every, max_steps=60, resume=saved)
    metrics = ForeignMetrics(paths, 2, {**settings, "results": {**settings["results"], "log_every_n_steps": every}})
    metrics.finish(None)
    written = lines(paths, 2)
    told = [(line["step"], line["train_loss"]) for line in written if line["train_loss"] is not None]
    assert told == [(step, float(step)) for step in losses]
    assert [line["step"] for line in written if line["val_loss"] is not None] == [50]
    assert written[-1]["step"] == 60


@pytest.mark.parametrize(("kind", "every"), [("NxDT", 1), ("NeMo", 1), ("NeMo", 10)])
@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_an_axis_that_is_one_off_after_a_resume_is_put_right(
    tmp_path: Path, settings: dict[str, Any], kind: str, every: int, shift: int
) -> None:
    paths = RunPaths(tmp_path)
    with SummaryWriter(str(tmp_path)) as writer:
        for completed in (30, 40, 50):
            x = completed - 1 + shift
            log(writer, x, {"reduced_train_loss": 1.0, "global_step": completed - 1})
            log(writer, x, {"val_loss": 2.0 - completed / 100})
    constants = {**settings["results"], "log_every_n_steps": every}
    ForeignMetrics(paths, 1, {**settings, "results": constants}).finish("failed")
    assert [(line["step"], line["val_loss"]) for line in lines(paths)] == [
        (completed, pytest.approx(2 - completed / 100)) for completed in (30, 40, 50)
    ]


def test_a_progress_bar_tells_where_no_events_are(tmp_path: Path, settings: dict[str, Any]) -> None:
    paths = RunPaths(tmp_path)
    bar = paths.rank_log("train", 1, 0)
    bar.parent.mkdir(parents=True)
    tail = "lr=0.0001, parameter_norm=2.64e-38, global_step={}, consumed_samples=8.00, throughput=0.5, {}]"
    shown = [
        "Epoch 0:   0%|          | 0/80 [00:00<?, ?it/s]",
        "Epoch 0:   1%|1| 1/80 [00:09<1:00:00, 9.0s/it, reduced_train_loss=7.500, " + tail.format("0.000", "v_num=28"),
        "Epoch 0:   1%|1| 2/80 [00:18<1:00:00, 9.0s/it, reduced_train_loss=7.500, " + tail.format("0.000", "v_num=28"),
        "Epoch 1:  25%|1| 20/80 [00:18<1:00:00, 9.0s/it, reduced_train_loss=2.250, "
        + tail.format("99.00", "val_loss=3.0"),
    ]
    bar.write_bytes(b"loading\n" + "\r".join(shown[:3]).encode() + b"\r" + shown[3][:50].encode())
    metrics = ForeignMetrics(paths, 1, settings)
    metrics.collect()
    assert [(line["step"], line["train_loss"]) for line in lines(paths)] == [(1, 7.5), (2, None)]
    with bar.open("ab") as file:
        file.write(shown[3][50:].encode() + b"\n")
    metrics.collect()
    last = lines(paths)[-1]
    assert (last["step"], last["consumed_samples"], last["train_loss"], last["val_loss"]) == (100, 800, 2.25, 3.0)


def test_a_progress_bar_tells_while_a_bucket_shows_events_as_empty(tmp_path: Path, settings: dict[str, Any]) -> None:
    paths = RunPaths(tmp_path)
    bar = paths.rank_log("train", 1, 0)
    bar.parent.mkdir(parents=True)
    shown = "Epoch 0:   1%|1| {0}/80 [00:09<1:00:00, 9.0s/it, reduced_train_loss={0}.120, global_step={1}.000]\n"
    bar.write_text(shown.format(1, 0))
    hidden = tmp_path / "hidden"
    with SummaryWriter(str(hidden)) as writer:
        for x in (0, 1):
            log(writer, x, {"reduced_train_loss": x + 1.125, "global_step": x})
    (written,) = hidden.iterdir()
    event_file = tmp_path / written.name
    event_file.touch()
    metrics = ForeignMetrics(paths, 1, settings)
    metrics.collect()
    assert [(line["step"], line["train_loss"]) for line in lines(paths)] == [(1, 1.12)]
    shutil.copyfile(written, event_file)
    metrics.finish("preempted")
    assert [(line["step"], line["train_loss"]) for line in lines(paths)] == [(1, 1.12), (2, 2.125)]
    results = read(paths.results)
    assert results is not None
    assert (results["steps"], results["train_loss"]) == (2, 2.125)


def test_results_have_the_native_backends_keys_and_the_checkpoints(tmp_path: Path, settings: dict[str, Any]) -> None:
    paths = RunPaths(tmp_path / "tanuki-1")
    record = {"run_id": "tanuki-1", "git": {"commit": "0123abc", "is_dirty": True}, "config": {}}
    paths.own.mkdir(parents=True)
    paths.record(1).write_text(yaml.safe_dump(record, sort_keys=False))
    checkpoint(paths, "hf_tanuki--step=50-consumed_samples=328.0.ckpt")
    checkpoint(paths, "hf_tanuki--step=100-consumed_samples=728.0.ckpt")
    checkpoint(paths, "hf_tanuki--step=75-consumed_samples=528.0.ckpt", is_done=False)
    with SummaryWriter(str(paths.run_dir)) as writer:
        for x in range(9, 100, 10):
            log(writer, x, {**nxdt_call(x, every=10), "throughput": 1.0 if x == 9 else 4.0})
    ForeignMetrics(paths, 1, settings).finish(None)
    results = read(paths.results)
    assert results is not None
    assert [saved["step"] for saved in results["checkpoints"]] == [50, 100]
    assert results["checkpoints"][1]["path"] == "checkpoints/hf_tanuki--step=100-consumed_samples=728.0.ckpt"
    assert results["checkpoints"][1]["bytes"] == 102
    assert results["checkpoints"][1]["save_s"] >= 0
    tokens_per_s = 4.0 * settings["results"]["seq_length"]
    flops = settings["results"]["flops_per_token"]
    assert results["tokens_per_s"] == tokens_per_s
    assert results["tflops_per_s"] == pytest.approx(tokens_per_s * flops / 32 / 1e12)
    assert results["consumed_samples"] == 800
    assert results["batch"]["accumulate_grad_batches"] == 8
    assert results["git"] == {"commit": "0123abc", "is_dirty": True}
    assert results["versions"] == {"torch": "2.1"}
    assert (results["run_id"], results["stop_message"], results["schema_version"]) == ("tanuki-1", None, 1)


@pytest.mark.parametrize(
    ("reason", "last", "expected"),
    [
        (None, 100, ("max_steps", None, 100)),
        (None, 60, (None, "it ended by itself after step 60 of 100", 60)),
        ("preempted", 60, ("preempted", None, 60)),
        ("rank 3 was killed by SIGKILL", 60, ("failed", "rank 3 was killed by SIGKILL", 60)),
    ],
)
def test_the_end_has_a_reason(
    tmp_path: Path, settings: dict[str, Any], reason: str | None, last: int, expected: tuple[Any, ...]
) -> None:
    paths = RunPaths(tmp_path)
    with SummaryWriter(str(tmp_path)) as writer:
        log(writer, last - 1, nxdt_call(last - 1))
    ForeignMetrics(paths, 1, settings).finish(reason)
    results = read(paths.results)
    assert results is not None
    assert (results["stop_reason"], results["stop_message"], results["steps"]) == expected


TIME = "Time limit reached. Elapsed time is 1:00:00."
PATIENCE = "Monitored metric val_loss did not improve in the last 3 records. Best score: 8.010."


@pytest.mark.parametrize(
    ("early_ends", "told", "last", "expected"),
    [
        ({"max_time_per_run": 60}, None, 60, "max_time_per_run"),
        ({"max_time_per_run": 600}, None, 60, None),  # there was time left
        ({"max_time_per_run": 60}, TIME, 98, "max_time_per_run"),  # less than log_every_n_steps before the end
        ({"max_time_per_run": 60}, TIME, 100, "max_steps"),
        ({"max_time_per_run": 60}, None, 98, "max_steps"),
        ({"max_time": 600}, TIME, 60, "max_time"),  # earlier attempts had the rest
        ({"max_time": 600, "early_stopping": None}, TIME, 60, "max_time"),
        ({"max_time": 600, "early_stopping": None}, PATIENCE, 60, "early_stopping"),
        ({"max_time": 600, "early_stopping": None}, None, 60, None),
        ({"max_time_per_run": 60}, None, 0, None),
        ({}, TIME, 60, None),
    ],
)
def test_a_framework_that_ends_before_its_last_step_is_asked_why(
    early_ends: dict[str, float | None],
    told: str | None,
    last: int,
    expected: str | None,
    tmp_path: Path,
    settings: dict[str, Any],
) -> None:
    paths = RunPaths(tmp_path)
    begun = events.append(paths, events.RUNNING, who="a1-node0", stage="train", attempt=1)
    five_minutes_ago = datetime.now(timezone.utc) - timedelta(seconds=300)
    told_begun = {**json.loads(begun.read_text()), "time": five_minutes_ago.strftime("%Y-%m-%dT%H:%M:%S.%fZ")}
    begun.write_text(json.dumps(told_begun))
    if last:
        with SummaryWriter(str(tmp_path)) as writer:
            log(writer, last - 1, nxdt_call(last - 1))
    if told is not None:
        paths.rank_log("train", 1, 0).parent.mkdir(parents=True)
        paths.rank_log("train", 1, 0).write_text(f"one\n{told} Signaling Trainer to stop.\nEpoch 0: 60%|\r")
    constants = {**settings["results"], "log_every_n_steps": 5}
    end = ForeignMetrics(paths, 1, {**settings, "results": constants, "early_ends": early_ends}).finish(None)
    results = read(paths.results)
    assert results is not None
    assert (end.reason, end.message) == (results["stop_reason"], results["stop_message"])
    assert end.reason == expected
    if expected != "max_steps":
        assert end.message == f"it ended by itself after step {last} of 100" + (f": {told}" if told else "")


def test_last_steps_without_a_log_count_when_the_run_ended_well(tmp_path: Path, settings: dict[str, Any]) -> None:
    paths = RunPaths(tmp_path)
    with SummaryWriter(str(tmp_path)) as writer:
        log(writer, 89, nxdt_call(89, every=10))
    constants = {**settings["results"], "log_every_n_steps": 10, "max_steps": 95}
    ForeignMetrics(paths, 1, {**settings, "results": constants}).finish(None)
    results = read(paths.results)
    assert results is not None
    assert (results["steps"], results["consumed_samples"]) == (95, 760)
