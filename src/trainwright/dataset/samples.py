"""The data section of a run becomes its training and validation samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.dataset import build
from trainwright.dataset.blend import Blend, blend_indices, parse_data_prefix
from trainwright.dataset.gpt_index import GptIndex, load_index
from trainwright.dataset.indexed import IndexedDataset, inspect_prefix
from trainwright.dataset.splits import Bounds, split_bounds
from trainwright.dataset.tokenizer import load_tokenizer
from trainwright.dataset.unigram import unigram_cross_entropy
from trainwright.errors import UserError


@dataclass(frozen=True, kw_only=True)
class GptSamples:
    """The samples of one split of one data set: int64 arrays [seq_length + 1].

    Inputs are all but the last token, labels all but the first.
    """

    dataset: IndexedDataset
    index: GptIndex
    vocab_size: int

    def __len__(self) -> int:
        return len(self.index.shuffle_index)

    def __getitem__(self, sample: int) -> npt.NDArray[np.int64]:
        """Return one sample. Raises UserError for a token that the model's vocabulary lacks."""
        row = int(self.index.shuffle_index[sample])
        (first, first_offset), (last, last_offset) = self.index.sample_index[row : row + 2].tolist()
        sequences = self.index.document_index[first : last + 1].tolist()
        if first == last:
            parts = [self.dataset.get(sequences[0], first_offset, last_offset - first_offset + 1)]
        else:
            parts = [
                self.dataset.get(sequences[0], first_offset),
                *(self.dataset.get(sequence) for sequence in sequences[1:-1]),
                self.dataset.get(sequences[-1], 0, last_offset + 1),
            ]
        tokens = np.concatenate(parts).astype(np.int64)
        if tokens.max() >= self.vocab_size:
            raise UserError(
                f"model.vocab_size={self.vocab_size} is too small: {self.dataset.prefix}.bin holds token "
                f"{tokens.max()}. Set it to the vocabulary of the tokenizer that made the data set, or give the data "
                "set that belongs to this model (data.data_prefix)."
            )
        return tokens


@dataclass(frozen=True, kw_only=True)
class BlendedSamples:
    """The samples of one split of several data sets, mixed in the proportions of data.data_prefix."""

    sources: Sequence[GptSamples]
    dataset_index: npt.NDArray[np.int16]
    dataset_sample_index: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, sample: int) -> npt.NDArray[np.int64]:
        """Return one sample. Raises UserError as its source does."""
        source: GptSamples = self.sources[self.dataset_index[sample]]
        return source[int(self.dataset_sample_index[sample])]


@dataclass(frozen=True, kw_only=True)
class JoinedSamples:
    """The samples of several parts, one part after the other."""

    parts: Sequence[Samples]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __getitem__(self, sample: int) -> npt.NDArray[np.int64]:
        """Return one sample. Raises UserError as its part does."""
        for part in self.parts:
            if sample < len(part):
                return part[sample]
            sample -= len(part)
        raise IndexError(sample)


Samples = GptSamples | BlendedSamples | JoinedSamples


@dataclass(frozen=True, kw_only=True)
class GptData:
    """What a run trains on and validates with."""

    prefixes: Sequence[Path]
    train: Samples
    validation: Samples | None  # None: data.splits_string gives validation weight 0
    train_tokens: Sequence[npt.NDArray[Any]]  # the whole split of each data set, in storage order
    validation_tokens: Sequence[npt.NDArray[Any]]

    @property
    def max_token_id(self) -> int:
        """The largest token id in the data; reads all of it."""
        return max(inspect_prefix(prefix).max_token_id for prefix in self.prefixes)

    def unigram_cross_entropy(self, vocab_size: int) -> float | None:
        """Return the unigram loss on the validation split in nats (see `unigram`), None without that split.

        Several data sets are counted as they lie, without their weights in the blend.
        """
        if self.validation is None:
            return None
        return unigram_cross_entropy(self.train_tokens, self.validation_tokens, vocab_size)


