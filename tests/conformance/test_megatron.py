"""megatron-core's own code as the judge: it writes and reads what we write and read, and draws the same samples."""

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.conformance.environments import python_of
from tests.dataset.words import save_words, text
from trainwright.dataset.blend import parse_data_prefix
from trainwright.dataset.build_prefix import build_prefix
from trainwright.dataset.indexed import DTYPES, IndexedDataset, IndexedWriter, token_dtype
from trainwright.dataset.parts import PairRecipe
from trainwright.dataset.samples import open_dataset
from trainwright.dataset.splits import cut_at
from trainwright.dataset.text_files import find_text_files
from trainwright.errors import UserError

DOCUMENTS = [[[1, 2, 3, 4, 5], []], [[6, 7, 8, 9, 10, 11, 12]], [[13], [100, 101, 127], [0, 0]], [[7] * 1000]]
SIZES = (1, 50_257, 65_499, 65_500, 65_536, 128_256)
NAMES = [dtype.name for dtype in DTYPES.values()]
# Of an epoch of training samples: below one, then with a last epoch that is and one that is not shuffled on its own.
EPOCHS = (0.6, 1.1, 1.9, 3.4)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What megatron-core said, the cases it was asked, and where the pairs are."""

    answer: dict[str, Any]
    arrays: Mapping[str, npt.NDArray[Any]]
    cases: list[dict[str, Any]]
    folder: Path


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Judged:
    """Show pairs and requests of ours to megatron-core and return what it makes of them: once, importing it is slow."""
    python = python_of("megatron-core")
    folder = tmp_path_factory.mktemp("megatron")
    for name in NAMES:
        _write(folder / f"ours-{name}", name, DOCUMENTS)
    built = _build(folder)
    with IndexedWriter(folder / "ours-joined", IndexedDataset(built).dtype) as writer:
        writer.add_index(built)
        writer.add_index(built)
    cases = _cases(folder)
    asked = {
        "write": [{"prefix": str(folder / f"theirs-{name}"), "dtype": name, "documents": DOCUMENTS} for name in NAMES],
        "multimodal": str(folder / "multimodal"),
        "join": [{"prefix": str(folder / "theirs-joined"), "dtype": "uint16", "parts": [str(built)] * 2}],
        "read": [*(str(folder / f"ours-{name}") for name in NAMES), str(built)],
        "sizes": SIZES,
        "cases": cases,
    }
    subprocess.run(
        [python, Path(__file__).with_name("megatron_judge.py"), folder / "answer.json"],
        input=json.dumps(asked),
        text=True,
        check=True,
        cwd=folder,
    )
    answer = json.loads((folder / "answer.json").read_text())
    with np.load(folder / "answer.json.npz") as arrays:
        return Judged(answer=answer, arrays=dict(arrays), cases=cases, folder=folder)


def _write(prefix: Path, dtype: str, documents: list[list[list[int]]]) -> None:
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            for sequence in document:
                writer.add_sequence(np.array(sequence, dtype=np.int64))
            writer.end_document()


def _build(folder: Path) -> Path:
    """Return a pair that `trainwright data build` makes of a text in several parts."""
    lines = [json.dumps({"text": text(1 + number % 30, number)}) for number in range(200)]
    (folder / "x.jsonl").write_text("\n".join(lines))
    build_prefix(
        find_text_files([str(folder / "x.jsonl")], "file"),
        folder / "built",
        PairRecipe(tokenizer_type="huggingface", tokenizer_name=str(save_words(folder / "words"))),
        workers=1,
        skip_bad=False,
        overwrite=False,
        on_progress=lambda _: None,
        piece_bytes=4000,
    )
    return folder / "built"


def _cases(folder: Path) -> list[dict[str, Any]]:
    """Write pairs of random sequences and return requests for samples of them, alone and blended."""
    random = np.random.RandomState(0)
    for name, num_sequences, longest in (("a", 90, 40), ("b", 70, 60), ("many", 60_000, 3)):
        lengths = random.randint(0, longest, num_sequences)
        _write(folder / name, "uint16", [[random.randint(0, 128, length).tolist()] for length in lengths])
    a, b, many = (str(folder / name) for name in ("a", "b", "many"))
    drawn = (
        ([a], "80,15,5"),
        (["1.0", a], "80,15,5"),
        (["3", a, "1", b], "80,20,0"),
        (["0.31", b, "0.69", a], "60,30,10"),
        ([a], "95,5"),
        ([many], "99990,8,2"),
    )
    return [
        {
            "data_prefix": data_prefix,
            "splits_string": splits_string,
            "seq_length": seq_length,
            "seed": int(random.randint(0, 10_000)),
            "num_samples": [int(epochs * _tokens(data_prefix, splits_string) / seq_length), 12, 3],
        }
        for data_prefix, splits_string in drawn
        for seq_length in ((256,) if data_prefix == [many] else (4, 32))
        for epochs in EPOCHS
    ]


def _tokens(data_prefix: list[str], splits_string: str) -> int:
    """Return the training tokens of the last data set."""
    dataset = IndexedDataset(Path(data_prefix[-1]))
    train = cut_at(splits_string, len(dataset))["train"]
    assert train is not None
    return int(dataset.sequence_lengths[train[0] : train[1]].sum())


@pytest.mark.parametrize("name", NAMES)
def test_both_write_the_same_bytes(judged: Judged, name: str) -> None:
    for ending in ("bin", "idx"):
        ours, theirs = (judged.folder / f"{who}-{name}.{ending}" for who in ("ours", "theirs"))
        assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_each_reads_the_others_pair(judged: Judged, name: str) -> None:
    sequences = [sequence for document in DOCUMENTS for sequence in document]
    theirs = judged.answer["read"][NAMES.index(name)]
    assert theirs == {"dtype": name, "sequences": sequences, "documents": [0, 2, 3, 6, 7]}
    dataset = IndexedDataset(judged.folder / f"theirs-{name}")
    assert [dataset[number].tolist() for number in range(len(dataset))] == sequences


def test_a_pair_of_data_build_is_read_and_joined_by_both(judged: Judged) -> None:
    dataset, theirs = IndexedDataset(judged.folder / "built"), judged.answer["read"][-1]
    assert theirs["sequences"] == [dataset[number].tolist() for number in range(len(dataset))]
    assert theirs["documents"] == list(range(201))
    for ending in ("bin", "idx"):
        ours, others = (judged.folder / f"{who}-joined.{ending}" for who in ("ours", "theirs"))
        assert ours.read_bytes() == others.read_bytes()


def test_a_pair_of_multimodal_data_is_refused(judged: Judged) -> None:
    with pytest.raises(UserError, match="it is of multimodal data"):
        IndexedDataset(judged.folder / "multimodal")


def test_the_dtype_of_a_vocabulary_is_the_same(judged: Judged) -> None:
    assert judged.answer["optimal"] == {str(size): token_dtype(size).name for size in SIZES}


def test_all_samples_are_the_same_in_the_same_order(judged: Judged) -> None:
    assert len(judged.cases) == 44
    for number, case in enumerate(judged.cases):
        data = open_dataset(
            parse_data_prefix(case["data_prefix"]),
            splits_string=case["splits_string"],
            seq_length=case["seq_length"],
            vocab_size=128,
            seed=case["seed"],
            index_mapping_dir=None,
            num_train_samples=case["num_samples"][0],
            num_validation_samples=case["num_samples"][1],
        )
        assert data.validation is not None
        for split, samples in (("train", data.train), ("validation", data.validation)):
            ours = np.stack([samples[sample] for sample in range(len(samples))])
            np.testing.assert_array_equal(ours, judged.arrays[f"{number}/{split}"], err_msg=f"{split} of {case}")
