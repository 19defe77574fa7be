"""What a user would want to know of instruction data before NxDT trains on it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from trainwright.dataset.finding import DataFinding
from trainwright.dataset.sft_counts import RecordCounts
from trainwright.dataset.sft_epoch import NxdtSamples, Recipe

_SHOWN_NUMBERS = 5
_NO_IGNORE_INDEX = "NxDT's loss has no ignore index, so they add to the loss and to its gradient"


def find(counts: RecordCounts, unit: str, recipe: Recipe, nxdt: NxdtSamples) -> Iterator[DataFinding]:
    """Yield what is wrong with the records for `recipe`, errors first; `unit` is what their numbers count."""
    found = [*_tokens(counts, unit, recipe), *_texts(counts, unit)]
    if recipe.backend == "nxdt":
        found += [*_lengths(counts, unit, recipe, nxdt), *_batches(counts, recipe, nxdt), *_loss(recipe, nxdt)]
    yield from sorted(found, key=lambda finding: finding.severity)  # "error" < "warning"; stable


def _lengths(counts: RecordCounts, unit: str, recipe: Recipe, nxdt: NxdtSamples) -> Iterator[DataFinding]:
    too_long = counts.lengths >= recipe.seq_length
    if not too_long.any():
        return
    exactly = f", {nxdt.exact_length_records} of them of just that many" if nxdt.exact_length_records else ""
    told = f"{_records(counts, too_long, unit)} with {recipe.seq_length:,} tokens or more{exactly}"
    remedy = f"shorten or split them, or use data.seq_length={counts.lengths.max() + 1} or more"
    if recipe.packing:
        share = nxdt.dropped_tokens / counts.lengths.sum()
        dropped = f"{nxdt.dropped_tokens:,} tokens, {share:.1%} of the file"
        yield DataFinding(
            id="dropped",
            severity="error",
            message=f"{told}: NxDT drops what is that long without a word ({dropped})",
            remedy=remedy,
        )
    else:
        yield DataFinding(
            id="too-long",
            severity="error",
            message=f"{told}: NxDT pads them to the next multiple above, and the step that draws one fails",
            remedy=remedy,
        )


def _batches(counts: RecordCounts, recipe: Recipe, nxdt: NxdtSamples) -> Iterator[DataFinding]:
    if recipe.num_records is not None and recipe.num_records > len(counts.numbers):
        yield DataFinding(
            id="too-few",
            severity="error",
            message=(
                f"backend.dev_choose_samples={recipe.num_records:,} is more than the {len(counts.numbers):,} records, "
                "and NxDT fails with an IndexError"
            ),
            remedy="lower it; it holds for training and validation alike",
        )
    if nxdt.steps_per_epoch == 0:
        yield DataFinding(
            id="no-batch",
            severity="error",
            message=(
                f"{nxdt.samples:,} samples fill no batch of {recipe.global_batch_size:,} over "
                f"{recipe.data_parallel_size} data parallel ranks, and NxDT leaves out what fills none"
            ),
            remedy="use a smaller data.global_batch_size or more records",
        )


def _tokens(counts: RecordCounts, unit: str, recipe: Recipe) -> Iterator[DataFinding]:
    if recipe.vocab_size is not None and counts.largest.max() >= recipe.vocab_size:
        beyond = counts.largest >= recipe.vocab_size
        yield DataFinding(
            id="vocabulary",
            severity="error",
            message=(
                f"{_records(counts, beyond, unit)} with a token of {recipe.vocab_size} or above, up to "
                f"{counts.largest.max()}, where the model has {recipe.vocab_size:,} entries"
            ),
            remedy=f"use the model's own tokenizer, or model.vocab_size={counts.largest.max() + 1} or more",
        )


def _loss(recipe: Recipe, nxdt: NxdtSamples) -> Iterator[DataFinding]:
    if not nxdt.tokens:
        return
    unmasked, masked = nxdt.prompt_tokens, nxdt.padding_tokens + nxdt.separator_tokens
    if recipe.packing:
        yield DataFinding(
            id="prompt-trained",
            severity="warning",
            message=f"{_share(unmasked, nxdt)} are of prompts, and trained on: NxDT's packed labels are the ids",
            remedy="patch ConcatDataset.py as NxDT's pull request 22 does, or accept it",
        )
        if nxdt.samples_of_several_records:
            yield DataFinding(
                id="cross-record",
                severity="warning",
                message=(
                    f"{nxdt.samples_of_several_records:,} of {nxdt.samples:,} samples hold several records, and each "
                    "attends to those before it: positions run on, and no mask is used"
                ),
                remedy="accept it, or set packing false",
            )
    else:
        masked += unmasked
    if masked:
        yield DataFinding(
            id="masked-in-loss",
            severity="warning",
            message=f"{_share(masked, nxdt)} are masked with label -100, but {_NO_IGNORE_INDEX}",
            remedy="compare this loss with no other trainer's",
        )


def _texts(counts: RecordCounts, unit: str) -> Iterator[DataFinding]:
    _, first = np.unique(counts.digests, return_index=True)
    repeated = np.ones(len(counts.digests), dtype=np.bool_)
    repeated[first] = False
    rows = (
        ("no-tokens", counts.responses == 1, "with an output that becomes no token", "only the end is learned of them"),
        (
            "no-prompt",
            counts.prompts == 1,
            "with an input that becomes no token",
            "they teach a start without a prompt",
        ),
        (
            "special-token",
            counts.has_special,
            "with a text that spells the token that begins or ends one",
            "take it out of the text",
        ),
        ("duplicate", repeated, "that repeat an earlier one", "remove them, or accept that they weigh more"),
    )
    for name, affected, told, remedy in rows:
        if affected.any():
            yield DataFinding(
                id=name,
                severity="warning",
                message=f"{_records(counts, affected, unit)} {told}",
                remedy=remedy,
            )


def _share(tokens: int, nxdt: NxdtSamples) -> str:
    return f"{tokens:,} tokens of {nxdt.tokens:,} ({tokens / nxdt.tokens:.1%})"


def _records(counts: RecordCounts, affected: npt.NDArray[np.bool_], unit: str) -> str:
    """Return `11 records (lines 3, 17, 20, 21, 40 and 6 more)`."""
    numbers = counts.numbers[affected]
    shown = ", ".join(map(str, numbers[:_SHOWN_NUMBERS].tolist()))
    more = f" and {len(numbers) - _SHOWN_NUMBERS:,} more" if len(numbers) > _SHOWN_NUMBERS else ""
    plural = "s" if len(numbers) > 1 else ""
    return f"{len(numbers):,} record{plural} ({unit}{plural} {shown}{more})"
