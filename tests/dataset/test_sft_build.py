"""Two files of records become one data set, whose splits they are."""

from pathlib import Path

import numpy as np
import pytest

from tests.dataset.words import BOS, EOS, FIRST_WORD, words, write_records
from trainwright.dataset.blend import Blend
from trainwright.dataset.indexed import IndexedDataset
from trainwright.dataset.samples import open_dataset
from trainwright.dataset.sft_build import build_sft
from trainwright.errors import UserError

TRAIN = [(f"w{number}", f"w{number} w{number}") for number in range(20)]
VALIDATION = [(f"w{number}", f"w{number}") for number in range(50, 60)]


def build(folder: Path, told: list[str] | None = None) -> Blend:
    report = (told if told is not None else []).append
    tokenizer = words(folder / "words")
    return build_sft(folder / "train.jsonl", folder / "val.jsonl", tokenizer, folder / "cache", report)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_records(tmp_path / "train.jsonl", TRAIN)
    write_records(tmp_path / "val.jsonl", VALIDATION)
    return tmp_path


def test_each_record_is_a_document_in_file_order(folder: Path) -> None:
    blend = build(folder)
    dataset = IndexedDataset(blend.prefixes[0])
    assert len(dataset) == len(dataset.document_indices) - 1 == 30
    assert dataset[1].tolist() == [BOS, FIRST_WORD + 1, FIRST_WORD + 1, FIRST_WORD + 1, EOS]
    assert dataset[20].tolist() == [BOS, FIRST_WORD + 50, FIRST_WORD + 50, EOS]
    assert blend.bounds == {"train": (0, 20), "validation": (20, 30), "test": None}


def test_each_split_comes_from_its_own_file(folder: Path) -> None:
    data = open_dataset(
        build(folder),
        splits_string="100,0,0",
        seq_length=6,
        vocab_size=100,
        seed=1,
        index_mapping_dir=None,
        num_train_samples=40,
        num_validation_samples=10,
    )
    assert data.validation is not None
    for samples, numbers in ((data.train, range(20)), (data.validation, range(50, 60))):
        tokens = {int(token) for sample in range(len(samples)) for token in samples[sample]}
        assert tokens == {BOS, EOS, *(FIRST_WORD + number for number in numbers)}


def test_it_is_built_once_and_again_when_either_file_changes(folder: Path) -> None:
    told: list[str] = []
    found = [build(folder, told), build(folder, told)]
    assert found[0] == found[1]
    assert len(told) == 3, "a start, and a line for each file"
    write_records(folder / "val.jsonl", VALIDATION[:-1])
    found.append(build(folder, told))
    write_records(folder / "train.jsonl", TRAIN[:-1])
    found.append(build(folder, told))
    assert len({blend.prefixes for blend in found}) == 3
    assert [blend.bounds["validation"] for blend in found if blend.bounds] == [(20, 30), (20, 30), (20, 29), (19, 28)]


def test_the_same_content_elsewhere_is_stored_alike(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    write_records(other / "train.jsonl", TRAIN)
    write_records(other / "val.jsonl", VALIDATION)
    (first,), (second,) = build(folder).prefixes, build(other).prefixes
    assert first.parent.parent.name == second.parent.parent.name
    np.testing.assert_array_equal(IndexedDataset(first).tokens, IndexedDataset(second).tokens)
    assert first.with_suffix(".idx").read_bytes() == second.with_suffix(".idx").read_bytes()


def test_the_faults_of_both_files_are_told_and_nothing_stays(folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"input": "a"}\n')
    (folder / "val.jsonl").write_text("\n")
    with pytest.raises(UserError) as refused:
        build(folder)
    assert "data.train_path" in str(refused.value)
    assert "line 1: field 'output' is missing" in str(refused.value)
    assert "data.val_path" in str(refused.value)
    assert not list((folder / "cache").rglob("*"))


def test_a_missing_file_names_its_key(folder: Path) -> None:
    (folder / "val.jsonl").unlink()
    with pytest.raises(UserError, match=r"data\.val_path: .*val\.jsonl cannot be read: No such file"):
        build(folder)
