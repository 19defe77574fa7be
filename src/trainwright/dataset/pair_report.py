"""What a Megatron data set holds, and what a run would make of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.dataset.blend import Blend
from trainwright.dataset.build_prefix import built_by
from trainwright.dataset.finding import DataFinding
from trainwright.dataset.gpt_index import epochs_for
from trainwright.dataset.indexed import IndexedDataset, token_range
from trainwright.dataset.samples import open_dataset
from trainwright.dataset.sft import ignore_bytes
from trainwright.dataset.sft_counts import spread
from trainwright.dataset.splits import Bounds, cut_at, empty_split
from trainwright.dataset.tokenizer import Tokenizer
from trainwright.errors import UserError

_ANY_VOCABULARY = 1 << 62


@dataclass(frozen=True, kw_only=True)
class PairUse:
    """What a run does with a data set; None: not known."""

    splits_string: str | None = None
    seq_length: int | None = None
    num_samples: Mapping[str, int] | None = None  # by split
    vocab_size: int | None = None
    seed: int = 1234


@dataclass(frozen=True, kw_only=True)
class SplitReport:
    """One part of a data set."""

    first: int  # sequence
    stop: int
    sequences: int
    tokens: int
    samples_per_epoch: int | None  # None: without a seq_length; the same below
    num_samples: int | None  # asked for
    epochs: int | None


@dataclass(frozen=True, kw_only=True)
class PairReport:
    """All that `trainwright data inspect` tells of a pair; where it cannot be opened, the findings only."""

    prefix: Path
    share: float  # of the blend
    findings: tuple[DataFinding, ...]
    is_damaged: bool  # the files themselves are at fault
    dtype: str | None = None
    num_sequences: int | None = None
    num_documents: int | None = None
    num_tokens: int | None = None
    bin_bytes: int | None = None
    smallest_token: float | None = None
    largest_token: float | None = None
    lengths: Mapping[str, float] | None = None  # of sequences, in tokens; see `spread`
    splits: Mapping[str, SplitReport | None] | None = None
    built: Mapping[str, Any] | None = None  # what `trainwright data build` made; None: another program did

    @property
    def has_errors(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON takes it."""
        return {**asdict(self), "prefix": str(self.prefix)}


def inspect_blend(
    blend: Blend,
    use: PairUse,
    tokenizer: Tokenizer | None,
    *,
    watched: Callable[[Path], Callable[[int], None]] = lambda _: ignore_bytes,
) -> list[PairReport]:
    """Return the report of each data set. `watched` gives what hears how many bytes of a path are read.

    Raises UserError for a splits string that is none.
    """
    reports = []
    for number, prefix in enumerate(blend.prefixes):
        asked = {split: blend.sizes_with_surplus(num)[number] for split, num in (use.num_samples or {}).items()}
        share = blend.weights[number] if blend.weights else 1.0
        reports.append(_inspect(prefix, share, use, asked, tokenizer, watched(prefix)))
    return reports


def first_samples(blend: Blend, use: PairUse, num_samples: int) -> list[npt.NDArray[Any]]:
    """Return the first training samples, or without a seq_length the first sequences. Raises UserError as reading does.

    The order of samples depends on how many a run asks for.
    """
    if use.seq_length is None:
        dataset = IndexedDataset(blend.prefixes[0])
        return [dataset[sequence] for sequence in range(min(num_samples, len(dataset)))]
    data = open_dataset(
        blend,
        splits_string=use.splits_string or "1",
        seq_length=use.seq_length,
        vocab_size=_ANY_VOCABULARY,
        seed=use.seed,
        index_mapping_dir=None,
        num_train_samples=(use.num_samples or {}).get("train", num_samples),
        num_validation_samples=0,
    )
    return [data.train[sample] for sample in range(min(num_samples, len(data.train)))]


def _inspect(
    prefix: Path,
    share: float,
    use: PairUse,
    asked: Mapping[str, int],
    tokenizer: Tokenizer | None,
    on_bytes: Callable[[int], None],
) -> PairReport:
    try:
        dataset = IndexedDataset(prefix)
    except UserError as error:
        return PairReport(prefix=prefix, share=share, findings=(_damage(str(error)),), is_damaged=True)
    damages = tuple(map(_damage, _faults(dataset)))
    if damages:
        return PairReport(prefix=prefix, share=share, findings=damages, is_damaged=True)
    smallest, largest = token_range(dataset, on_bytes)
    built = built_by(prefix)
    splits = None
    if use.splits_string is not None:
        bounds = cut_at(use.splits_string, len(dataset))
        splits = {name: split and _split(dataset, split, use, asked.get(name)) for name, split in bounds.items()}
    found = (
        *_token_findings(dataset, smallest, largest, use),
        *_split_findings(dataset, splits, use),
        *_end_findings(dataset, tokenizer, built),
    )
    return PairReport(
        prefix=prefix,
        share=share,
        findings=tuple(sorted(found, key=lambda finding: finding.severity)),
        is_damaged=False,
        dtype=dataset.dtype.name,
        num_sequences=len(dataset),
        num_documents=len(dataset.document_indices) - 1,
        num_tokens=dataset.num_tokens,
        bin_bytes=dataset.num_tokens * dataset.dtype.itemsize,
        smallest_token=smallest,
        largest_token=largest,
        lengths=spread(dataset.sequence_lengths),
        splits=splits,
        built=built,
    )


