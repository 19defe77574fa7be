"""Instruction data on the native backend, from the command line: trained, validated and resumed on its own files."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Result
from tests.dataset.words import save_words, text, write_records
from trainwright.backends.native.data import find_prefixes
from trainwright.config import RunConfig
from trainwright.errors import UserError
from trainwright.node.run_paths import RunPaths

SFT = (
    "model=llama_tiny",
    "model.hidden_size=32",
    "model.ffn_hidden_size=48",
    "model.vocab_size=100",
    "data=tanuki_sft",
    "data.train_path=train.jsonl",
    "data.val_path=val.jsonl",
    "data.tokenizer.name=words",
    "data.tokenizer.vocab_size=100",
    "data.seq_length=16",
    "data.num_workers=0",
    "optim.lr=1e-2",
    "optim.sched.warmup_steps=1",
)
RUN = (*SFT, "hydra.mode=RUN", "run_id=sft", "trainer.val_check_interval=4", "trainer.limit_val_batches=2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a tokenizer and two files of records that count upwards."""
    write_records(tmp_path / "train.jsonl", ((text(2, number), text(5, number + 2)) for number in range(60)))
    write_records(tmp_path / "val.jsonl", ((text(2, number), text(3, number + 2)) for number in range(20, 40)))
    save_words(tmp_path / "words")
    return tmp_path


def test_the_command_line_trains_and_resumes(train: Callable[..., Result], folder: Path) -> None:
    first = train(*RUN, "trainer.max_steps=4")
    assert first.code == 0, first.err
    assert "warning [sft-unmasked] data=tanuki_sft" in first.err
    assert "tokenized 540 tokens in 60 records" in first.out
    again = train(*RUN, "trainer.max_steps=8")
    assert again.code == 0, again.err
    assert "resuming from step 4" in again.out
    assert "tokenized" not in again.out
    results = json.loads(RunPaths(folder / "outputs" / "llama_tiny" / "sft").results.read_text())
    assert (results["steps"], results["consumed_samples"]) == (8, 64)
    assert (results["data"]["train_tokens"], results["data"]["validation_tokens"]) == (540, 140)
    assert results["val_loss"] < 4.605, "below guessing among 100 tokens"


def test_a_tokenizer_larger_than_the_model_is_refused_before_anything_is_built(
    parsed: Callable[..., RunConfig], folder: Path
) -> None:
    config = parsed(*SFT, "model.vocab_size=50", "data.tokenizer.vocab_size=50").with_absolute_paths(folder)
    with pytest.raises(UserError, match=r"model\.vocab_size=50 is too small: words has tokens up to 99; set .* to 100"):
        find_prefixes(config)
    assert not (folder / "outputs").exists()


def test_a_tokenizers_directory_becomes_absolute_and_a_hub_id_stays(
    parsed: Callable[..., RunConfig], folder: Path
) -> None:
    here = parsed(*SFT).with_absolute_paths(folder)
    assert here.data.tokenizer.name == str(folder / "words")
    hub = parsed(*SFT, "data.tokenizer.name=me/words").with_absolute_paths(folder)
    assert hub.data.tokenizer.name == "me/words"


def test_shuffled_tokens_of_records_are_refused(parsed: Callable[..., RunConfig]) -> None:
    with pytest.raises(UserError, match=r"data\.shuffle_tokens=true permutes the data set made of data\.text"):
        find_prefixes(parsed(*SFT, "data.shuffle_tokens=true"))
