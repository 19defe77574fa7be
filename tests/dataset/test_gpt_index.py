"""Indices come from the cache only when they are the same and whole."""

from pathlib import Path

import numpy as np
import pytest

from trainwright.dataset.gpt_index import GptIndex, build_index, load_index
from trainwright.errors import UserError

LENGTHS = np.random.RandomState(3).randint(1, 50, 40).astype(np.int32)
REQUEST = {"num_samples": 90, "seq_length": 16, "seed": 7}


def equal(one: GptIndex, other: GptIndex) -> bool:
    names = ("document_index", "sample_index", "shuffle_index")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def test_samples_run_across_sequences_and_share_one_token() -> None:
    seed = 5  # leaves three sequences in their order
    index = build_index(np.array([5, 7, 3], dtype=np.int32), (0, 3), num_samples=3, seq_length=4, seed=seed)
    assert index.document_index.tolist() == [0, 1, 2]
    assert index.sample_index.tolist() == [[0, 0], [0, 4], [1, 3], [2, 0]]


def test_every_token_of_an_epoch_but_the_rest_is_read_once() -> None:
    index = build_index(LENGTHS, (0, 40), num_samples=1, seq_length=16, seed=0)
    assert len(index.shuffle_index) == (LENGTHS.sum() - 1) // 16


def test_a_second_load_reads_what_the_first_one_stored(tmp_path: Path) -> None:
    built = build_index(LENGTHS, (0, 30), **REQUEST)
    first = load_index(LENGTHS, (0, 30), **REQUEST, index_mapping_dir=tmp_path)
    stored = sorted(tmp_path.rglob("*.npy"))
    again = load_index(LENGTHS, (0, 30), **REQUEST, index_mapping_dir=tmp_path)
    assert equal(built, first)
    assert equal(built, again)
    assert isinstance(again.sample_index, np.memmap)
    assert len(stored) == 3
    assert sorted(tmp_path.rglob("*.npy")) == stored


@pytest.mark.parametrize("change", [{"num_samples": 91}, {"seq_length": 8}, {"seed": 8}])
def test_another_request_does_not_hit(tmp_path: Path, change: dict[str, int]) -> None:
    load_index(LENGTHS, (0, 30), **REQUEST, index_mapping_dir=tmp_path)
    other = load_index(LENGTHS, (0, 30), **{**REQUEST, **change}, index_mapping_dir=tmp_path)
    assert equal(other, build_index(LENGTHS, (0, 30), **{**REQUEST, **change}))


def test_other_data_under_the_same_request_does_not_hit(tmp_path: Path) -> None:
    load_index(LENGTHS, (0, 30), **REQUEST, index_mapping_dir=tmp_path)
    other = LENGTHS[::-1].copy()
    assert equal(
        load_index(other, (0, 30), **REQUEST, index_mapping_dir=tmp_path), build_index(other, (0, 30), **REQUEST)
    )


@pytest.mark.parametrize("name", ["document_index.npy", "sample_index.npy", "shuffle_index.npy", "commit.json"])
def test_a_shortened_or_missing_file_is_no_hit(tmp_path: Path, name: str) -> None:
    built = load_index(LENGTHS, (0, 30), **REQUEST, index_mapping_dir=tmp_path / "whole")
    load_index(LENGTHS, (0, 30), **REQUEST, index_mapping_dir=tmp_path / "cut")
    (path,) = (tmp_path / "cut").rglob(name)
    path.write_bytes(path.read_bytes()[:-1])
    assert equal(load_index(LENGTHS, (0, 30), **REQUEST, index_mapping_dir=tmp_path / "cut"), built)
    path.unlink()
    assert equal(load_index(LENGTHS, (0, 30), **REQUEST, index_mapping_dir=tmp_path / "cut"), built)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data\.index_mapping_dir: cannot write"):
        load_index(LENGTHS, (0, 30), **REQUEST, index_mapping_dir=tmp_path / "file")


def test_a_split_of_empty_sequences_is_refused() -> None:
    with pytest.raises(UserError, match="sequences from 2 to 3 are empty"):
        build_index(np.array([1, 1, 0, 0], dtype=np.int32), (2, 4), **REQUEST)


def test_no_samples_at_all_can_be_cached(tmp_path: Path) -> None:
    lengths = np.array([3], dtype=np.int32)
    for _ in range(2):
        index = load_index(lengths, (0, 1), num_samples=0, seq_length=16, seed=1, index_mapping_dir=tmp_path)
        assert len(index.shuffle_index) == 0
