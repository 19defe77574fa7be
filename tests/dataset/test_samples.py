"""From the data section of a run to its samples."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainwright.dataset.blend import Blend
from trainwright.dataset.indexed import DTYPES, IndexedWriter
from trainwright.dataset.samples import GptData, open_dataset, prepare_prefixes, requested_samples
from trainwright.errors import UserError


def write_counting(prefix: Path, first: int, num_sequences: int = 20) -> Path:
    """Write sequences of 10 tokens that count on from `first`."""
    with IndexedWriter(prefix, DTYPES[4]) as writer:
        for number in range(num_sequences):
            writer.add_sequence(np.arange(10) + first + 10 * number)
            writer.end_document()
    return prefix


def open_with(blend: Blend, **changes: Any) -> GptData:
    arguments: dict[str, Any] = {
        "splits_string": "80,20,0",
        "seq_length": 4,
        "vocab_size": 10_000,
        "seed": 1,
        "index_mapping_dir": None,
        "num_train_samples": 100,
        "num_validation_samples": 8,
    }
    return open_dataset(blend, **{**arguments, **changes})


def prepare(tmp_path: Path, **changes: Any) -> Blend:
    arguments: dict[str, Any] = {
        "text": "shakespeare",
        "data_prefix": None,
        "splits_string": "95,5,0",
        "cache_dir": tmp_path / "cache",
        "tokenizer_type": "gpt2_bpe",
        "shuffle_tokens": False,
        "seed": 1,
        "report": lambda line: None,
    }
    return prepare_prefixes(**{**arguments, **changes})


def test_samples_hold_seq_length_plus_one_tokens_of_their_split_only(tmp_path: Path) -> None:
    blend = Blend(prefixes=(write_counting(tmp_path / "x", 0),), weights=None)
    data = open_with(blend)
    assert data.validation is not None
    for samples, tokens in ((data.train, range(160)), (data.validation, range(160, 200))):
        rows = np.stack([samples[i] for i in range(len(samples))])
        assert rows.dtype == np.int64
        assert rows.shape == (len(samples), 5)
        assert set(rows.ravel().tolist()) <= set(tokens)
    assert len(data.train) >= 100
    assert data.max_token_id == 199


def test_a_token_beyond_the_models_vocabulary_names_the_key(tmp_path: Path) -> None:
    data = open_with(Blend(prefixes=(write_counting(tmp_path / "x", 0),), weights=None), vocab_size=100)
    with pytest.raises(UserError, match=r"model\.vocab_size=100 is too small: .*x\.bin holds token 1[0-9]+"):
        [data.train[i] for i in range(len(data.train))]


def test_a_blend_draws_from_its_sources_in_proportion(tmp_path: Path) -> None:
    prefixes = (write_counting(tmp_path / "a", 0), write_counting(tmp_path / "b", 1000))
    data = open_with(Blend(prefixes=prefixes, weights=(0.75, 0.25)))
    from_b = [bool(data.train[i].min() >= 1000) for i in range(100)]
    assert sum(from_b) == 25
    assert data.max_token_id == 1199


def test_a_blend_of_many_small_sources_never_runs_dry(tmp_path: Path) -> None:
    prefixes = tuple(write_counting(tmp_path / str(number), 0) for number in range(30))
    data = open_with(Blend(prefixes=prefixes, weights=(1 / 30,) * 30), num_train_samples=61)
    assert len([data.train[i] for i in range(len(data.train))]) >= 61


def test_a_split_of_weight_zero_is_no_validation_and_no_unigram(tmp_path: Path) -> None:
    blend = Blend(prefixes=(write_counting(tmp_path / "x", 0),), weights=None)
    data = open_with(blend, splits_string="1,0,0")
    assert data.validation is None
    assert data.unigram_cross_entropy(200) is None
    with pytest.raises(UserError, match="training weight 0"):
        open_with(blend, splits_string="0,1,0")


def test_samples_travel_to_data_loader_workers(tmp_path: Path) -> None:
    data = open_with(
        Blend(prefixes=(write_counting(tmp_path / "x", 0),), weights=(1.0,)), index_mapping_dir=tmp_path / "i"
    )
    again = pickle.loads(pickle.dumps(data.train))
    np.testing.assert_array_equal(again[3], data.train[3])


def test_the_requests_of_a_run_are_megatrons() -> None:
    settings = {"max_steps": 50, "global_batch_size": 256, "val_check_interval": 10, "limit_val_batches": 2}
    assert requested_samples(**settings) == (12_800, 3072)


def test_the_shipped_text_has_the_unigram_loss_that_the_readme_run_must_beat(tmp_path: Path) -> None:
    for shuffle_tokens in (False, True):
        blend = prepare(tmp_path, shuffle_tokens=shuffle_tokens)
        data = open_with(blend, splits_string="95,5,0", seq_length=256, vocab_size=50_257, num_train_samples=1200)
        loss = data.unigram_cross_entropy(50_257)
        assert loss == pytest.approx(6.38607, abs=1e-5), "counts are exact: only float addition may differ"


def test_a_given_prefix_is_taken_as_it_is_and_cannot_be_shuffled(tmp_path: Path) -> None:
    assert prepare(tmp_path, data_prefix=["/data/a"]).prefixes == (Path("/data/a"),)
    with pytest.raises(UserError, match=r"data\.shuffle_tokens=true.*data\.data_prefix=null"):
        prepare(tmp_path, data_prefix=["/data/a"], shuffle_tokens=True)
    assert not (tmp_path / "cache").exists()
