"""What megatron-core 0.16.1 wrote and read (tests/golden/megatron) is what we write and read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from trainwright.dataset.blend import blend_indices, parse_data_prefix
from trainwright.dataset.gpt_index import build_index
from trainwright.dataset.indexed import DTYPES, IndexedDataset, IndexedWriter
from trainwright.dataset.samples import open_dataset
from trainwright.dataset.splits import split_bounds
from trainwright.errors import UserError

GOLDEN = Path(__file__).parents[1] / "golden" / "megatron"
CASES: dict[str, Any] = json.loads((GOLDEN / "cases.json").read_text())


@pytest.fixture(scope="module")
def arrays() -> Mapping[str, npt.NDArray[Any]]:
    with np.load(GOLDEN / "arrays.npz") as stored:
        return dict(stored)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
def test_written_files_are_equal_byte_for_byte(
    tmp_path: Path, arrays: Mapping[str, npt.NDArray[Any]], dtype: np.dtype[Any]
) -> None:
    with IndexedWriter(tmp_path / "ours", dtype) as writer:
        for document in CASES["documents"]:
            for sequence in document:
                writer.add_sequence(np.array(sequence, dtype=np.int64))
            writer.end_document()
    for ending in ("bin", "idx"):
        assert (tmp_path / f"ours.{ending}").read_bytes() == arrays[f"pair/{dtype.name}.{ending}"].tobytes()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.name)
def test_its_files_are_read(tmp_path: Path, arrays: Mapping[str, npt.NDArray[Any]], dtype: np.dtype[Any]) -> None:
    for ending in ("bin", "idx"):
        arrays[f"pair/{dtype.name}.{ending}"].tofile(tmp_path / f"theirs.{ending}")
    dataset = IndexedDataset(tmp_path / "theirs")
    sequences = [sequence for document in CASES["documents"] for sequence in document]
    assert dataset.dtype == dtype
    assert [sequence.tolist() for sequence in (dataset[i] for i in range(len(dataset)))] == sequences
    assert dataset.document_indices.tolist() == [0, 2, 3, 6]


@pytest.mark.parametrize("number", range(len(CASES["indices"])))
def test_document_sample_and_shuffle_index_are_equal(arrays: Mapping[str, npt.NDArray[Any]], number: int) -> None:
    case = dict(CASES["indices"][number])
    index = build_index(arrays["indices/lengths"], tuple(case.pop("bounds")), **case)
    for name in ("document_index", "sample_index", "shuffle_index"):
        golden = arrays[f"indices/{number}/{name}"]
        assert getattr(index, name).dtype == golden.dtype
        np.testing.assert_array_equal(getattr(index, name), golden)


@pytest.mark.parametrize(
    "case", CASES["splits"], ids=lambda case: f"{case['splits_string']}-of-{case['num_sequences']}"
)
def test_split_bounds_are_equal_or_empty_ones_refused(case: dict[str, Any]) -> None:
    if "empty" in case["bounds"]:
        with pytest.raises(UserError, match=r"data\.splits_string"):
            split_bounds(case["splits_string"], case["num_sequences"], "x.idx")
    else:
        bounds = split_bounds(case["splits_string"], case["num_sequences"], "x.idx")
        assert [list(split) if split else None for split in bounds.values()] == case["bounds"]


@pytest.mark.parametrize("number", range(len(CASES["blends"])))
def test_blends_draw_in_the_same_order(arrays: Mapping[str, npt.NDArray[Any]], number: int) -> None:
    dataset_index, dataset_sample_index = blend_indices(CASES["blends"][number], 500)
    np.testing.assert_array_equal(dataset_index, arrays[f"blends/{number}/dataset_index"])
    np.testing.assert_array_equal(dataset_sample_index, arrays[f"blends/{number}/dataset_sample_index"])


@pytest.mark.parametrize("number", range(len(CASES["samples"])))
def test_training_and_validation_read_the_same_tokens(
    tmp_path: Path, arrays: Mapping[str, npt.NDArray[Any]], number: int
) -> None:
    for name in ("a.bin", "a.idx", "b.bin", "b.idx"):
        arrays[f"samples/{name}"].tofile(tmp_path / name)
    case = CASES["samples"][number]
    data_prefix = [str(tmp_path / part) if part in ("a", "b") else part for part in case["data_prefix"]]
    data = open_dataset(
        parse_data_prefix(data_prefix),
        splits_string=case["splits_string"],
        seq_length=case["seq_length"],
        vocab_size=128,
        seed=1234,
        index_mapping_dir=None,
        num_train_samples=case["num_samples"][0],
        num_validation_samples=case["num_samples"][1],
    )
    assert data.validation is not None
    for split, samples in (("train", data.train), ("validation", data.validation)):
        golden = arrays[f"samples/{number}/{split}"]
        np.testing.assert_array_equal(np.stack([samples[i] for i in range(len(samples))]), golden)