def requested_samples(
    *, max_steps: int, global_batch_size: int, val_check_interval: int, limit_val_batches: int
) -> tuple[int, int]:
    """Return how many training and validation samples a run asks for.

    Validation runs every `val_check_interval` steps and once more. It starts at sample 0 each time and so reads fewer
    than these, but the order of samples depends on their number.
    Source: NeMo 1.23, megatron_gpt_model.build_train_valid_test_datasets, where limit_val_batches counts micro batches.
    """
    validations = max_steps // val_check_interval + 1
    return max_steps * global_batch_size, validations * limit_val_batches * global_batch_size


def prepare_prefixes(
    *,
    text: str,
    data_prefix: Sequence[str | float] | None,
    splits_string: str,
    cache_dir: Path,
    tokenizer_type: str,
    shuffle_tokens: bool,
    seed: int,
    report: Callable[[str], None],
) -> Blend:
    """Return the data sets of a run; without a `data_prefix`, tokenize `text` into `cache_dir` unless it is there.

    Any number of processes may call this at once, but one that calls it before the others spares their work.
    """
    if data_prefix is not None:
        if shuffle_tokens:
            raise UserError(
                "data.shuffle_tokens=true permutes the data set made of data.text; set data.data_prefix=null with it"
            )
        return parse_data_prefix(data_prefix)
    if tokenizer_type == "huggingface":
        raise UserError(
            "data.tokenizer.type=huggingface reads data.kind=sft; data.text is cut where GPT-2's encoding allows it, "
            "so use data.tokenizer.type=gpt2_bpe, or make a data set with `trainwright data build` (data.data_prefix)"
        )
    prefix = build.build_text(text, load_tokenizer(tokenizer_type), cache_dir, report)
    if shuffle_tokens:
        prefix = build.shuffle_tokens(prefix, splits_string, seed, cache_dir)
    return Blend(prefixes=(prefix,), weights=None)


def open_dataset(
    blend: Blend,
    *,
    splits_string: str,
    seq_length: int,
    vocab_size: int,
    seed: int,
    index_mapping_dir: Path | None,
    num_train_samples: int,
    num_validation_samples: int,
) -> GptData:
    """Return the samples of a run: at least as many as asked for, the data repeated as often as that takes.

    `vocab_size` is the model's. Raises UserError naming data.data_prefix, data.splits_string or data.index_mapping_dir.
    """
    datasets = [IndexedDataset(prefix) for prefix in blend.prefixes]
    bounds = [
        blend.bounds or split_bounds(splits_string, len(dataset), f"{dataset.prefix}.idx") for dataset in datasets
    ]

    def source_of(dataset: IndexedDataset, sequences: Bounds, num_samples: int) -> GptSamples:
        index = load_index(
            dataset.sequence_lengths,
            sequences,
            num_samples=num_samples,
            seq_length=seq_length,
            seed=seed,
            index_mapping_dir=index_mapping_dir,
        )
        return GptSamples(dataset=dataset, index=index, vocab_size=vocab_size)

    def samples_of(split: str, num_samples: int) -> Samples | None:
        sequences = [found for split_of in bounds if (found := split_of[split]) is not None]
        if not sequences:
            return None
        if blend.weights is None:
            return source_of(datasets[0], sequences[0], num_samples)
        dataset_index, dataset_sample_index = blend_indices(blend.weights, sum(blend.sizes(num_samples)))
        # Where the blend draws more than the surplus holds, megatron-core gives up; the source can as well be larger.
        drawn = np.bincount(dataset_index, minlength=len(datasets)).tolist()
        sizes = map(max, blend.sizes_with_surplus(num_samples), drawn)
        sources = list(map(source_of, datasets, sequences, sizes))
        return BlendedSamples(sources=sources, dataset_index=dataset_index, dataset_sample_index=dataset_sample_index)

    def tokens_of(split: str) -> list[npt.NDArray[Any]]:
        spans = [(dataset, split_of[split]) for dataset, split_of in zip(datasets, bounds, strict=True)]
        return [dataset.span(*sequences) for dataset, sequences in spans if sequences is not None]

    train = samples_of("train", num_train_samples)
    if train is None:
        raise UserError(f"data.splits_string={splits_string!r} gives training weight 0; right would be '95,5,0'")
    return GptData(
        prefixes=blend.prefixes,
        train=train,
        validation=samples_of("validation", num_validation_samples),
        train_tokens=tokens_of("train"),
        validation_tokens=tokens_of("validation"),
    )
