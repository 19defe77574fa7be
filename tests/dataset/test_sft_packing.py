"""NxDT's samples, worked out by hand from its ConcatDataset and PaddedDataset."""

from pathlib import Path

import numpy as np
import pytest

from tests.dataset.words import BOS, EOS, FIRST_WORD, words, write_lengths, write_records
from trainwright.dataset.sft import IGNORE, read_records, tokenize
from trainwright.dataset.sft_packing import (
    DROPPED,
    Packer,
    packed_sample,
    padded_lengths,
    padded_sample,
    steps_per_epoch,
)
from trainwright.dataset.sft_report import Recipe, first_samples


@pytest.mark.parametrize(
    ("lengths", "samples"),
    [
        ([7], [0]),  # 7 < 8: with its separator it fills the sample
        ([8], [DROPPED]),  # just seq_length is too long
        ([3, 3], [0, 0]),  # 3 + 1 and 3 < 8, then full
        ([3, 4], [0, 1]),  # 3 + 1 + 4 is 8, not below it
        ([3, 3, 1], [0, 0, 1]),
        ([2, 9, 2], [0, DROPPED, 1]),  # what is dropped ends the sample before it
        ([9, 8, 2, 2], [DROPPED, DROPPED, 0, 0]),
        ([5, 2, 2], [0, 1, 1]),  # 5 + 1 + 2 is not below 8; file order, no search for what would fit
    ],
)
def test_packing_is_greedy_in_file_order(lengths: list[int], samples: list[int]) -> None:
    packer = Packer(8)
    assert [packer.place(length) for length in lengths] == samples


def test_a_packed_sample_has_copies_of_the_ids_in_all_columns(tmp_path: Path) -> None:
    path = write_records(tmp_path / "x.jsonl", [("w0", "w1"), ("w2", "w3 w4")])
    records = list(tokenize(read_records(path, key="x"), words(tmp_path / "words")))
    sample = packed_sample(records, 12, EOS)
    w = FIRST_WORD
    first, second = [BOS, w, w + 1, EOS], [BOS, w + 2, w + 3, w + 4, EOS]
    assert sample.input_ids.tolist() == [*first, EOS, *second, EOS, 0]
    assert sample.labels.tolist() == [*first, IGNORE, *second, IGNORE, IGNORE]  # the prompt is not masked
    assert sample.attention_mask.tolist() == [*first, 0, *second, 0, 0]  # token ids where ones belong


def test_a_sample_that_is_just_full_gets_no_padding(tmp_path: Path) -> None:
    path = write_lengths(tmp_path / "x.jsonl", [5])
    records = list(tokenize(read_records(path, key="x"), words(tmp_path / "words")))
    assert packed_sample(records, 6, EOS).input_ids.tolist()[-2:] == [EOS, EOS]


def test_padding_doubles_what_is_just_long_enough() -> None:
    assert padded_lengths(np.array([1, 7, 8, 9, 16]), 8).tolist() == [8, 8, 16, 16, 24]


def test_a_padded_sample_masks_prompt_and_padding(tmp_path: Path) -> None:
    path = write_records(tmp_path / "x.jsonl", [("w0", "w1")])
    (record,) = tokenize(read_records(path, key="x"), words(tmp_path / "words"))
    sample, w = padded_sample(record, 6), FIRST_WORD
    assert sample.input_ids.tolist() == [BOS, w, w + 1, EOS, 0, 0]
    assert sample.labels.tolist() == [IGNORE, IGNORE, w + 1, EOS, IGNORE, IGNORE]
    assert sample.attention_mask.tolist() == [1, 1, 1, 1, 0, 0]
    assert len(padded_sample(record, 4).labels) == 8


@pytest.mark.parametrize(
    ("samples", "ranks", "batch", "steps"),
    [(17, 1, 8, 2), (7, 1, 8, 0), (33, 2, 8, 4), (31, 2, 8, 3), (16, 4, 10, 2), (100, 8, 4, 0)],
)
def test_sampler_and_loader_leave_out_what_fills_no_batch(samples: int, ranks: int, batch: int, steps: int) -> None:
    assert steps_per_epoch(samples, data_parallel_size=ranks, global_batch_size=batch) == steps


def test_the_first_samples_are_those_of_the_whole_file(tmp_path: Path) -> None:
    path = write_lengths(tmp_path / "x.jsonl", [4, 4, 10, 5, 9])
    tokenizer = words(tmp_path / "words")
    shown = first_samples(path, tokenizer, Recipe(seq_length=10), 2, key="x")
    assert [[one.record.number for one in records] for records, _ in shown] == [[1, 2], [4]]
    assert [len(sample.input_ids) for _, sample in shown] == [10, 10]
    padded = first_samples(path, tokenizer, Recipe(seq_length=10, packing=False), 3, key="x")
    assert [len(sample.input_ids) for _, sample in padded] == [10, 10, 20]
