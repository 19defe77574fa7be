"""The order in which a split is read: document, sample and shuffle index, equal to those of megatron-core's GPTDataset.

Its "documents" are sequences. They are repeated for as many epochs as the samples need, and shuffled; cut every
seq_length tokens into samples, which run across ends of sequences and share one token with their neighbours; and the
samples are shuffled again.
Source: megatron.core.datasets.gpt_dataset and helpers.cpp (build_sample_idx), 0.16.1.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.dataset.splits import Bounds
from trainwright.dataset.store import find_or_build, save_array
from trainwright.errors import UserError

_NAMES = ("document_index", "sample_index", "shuffle_index")
# A last epoch of which less than this share is needed is shuffled on its own: then only it is incomplete, not all.
_FULL_ENOUGH = 0.80


@dataclass(frozen=True, kw_only=True)
class GptIndex:
    """Sample i runs from `sample_index[shuffle_index[i]]` to the row after it, both tokens included."""

    document_index: npt.NDArray[np.int32]  # [epochs * sequences] sequence numbers
    sample_index: npt.NDArray[Any]  # [samples + 1, 2] position in document_index, token offset in that sequence
    shuffle_index: npt.NDArray[Any]  # [samples]


def build_index(
    sequence_lengths: npt.NDArray[np.int32], bounds: Bounds, *, num_samples: int, seq_length: int, seed: int
) -> GptIndex:
    """Return the index of at least `num_samples` samples of `seq_length` + 1 tokens from the sequences within `bounds`.

    Raises UserError where these hold no tokens at all: no number of epochs would do.
    """
    first, stop = bounds
    tokens_per_epoch = int(sequence_lengths[first:stop].sum(dtype=np.int64))
    if tokens_per_epoch == 0:
        raise UserError(
            f"data.splits_string: all sequences from {first} to {stop - 1} are empty; give that split a larger weight"
        )
    num_epochs = epochs_for(num_samples, tokens_per_epoch, seq_length)
    before_last_epoch = ((num_epochs - 1) * tokens_per_epoch - 1) // seq_length
    per_epoch = (tokens_per_epoch - 1) // seq_length
    separate = num_epochs > 1 and num_samples - before_last_epoch < int(_FULL_ENOUGH * per_epoch)

    random = np.random.RandomState(seed)
    documents = np.arange(first, stop, dtype=np.int32)
    document_parts = [np.tile(documents, num_epochs - 1), documents] if separate else [np.tile(documents, num_epochs)]
    document_index = _shuffled(random, document_parts)
    sample_index = _cut_samples(sequence_lengths, document_index, seq_length)
    total = len(sample_index) - 1
    dtype = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
    edges = [0, before_last_epoch, total] if separate else [0, total]
    sample_parts = [np.arange(*edge, dtype=dtype) for edge in pairwise(edges)]
    return GptIndex(
        document_index=document_index, sample_index=sample_index, shuffle_index=_shuffled(random, sample_parts)
    )


def epochs_for(num_samples: int, tokens_per_epoch: int, seq_length: int) -> int:
    """Return how often tokens, of which there is one at least, are read for so many samples."""
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def load_index(
    sequence_lengths: npt.NDArray[np.int32],
    bounds: Bounds,
    *,
    num_samples: int,
    seq_length: int,
    seed: int,
    index_mapping_dir: Path | None,
) -> GptIndex:
    """Return `build_index`'s result, from `index_mapping_dir` where it was built before; None: in memory, each time.

    The cache goes by what the index depends on and by no path: the same data on another mount hits, other data never.
    """
    arguments = {"num_samples": num_samples, "seq_length": seq_length, "seed": seed}
    if index_mapping_dir is None:
        return build_index(sequence_lengths, bounds, **arguments)
    lengths = np.ascontiguousarray(sequence_lengths[bounds[0] : bounds[1]])
    content = hashlib.sha256(lengths.tobytes()).hexdigest()
    key = hashlib.sha256(json.dumps(["gpt-index-1", content, bounds, arguments]).encode()).hexdigest()[:16]

    def build(directory: Path) -> Mapping[str, Any]:
        index = build_index(sequence_lengths, bounds, **arguments)
        for name in _NAMES:
            save_array(directory / f"{name}.npy", getattr(index, name))
        return arguments

    directory = find_or_build(index_mapping_dir / f"gpt-index-{key}", build, key="data.index_mapping_dir")
    return GptIndex(**{name: np.load(directory / f"{name}.npy", mmap_mode="r") for name in _NAMES})


def _shuffled(random: np.random.RandomState, parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    for part in parts:
        random.shuffle(part)
    return np.concatenate(parts) if len(parts) > 1 else parts[0]


def _cut_samples(
    sequence_lengths: npt.NDArray[np.int32], document_index: npt.NDArray[np.int32], seq_length: int
) -> npt.NDArray[Any]:
    """Return where each sample starts, and where the last one ends.

    megatron-core walks the documents; since sample i starts at token i * seq_length, a binary search finds the same.
    """
    ends = np.cumsum(sequence_lengths[document_index], dtype=np.int64)
    num_samples = (int(ends[-1]) - 1) // seq_length
    starts = np.arange(num_samples + 1, dtype=np.int64) * seq_length
    positions = np.searchsorted(ends, starts, side="right")
    largest = max(len(document_index), int(sequence_lengths.max()))
    sample_index = np.empty((num_samples + 1, 2), dtype=np.int32 if largest <= np.iinfo(np.int32).max else np.int64)
    sample_index[:, 0] = positions
    sample_index[:, 1] = starts - (ends[positions] - sequence_lengths[document_index[positions]])
    sample_index[0] = 0  # also where the first sequences are empty, which a search would skip
    return sample_index
