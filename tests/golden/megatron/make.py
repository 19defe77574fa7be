"""Make the goldens of this folder with the real megatron-core; run it in an environment of its own, see README.md.

Usage: python make.py
"""

import itertools
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split, get_blend_from_list

HERE = Path(__file__).parent
DOCUMENTS = [[[1, 2, 3, 4, 5], []], [[6, 7, 8, 9, 10, 11, 12]], [[13], [100, 101, 127], [0, 0]]]
SPLIT_STRINGS = ["99990,8,2", "95,5,0", "95,5", "1", "0.9,0.08,0.02", "3,3,3", "98/1/1", "0,1,0", "1,0,1"]
BLENDS = [[0.7, 0.3], [0.5, 0.5], [0.1] * 10, [0.25, 0.25, 0.5], [1.0], [1 / 3, 1 / 3, 1 / 3], [0.98, 0.01, 0.01]]


class NoTokenizer:
    """As much of a tokenizer as the data sets ask for."""

    eod = 0
    vocab_size = 128
    unique_identifiers = {}  # noqa: RUF012


def config(split: str, **more: object) -> GPTDatasetConfig:
    """Return a configuration for `split` and data sets that write no more than they must."""
    fixed = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False}
    return GPTDatasetConfig(split=split, tokenizer=NoTokenizer(), create_attention_mask=False, **fixed, **more)


def write_pair(prefix: str, dtype: type, documents: list) -> None:
    """Write documents, each a list of sequences, as a pair."""
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=dtype)
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(prefix + ".idx")


def random_pair(prefix: str, seed: int, num_sequences: int, longest: int) -> None:
    """Write sequences of random length, some of them empty, of which each is its own document."""
    random = np.random.RandomState(seed)
    lengths = random.randint(0, longest, num_sequences)
    write_pair(prefix, np.uint16, [[random.randint(0, 128, length).tolist()] for length in lengths])


def pairs(folder: Path, arrays: dict) -> None:
    """Store the bytes of the same documents in every dtype."""
    for dtype in DType:
        prefix = str(folder / dtype.name)
        write_pair(prefix, getattr(np, dtype.name), DOCUMENTS)
        for ending in ("bin", "idx"):
            arrays[f"pair/{dtype.name}.{ending}"] = np.fromfile(f"{prefix}.{ending}", dtype=np.uint8)


def indices(folder: Path, arrays: dict) -> list:
    """Store the three indices of many requests for the same sequences."""
    prefix = str(folder / "indices")
    random_pair(prefix, 7, 60, 40)
    dataset = IndexedDataset(prefix)  # kept: it unmaps its file when it goes
    arrays["indices/lengths"] = dataset.sequence_lengths.copy()
    cases = []
    for bounds, num_samples, seq_length, seed in itertools.product(
        [(0, 60), (5, 31), (57, 60)], [0, 37, 80, 145], [4, 16, 100], [1234, 1]
    ):
        wanted = np.arange(*bounds, dtype=np.int32)
        settings = config("1", random_seed=seed, sequence_length=seq_length, blend=([prefix], None))
        settings.path_to_cache = str(folder / f"cache-{bounds}")  # the cache's key does not hold the bounds
        built = GPTDataset(dataset, prefix, wanted, num_samples, Split.train, settings)
        name = f"indices/{len(cases)}"
        for index in ("document_index", "sample_index", "shuffle_index"):
            arrays[f"{name}/{index}"] = np.array(getattr(built, index))
        cases.append({"bounds": bounds, "num_samples": num_samples, "seq_length": seq_length, "seed": seed})
    return cases


def splits() -> list:
    """Return the bounds that the real builder gives for split strings and numbers of sequences."""
    found: list = []

    class Recorder(GPTDataset):
        """Notes the sequences it is given, in place of reading them."""

        def __init__(self, dataset: object, path: str, wanted: np.ndarray, size: int, split: Split, _: object) -> None:
            bounds[split.value] = [int(wanted[0]), int(wanted[-1]) + 1] if len(wanted) else "empty"

        @staticmethod
        def numel_low_level_dataset(_: object) -> int:
            return num_sequences

        @staticmethod
        def build_low_level_dataset(*_: object) -> None:
            return None

    for text, num_sequences in itertools.product(SPLIT_STRINGS, [1, 7, 914, 1000, 100_000]):
        bounds: list = [None, None, None]
        settings = config(text, random_seed=1, sequence_length=8, blend=(["nowhere"], None))
        builder = BlendedMegatronDatasetBuilder(Recorder, [1, 1, 1], lambda: True, settings)
        builder._build_megatron_dataset_splits("nowhere", settings.split_matrix, [1, 1, 1])
        found.append({"splits_string": text, "num_sequences": num_sequences, "bounds": bounds})
    return found


def blends(arrays: dict) -> list:
    """Store the order in which blends draw from their sources."""
    for number, weights in enumerate(BLENDS):
        chosen, numbers = np.zeros(500, dtype=np.int16), np.zeros(500, dtype=np.int64)
        helpers.build_blending_indices(chosen, numbers, np.array(weights), len(weights), len(chosen), False)
        arrays[f"blends/{number}/dataset_index"] = chosen
        arrays[f"blends/{number}/dataset_sample_index"] = numbers
    return BLENDS


def samples(folder: Path, arrays: dict) -> list:
    """Store pairs, and what training and validation read of them, alone and blended."""
    for name, seed in (("a", 11), ("b", 12)):
        random_pair(str(folder / name), seed, 80, 30)
        for ending in ("bin", "idx"):
            arrays[f"samples/{name}.{ending}"] = np.fromfile(folder / f"{name}.{ending}", dtype=np.uint8)
    cases = []
    for data_prefix in (["a"], ["1.0", "a"], ["3", "a", "1", "b"]):
        blend = get_blend_from_list([str(folder / part) if part in "ab" else part for part in data_prefix])
        settings = config("80,20,0", random_seed=1234, sequence_length=16, blend=blend)
        sizes = [150, 40, 0]
        built = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, settings).build()
        for split, dataset in zip(("train", "validation"), built, strict=False):
            rows = [
                torch.cat([row["tokens"], row["labels"][-1:]]).numpy()
                for row in map(dataset.__getitem__, range(len(dataset)))
            ]
            arrays[f"samples/{len(cases)}/{split}"] = np.stack(rows).astype(np.uint8)
        cases.append(
            {"data_prefix": data_prefix, "num_samples": sizes[:2], "splits_string": "80,20,0", "seq_length": 16}
        )
    return cases


def main() -> None:
    """Write cases.json and arrays.npz."""
    arrays: dict = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pairs(folder, arrays)
        cases = {
            "documents": DOCUMENTS,
            "indices": indices(folder, arrays),
            "splits": splits(),
            "blends": blends(arrays),
            "samples": samples(folder, arrays),
        }
    (HERE / "cases.json").write_text(json.dumps(cases) + "\n")
    np.savez_compressed(HERE / "arrays.npz", **arrays)


if __name__ == "__main__":
    main()
