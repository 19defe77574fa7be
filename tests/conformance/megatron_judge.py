"""Runs in megatron-core's environment: writes and reads pairs, and reads samples. JSON on stdin, arrays to a file."""

import json
import sys

import numpy as np
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from megatron.core.datasets.utils import get_blend_from_list


class NoTokenizer:
    """As much of a tokenizer as the data sets ask for."""

    eod = 0
    vocab_size = 128
    unique_identifiers = {}  # noqa: RUF012


def write(prefix, dtype, documents):
    """Write documents, each a list of sequences, as a pair."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=getattr(np, dtype))
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def write_multimodal(prefix):
    """Write a pair in which each sequence has a mode."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16, multimodal=True)
    for mode in (0, 1, 1):
        builder.add_item(torch.tensor([1, 2, 3]), mode)
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


def join(prefix, dtype, parts):
    """Write the pairs `parts` as one."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=getattr(np, dtype))
    for part in parts:
        builder.add_index(part)
    builder.finalize(f"{prefix}.idx")


def read(prefix):
    """Return all that a pair holds."""
    dataset = IndexedDataset(prefix)
    return {
        "dtype": np.dtype(dataset.index.dtype).name,
        "sequences": [dataset[number].tolist() for number in range(len(dataset))],
        "documents": dataset.document_indices.tolist(),
    }


def rows(dataset):
    """Return the samples of a split with the last label behind the tokens."""
    read_rows = (dataset[number] for number in range(len(dataset)))
    return np.stack([torch.cat([row["tokens"], row["labels"][-1:]]).numpy() for row in read_rows])


def samples(case, number, arrays):
    """Store what training and validation read."""
    config = GPTDatasetConfig(
        split=case["splits_string"],
        tokenizer=NoTokenizer(),
        create_attention_mask=False,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        random_seed=case["seed"],
        sequence_length=case["seq_length"],
        blend=get_blend_from_list(case["data_prefix"]),
    )
    built = BlendedMegatronDatasetBuilder(GPTDataset, case["num_samples"], lambda: True, config).build()
    for split, dataset in zip(("train", "validation"), built):  # noqa: B905
        arrays[f"{number}/{split}"] = rows(dataset)


def main():
    asked = json.load(sys.stdin)
    arrays = {}
    for pair in asked["write"]:
        write(**pair)
    write_multimodal(asked["multimodal"])
    for pair in asked["join"]:
        join(**pair)
    found = [read(prefix) for prefix in asked["read"]]
    for number, case in enumerate(asked["cases"]):
        samples(case, number, arrays)
    np.savez(f"{sys.argv[1]}.npz", **arrays)
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(
            {"read": found, "optimal": {str(size): DType.optimal_dtype(size).__name__ for size in asked["sizes"]}}, file
        )


main()