def _split(dataset: IndexedDataset, bounds: Bounds, use: PairUse, num_samples: int | None) -> SplitReport:
    first, stop = bounds
    tokens = int(dataset.sequence_lengths[first:stop].sum(dtype=np.int64))
    length = use.seq_length
    return SplitReport(
        first=first,
        stop=stop,
        sequences=stop - first,
        tokens=tokens,
        samples_per_epoch=max(0, tokens - 1) // length if length else None,
        num_samples=num_samples,
        epochs=epochs_for(num_samples, tokens, length) if length and num_samples and tokens else None,
    )


def _damage(message: str) -> DataFinding:
    return DataFinding(id="damaged", severity="error", message=message, remedy="copy or build the pair again")


def _faults(dataset: IndexedDataset) -> Iterator[str]:
    """Yield what is wrong with the index of a pair that can be opened."""
    lengths, pointers, bounds = dataset.sequence_lengths, dataset.sequence_pointers, dataset.document_indices
    index = f"{dataset.prefix}.idx"
    if (lengths < 0).any():
        yield f"{index}: sequence {int(np.argmax(lengths < 0))} has {lengths.min()} tokens"
        return
    starts = np.cumsum(lengths, dtype=np.int64) - lengths
    astray = pointers != starts * dataset.dtype.itemsize
    if astray.any():
        first = int(np.argmax(astray))
        yield (
            f"{index}: {int(astray.sum()):,} sequences do not begin where the one before ends; the first is {first}, "
            f"at byte {pointers[first]:,} of {dataset.num_tokens * dataset.dtype.itemsize:,}"
        )
    if bounds[0] != 0 or (np.diff(bounds) < 0).any():
        yield f"{index}: the document bounds do not rise from 0 to {len(dataset):,}"


def _token_findings(dataset: IndexedDataset, smallest: float, largest: float, use: PairUse) -> Iterator[DataFinding]:
    if dataset.dtype.kind == "f":
        yield DataFinding(
            id="no-tokens",
            severity="error",
            message=f"{dataset.prefix}.bin holds {dataset.dtype.name}, which are no token ids",
            remedy="give the data set of the tokens",
        )
    elif smallest < 0:
        yield DataFinding(
            id="vocabulary",
            severity="error",
            message=f"{dataset.prefix}.bin holds token {smallest}",
            remedy="build it again: ids begin with 0",
        )
    if use.vocab_size is not None and largest >= use.vocab_size:
        yield DataFinding(
            id="vocabulary",
            severity="error",
            message=f"{dataset.prefix}.bin holds token {largest}, where the model has {use.vocab_size:,} entries",
            remedy=f"use data of the model's tokenizer, or model.vocab_size={largest + 1} or more",
        )
    num_empty = int((dataset.sequence_lengths == 0).sum())
    if num_empty:
        yield DataFinding(
            id="empty-sequences",
            severity="warning",
            message=f"{num_empty:,} of {len(dataset):,} sequences of {dataset.prefix} have no token",
            remedy="they count in splits and add nothing; build it again without",
        )


def _split_findings(
    dataset: IndexedDataset, splits: Mapping[str, SplitReport | None] | None, use: PairUse
) -> Iterator[DataFinding]:
    if splits is None or use.splits_string is None:
        return
    problem = empty_split(use.splits_string, len(dataset), f"{dataset.prefix}.idx")
    if problem is not None:
        message, remedy = problem
        yield DataFinding(id="empty-split", severity="error", message=message, remedy=remedy)
    for name, split in splits.items():
        if split is None or not split.sequences:
            continue
        if not split.tokens:
            yield DataFinding(
                id="empty-split",
                severity="error",
                message=f"all {split.sequences:,} sequences of {dataset.prefix} for {name} are empty",
                remedy="give a larger weight, or weight 0 to go without that split",
            )
        elif use.seq_length is not None and split.tokens <= use.seq_length:
            yield DataFinding(
                id="short-split",
                severity="warning",
                message=(
                    f"{name} has {split.tokens:,} tokens of {dataset.prefix}, fewer than the {use.seq_length + 1:,} of "
                    "one sample, which then repeats them"
                ),
                remedy="give that split a larger weight",
            )


def _end_findings(
    dataset: IndexedDataset, tokenizer: Tokenizer | None, built: Mapping[str, Any] | None
) -> Iterator[DataFinding]:
    if tokenizer is None:
        return
    if built is not None and built["tokenizer"] != tokenizer.identity:
        yield DataFinding(
            id="tokenizer",
            severity="error",
            message=f"{dataset.prefix} was built with {built['tokenizer']}, which is not {tokenizer.identity}",
            remedy="use the tokenizer that it was built with, or build it again",
        )
        return
    without = _without_end(dataset, tokenizer.eod)
    if without:
        yield DataFinding(
            id="no-end",
            severity="warning",
            message=(
                f"{without:,} of {len(dataset.document_indices) - 1:,} documents of {dataset.prefix} do not end with "
                f"the end-of-document token {tokenizer.eod}"
            ),
            remedy="is it this tokenizer's data? Samples run across documents, and nothing tells where one ends",
        )


def _without_end(dataset: IndexedDataset, eod: int) -> int:
    """Return how many documents that have tokens end with another one."""
    ends = np.concatenate([[0], np.cumsum(dataset.sequence_lengths, dtype=np.int64)])  # before each sequence
    stops = np.unique(ends[dataset.document_indices[1:]])
    return int((dataset.tokens[stops[stops > 0] - 1] != eod).sum())
