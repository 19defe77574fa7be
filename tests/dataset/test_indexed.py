"""A pair survives a round trip; a broken one is refused by name."""

import pickle
import zlib
from pathlib import Path

import numpy as np
import pytest

from trainwright.dataset.indexed import DTYPES, IndexedDataset, IndexedWriter, inspect_prefix, token_dtype
from trainwright.errors import UserError


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    prefix = tmp_path / "data.v1"
    with IndexedWriter(prefix, DTYPES[8]) as writer:
        writer.add_sequence(np.array([5, 6, 7, 8]))
        writer.add_sequence(np.array([9]))
        writer.end_document()
        writer.add_sequence(np.array([60_000, 1]))
        writer.end_document()
    return prefix


@pytest.mark.parametrize("seed", range(5))
def test_random_documents_survive_a_round_trip(tmp_path: Path, seed: int) -> None:
    random = np.random.RandomState(seed)
    lengths = random.randint(0, 50, random.randint(1, 40))
    lengths[0] = 1  # a pair without any token is refused
    sequences = [random.randint(0, 1 << 30, length) for length in lengths]
    ends = sorted({*random.randint(1, len(lengths) + 1, 5).tolist(), len(lengths)})
    with IndexedWriter(tmp_path / "x", DTYPES[4]) as writer:
        for number, sequence in enumerate(sequences, start=1):
            writer.add_sequence(sequence)
            if number in ends:
                writer.end_document()
    dataset = IndexedDataset(tmp_path / "x")
    assert [dataset[i].tolist() for i in range(len(dataset))] == [sequence.tolist() for sequence in sequences]
    assert dataset.document_indices.tolist() == [0, *ends]
    middle = len(dataset) // 2
    assert dataset.span(middle, len(dataset)).tolist() == np.concatenate([[], *sequences[middle:]]).tolist()


def test_a_part_of_a_sequence_is_read_by_offset_and_length(pair: Path) -> None:
    dataset = IndexedDataset(pair)
    assert dataset.get(0, 1, 2).tolist() == [6, 7]
    assert dataset.get(0, 3).tolist() == [8]
    assert dataset.span(1, 1).tolist() == []


def test_the_facts_of_a_pair(pair: Path) -> None:
    facts = inspect_prefix(pair)
    assert (facts.dtype, facts.num_sequences, facts.num_documents) == ("uint16", 3, 2)
    assert (facts.num_tokens, facts.max_token_id) == (7, 60_000)


def test_a_data_loader_worker_opens_the_pair_again(pair: Path) -> None:
    dataset = pickle.loads(pickle.dumps(IndexedDataset(pair)))
    assert dataset[1].tolist() == [9]


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(50_257, "uint16"), (65_499, "uint16"), (65_500, "int32"), (128_256, "int32")]
)
def test_tokens_take_two_bytes_below_65500(vocab_size: int, dtype: str) -> None:
    assert token_dtype(vocab_size).name == dtype


def test_a_token_that_the_dtype_cannot_hold_is_not_wrapped(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x", DTYPES[8]) as writer, pytest.raises(OverflowError, match="65536"):
        writer.add_sequence(np.array([1, 65_536]))


def test_an_error_while_writing_leaves_no_index(tmp_path: Path) -> None:
    with pytest.raises(OverflowError), IndexedWriter(tmp_path / "x", DTYPES[8]) as writer:
        writer.add_sequence(np.array([1_000_000]))
    assert not (tmp_path / "x.idx").exists()


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("data.v1.bin", None, "there is no such file"),
        ("data.v1.idx", None, "there is no such file"),
        ("data.v1.bin", b"", "it has 0 bytes, but data.v1.idx describes 14"),
        ("data.v1.bin", b"123", "it has 3 bytes, but data.v1.idx describes 14"),
        ("data.v1.bin", b"x" * 15, "it has 15 bytes, but data.v1.idx describes 14"),
        ("data.v1.idx", b"", "it is empty"),
        ("data.v1.idx", b"MMIDIDX", "fewer than a Megatron index header"),
        ("data.v1.idx", b"PK\x03\x04" * 20, "it begins with b'PK"),
        ("data.v1.idx", b"MMIDIDX\0\0" + bytes([2] + 7 * [0]) + bytes(40), "version 2 and dtype code 0"),
        ("data.v1.idx", b"MMIDIDX\0\0" + bytes([1] + 7 * [0] + [9]) + bytes(40), "version 1 and dtype code 9"),
    ],
)
def test_a_broken_pair_is_refused_naming_file_and_key(
    pair: Path, file: str, content: bytes | None, reason: str
) -> None:
    path = pair.parent / file
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as error:
        IndexedDataset(pair)
    assert reason in str(error.value)
    assert str(path) in str(error.value)
    assert "data.data_prefix" in str(error.value)


def test_an_index_cut_at_any_byte_is_refused(pair: Path) -> None:
    path = pair.parent / "data.v1.idx"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"data\.data_prefix"):
            IndexedDataset(pair)


def test_an_index_whose_documents_end_elsewhere_is_refused(pair: Path) -> None:
    path = pair.parent / "data.v1.idx"
    path.write_bytes(path.read_bytes()[:-8] + (2).to_bytes(8, "little"))
    with pytest.raises(UserError, match="documents do not end at its 3 sequences"):
        IndexedDataset(pair)


def test_multimodal_data_are_refused(pair: Path) -> None:
    path = pair.parent / "data.v1.idx"
    path.write_bytes(path.read_bytes() + bytes(3))
    with pytest.raises(UserError, match="a mode for each of its 3 sequences: it is of multimodal data"):
        IndexedDataset(pair)


def test_pairs_are_joined_as_if_written_in_one_go(pair: Path, tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "twice", DTYPES[8]) as writer:
        writer.add_index(pair)
        writer.add_index(pair)
    with IndexedWriter(tmp_path / "expected", DTYPES[8]) as expected:
        for _ in range(2):
            for document in ([[5, 6, 7, 8], [9]], [[60_000, 1]]):
                for sequence in document:
                    expected.add_sequence(np.array(sequence))
                expected.end_document()
    for ending in ("bin", "idx"):
        assert (tmp_path / f"twice.{ending}").read_bytes() == (tmp_path / f"expected.{ending}").read_bytes()
    assert writer.bin_crc32 == expected.bin_crc32 == zlib.crc32((tmp_path / "twice.bin").read_bytes())
