"""The main job learns more than word frequencies: below the unigram model on real text, not on shuffled text."""

import os
from collections.abc import Callable
from pathlib import Path

from trainwright.backends.native.train import train
from trainwright.config import RunConfig

# The recipe itself (240 steps of two samples, two minutes each) with TRAINWRIGHT_FULL_MARGIN=1, else a shortened one.
IS_FULL = os.environ.get("TRAINWRIGHT_FULL_MARGIN") == "1"
SHORTENED = (
    "trainer.max_steps=150",
    "trainer.val_check_interval=150",
    "trainer.limit_val_batches=60",
    "data.micro_batch_size=1",
    "data.global_batch_size=1",
    "optim.lr=2e-3",
    "optim.sched.warmup_steps=10",
)


def margin(parsed: Callable[..., RunConfig], tmp_path: Path, *overrides: str) -> float:
    """Return by how many nats gpt_small ends below the unigram model."""
    common = (f"exp_manager.exp_dir={tmp_path}", "exp_manager.create_checkpoint_callback=false")
    config = parsed("model=gpt_small", *common, *(() if IS_FULL else SHORTENED), *overrides)
    return float(train(config, tmp_path / "run", 1)["margin"])


def test_gpt_small_ends_below_the_unigram_model(parsed: Callable[..., RunConfig], tmp_path: Path) -> None:
    assert margin(parsed, tmp_path) > (0.2 if IS_FULL else 0.1)  # 0.43 and 0.14 on 2026-11-29


def test_on_shuffled_tokens_the_margin_vanishes(parsed: Callable[..., RunConfig], tmp_path: Path) -> None:
    """Nothing but frequencies is left to learn; sampling noise of the validation split is below 0.01 nats."""
    assert margin(parsed, tmp_path, "data.shuffle_tokens=true") < 0.01  # -0.18 on 2026-11-29
