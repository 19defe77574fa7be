"""The average of the weights: its arithmetic, what validation sees of it, and that a resume continues it."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.backends.native.ranks import join, start_ranks
from tests.backends.native.resave import tensors
from tests.backends.native.runs import MakeConfig, forget_after, losses
from trainwright.backends.native.ema import AveragedWeights
from trainwright.backends.native.retention import saved_checkpoints
from trainwright.backends.native.train import train
from trainwright.config_exp_manager import Ema

AVERAGING = {"exp_manager__ema__enable": True, "exp_manager__ema__decay": 0.8, "exp_manager__ema__every_n_steps": 2}
SAVING = {
    "exp_manager__checkpoint_callback_params__every_n_train_steps": 3,
    "exp_manager__checkpoint_callback_params__save_top_k": -1,
}


def _ema(**changes: object) -> Ema:
    return Ema.model_validate(
        {
            "enable": True,
            "decay": 0.5,
            "every_n_steps": 1,
            "validate_original_weights": False,
            "cpu_offload": False,
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("every_n_steps", "averages"),
    [(1, [0.5, 1.25, 2.125, 3.0625]), (2, [0.5, 0.5, 1.75, 1.75]), (3, [0.5, 0.5, 0.5, 2.25])],
)
def test_the_average_follows_nemos_steps(every_n_steps: int, averages: list[float]) -> None:
    network = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        network.weight.fill_(0)
        average = AveragedWeights(network, _ema(every_n_steps=every_n_steps))
        seen = []
        for step in range(1, 5):
            network.weight.fill_(step)
            average.update(step)
            seen.append(average.weights["weight"].item())
    assert seen == averages


def test_validation_uses_the_average_and_gives_the_weights_back_unchanged() -> None:
    network = nn.Linear(3, 2)
    average = AveragedWeights(network, _ema())
    first = {name: value.clone() for name, value in network.state_dict().items()}
    with torch.no_grad():
        network.weight.add_(1)
    trained = {name: value.clone() for name, value in network.state_dict().items()}
    with average.for_validation():
        assert torch.equal(network.weight, first["weight"])
    assert all(torch.equal(value, trained[name]) for name, value in network.state_dict().items())
    assert torch.equal(average.weights["weight"], first["weight"])


def test_averaging_changes_validation_but_no_training_loss(make_config: MakeConfig, tmp_path: Path) -> None:
    plain = train(make_config(), tmp_path / "plain", 1)
    averaged = train(make_config(**AVERAGING), tmp_path / "averaged", 1)
    original = {"exp_manager__ema__validate_original_weights": True, "exp_manager__ema__cpu_offload": True}
    unused = train(make_config(**AVERAGING, **original), tmp_path / "unused", 1)
    assert losses(tmp_path / "plain") == losses(tmp_path / "averaged") == losses(tmp_path / "unused")
    assert averaged["val_loss"] > plain["val_loss"]  # the average lags behind weights that improve
    assert unused["val_loss"] == plain["val_loss"]


def _state_at_the_end(run_dir: Path, scratch: Path) -> dict[str, bytes]:
    return tensors(saved_checkpoints(run_dir / "checkpoints")[-1].path, scratch / f"{run_dir.name}.pt")


@pytest.mark.parametrize(("strategy", "devices"), [("ddp", 1), ("ddp", 2), ("fsdp", 2)])
def test_a_resumed_average_equals_the_uninterrupted_one_bit_for_bit(
    make_config: MakeConfig, tmp_path: Path, strategy: str, devices: int
) -> None:
    config = make_config(
        **AVERAGING,
        **SAVING,
        parallelism__strategy=strategy,
        model__attention_dropout=0.1,
        trainer__val_check_interval=2,
    )
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert set(join(start_ranks(config, whole, devices=devices))) == {0}, (whole / "rank0.log").read_text()
    shutil.copytree(whole, cut)
    forget_after(cut, 3)
    assert set(join(start_ranks(config, cut, attempt=2, devices=devices))) == {0}, (cut / "rank0.log").read_text()
    state = _state_at_the_end(whole, tmp_path)
    assert any(name.startswith("/average/") for name in state)
    assert _state_at_the_end(cut, tmp_path) == state
    validations = [saved_checkpoints(run / "checkpoints")[-1].metrics["val_loss"] for run in (whole, cut)]
    assert validations[0] == validations[1]


def test_a_checkpoint_without_an_average_starts_one_from_its_weights(make_config: MakeConfig, tmp_path: Path) -> None:
    train(make_config(**SAVING, trainer__max_steps=3), tmp_path, 1)
    every_hundredth = {**AVERAGING, "exp_manager__ema__every_n_steps": 100}
    train(make_config(**SAVING, **every_hundredth, trainer__max_steps=4), tmp_path, 2)
    third, fourth = saved_checkpoints(tmp_path / "checkpoints")
    weights, later = tensors(third.path, tmp_path / "3.pt"), tensors(fourth.path, tmp_path / "4.pt")
    names = [name for name in weights if name.startswith("/model/")]
    averages = {name: later[name.replace("/model/", "/average/")] for name in names}
    assert averages == {name: weights[name] for name in names}
