"""Early stopping: when it ends a run, how the run then stands, and that a resume counts on."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.backends.native.ranks import join, start_ranks
from tests.backends.native.runs import MakeConfig, forget_after
from trainwright.backends.native.early_stopping import EarlyStopping
from trainwright.backends.native.train import train
from trainwright.config_exp_manager import EarlyStoppingParams
from trainwright.node.results import read as read_results
from trainwright.node.run_paths import RunPaths
from trainwright.places import CONF

NAN, INF = float("nan"), float("inf")
# No improvement is large enough, so the first of four validations is the best.
STUBBORN = {
    "exp_manager__create_early_stopping_callback": True,
    "exp_manager__early_stopping_callback_params__min_delta": 100.0,
    "exp_manager__early_stopping_callback_params__patience": 3,
    "exp_manager__checkpoint_callback_params__save_top_k": -1,
    "trainer__val_check_interval": 1,
}


def _params(**changes: object) -> EarlyStoppingParams:
    defaults = yaml.safe_load((CONF / "exp_manager" / "default.yaml").read_text())["early_stopping_callback_params"]
    return EarlyStoppingParams.model_validate({**defaults, **changes})


@pytest.mark.parametrize(
    ("changes", "values", "ends_at", "why"),
    [
        ({"patience": 2}, [5.0, 4.0, 4.0, 4.1, 3.0], 3, "did not improve on 4.0000 in 2 validations"),
        ({"patience": 2, "min_delta": 0.5}, [5.0, 4.6, 4.5, 1.0], 2, "did not improve on 5.0000"),
        ({"patience": 2, "min_delta": 0.5}, [5.0, 4.6, 4.4, 4.0, 3.875], None, None),
        ({"patience": 1, "mode": "max"}, [1.0, 2.0, 1.5], 2, "did not improve on 2.0000 in 1"),
        ({}, [5.0, NAN], 1, "val_loss is nan"),
        ({}, [5.0, INF], 1, "val_loss is inf"),
        ({"check_finite": False, "patience": 2}, [NAN, NAN, 4.0], 1, "in 2 validations"),
        ({"check_finite": False, "patience": 2}, [NAN, 4.0, NAN, 3.0], None, None),
        ({"stopping_threshold": 3.5}, [5.0, 3.5, 3.4], 2, "better than stopping_threshold=3.5"),
        ({"divergence_threshold": 6.0}, [5.0, 6.0, 6.1], 2, "worse than divergence_threshold=6.0"),
        ({"divergence_threshold": 0.5, "mode": "max"}, [0.6, 0.4], 1, "worse than divergence_threshold=0.5"),
    ],
)
def test_it_ends_a_run_where_lightnings_does(
    changes: dict[str, Any], values: list[float], ends_at: int | None, why: str | None
) -> None:
    ours = EarlyStopping(_params(**changes))
    ended: int | None = None
    for number, value in enumerate(values):
        ours.look({"val_loss": value, "train_loss": 0.0})
        if ours.reason is not None:
            ended = number
            break
    assert ended == ends_at
    assert why is None or why in str(ours.reason)
    assert _lightnings_end(changes, values) == ends_at


def _lightnings_end(changes: dict[str, Any], values: list[float]) -> int | None:
    """Return the validation at which Lightning's own callback, which NeMo uses, would end the run."""
    import torch
    from lightning.pytorch.callbacks import EarlyStopping as Theirs

    theirs = Theirs(**_params(**changes).model_dump())
    for number, value in enumerate(values):
        if theirs._evaluate_stopping_criteria(torch.tensor(value))[0]:
            return number
    return None


def test_a_run_that_no_longer_improves_succeeds_and_says_why(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(**STUBBORN, exp_manager__checkpoint_callback_params__every_n_train_steps=3)
    assert join(start_ranks(config, tmp_path)) == [0, 0], (tmp_path / "rank0.log").read_text()
    results = read_results(RunPaths(tmp_path).results)
    assert results is not None
    assert (results["steps"], results["stop_reason"]) == (4, "early_stopping")
    assert "in 3 validations" in results["stop_message"]
    assert results["checkpoints"][-1]["step"] == 4


def test_a_resumed_run_counts_on_from_its_checkpoint(make_config: MakeConfig, tmp_path: Path) -> None:
    whole = train(make_config(**STUBBORN), tmp_path / "whole", 1)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    forget_after(tmp_path / "cut", 2)
    resumed = train(make_config(**STUBBORN), tmp_path / "cut", 2)
    for key in ("steps", "stop_reason", "stop_message", "val_loss"):
        assert resumed[key] == whole[key]


def test_a_run_that_has_ended_early_stays_ended_until_patience_is_raised(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    train(make_config(**STUBBORN), tmp_path, 1)
    again = train(make_config(**STUBBORN), tmp_path, 2)
    assert (again["steps"], again["stop_reason"]) == (4, "early_stopping")
    patient = {**STUBBORN, "exp_manager__early_stopping_callback_params__patience": 100}
    on = train(make_config(**patient), tmp_path, 3)
    assert (on["steps"], on["stop_reason"]) == (8, "max_steps")


def test_a_run_that_never_validates_goes_on_where_strict_is_off(make_config: MakeConfig, tmp_path: Path) -> None:
    lenient = {"exp_manager__early_stopping_callback_params__strict": False, "trainer__limit_val_batches": 0}
    results = train(make_config(**{**STUBBORN, **lenient}, trainer__max_steps=3), tmp_path, 1)
    assert (results["steps"], results["stop_reason"]) == (3, "max_steps")
