"""The learning rate schedules."""

import pytest

from trainwright.backends.native.schedule import lr_at
from trainwright.config import Optim, Schedule


def _optim(name: str, warmup_steps: int) -> Optim:
    schedule = {"name": name, "warmup_steps": warmup_steps, "min_lr": 1.0}
    return Optim(
        name="adamw", lr=10.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, sched=Schedule.model_validate(schedule)
    )


@pytest.mark.parametrize(
    ("name", "warmup_steps", "step", "expected"),
    [
        ("CosineAnnealing", 4, 0, 2.0),
        ("CosineAnnealing", 4, 3, 8.0),
        ("CosineAnnealing", 4, 4, 10.0),
        ("CosineAnnealing", 4, 12, 5.5),
        ("CosineAnnealing", 4, 20, 1.0),
        ("CosineAnnealing", 4, 21, 1.0),
        ("CosineAnnealing", 0, 0, 10.0),
        ("CosineAnnealing", 30, 19, 10.0 * 20 / 31),
        ("LinearAnnealingWithWarmUp", 4, 0, 0.0),
        ("LinearAnnealingWithWarmUp", 4, 3, 7.5),
        ("LinearAnnealingWithWarmUp", 4, 4, 10.0),
        ("LinearAnnealingWithWarmUp", 4, 12, 5.5),
        ("LinearAnnealingWithWarmUp", 4, 20, 1.0),
        ("LinearAnnealingWithWarmUp", 0, 0, 10.0),
        ("constant", 4, 0, 2.0),
        ("constant", 4, 5, 10.0),
        ("constant", 4, 99, 10.0),
    ],
)
def test_the_learning_rate_of_a_step_is_that_of_nemo(name: str, warmup_steps: int, step: int, expected: float) -> None:
    assert lr_at(step, _optim(name, warmup_steps), max_steps=20) == pytest.approx(expected)
