"""The samples and steps of an epoch of instruction data, on NxDT and on the native backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trainwright.dataset.sft_counts import RecordCounts
from trainwright.dataset.sft_packing import DROPPED, Packer, padded_lengths, steps_per_epoch


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The run that the data is for."""

    seq_length: int
    backend: Literal["nxdt", "native"] = "nxdt"
    packing: bool = True  # of NxDT
    num_records: int | None = None  # NxDT's dev_choose_samples: only the first so many of the file; None: all
    global_batch_size: int | None = None  # None: samples a step are not looked at
    data_parallel_size: int = 1
    max_steps: int | None = None  # None: epochs are not looked at
    vocab_size: int | None = None  # of the model; None: not looked at


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The samples of an epoch on one backend."""

    samples: int
    tokens: int  # of all samples: samples * seq_length
    steps_per_epoch: int | None  # None: no global batch size was given
    epochs: float | None  # in the run's max_steps; None: unknown, or no step fits an epoch


@dataclass(frozen=True, kw_only=True)
class NxdtSamples(Samples):
    """What NxDT makes of the file. Tokens and shares are of the samples that can be trained on."""

    records: int  # in those samples
    samples_of_several_records: int
    padding_tokens: int
    separator_tokens: int  # one after each packed record
    prompt_tokens: int  # bos included; their label should be masked
    dropped_records: int
    dropped_tokens: int
    exact_length_records: int  # of seq_length tokens exactly
    failing_samples: int  # without packing: longer than seq_length, so the step that draws one fails
    lost_samples_per_epoch: int | None  # that fill no whole batch


def nxdt_samples(counts: RecordCounts, recipe: Recipe) -> NxdtSamples:
    """Return what NxDT makes of a file's records, with packing or without."""
    return _packed(counts, recipe) if recipe.packing else _padded(counts, recipe)


def native_samples(counts: RecordCounts, recipe: Recipe) -> Samples:
    """Return the samples of the native backend, which reads the records as one stream of tokens.

    Samples share a token with their neighbours (see gpt_index), and those of the next epoch fill the last batch of one.
    """
    samples = (int(counts.lengths.sum()) - 1) // recipe.seq_length
    batch = recipe.global_batch_size
    return Samples(
        samples=samples,
        tokens=samples * recipe.seq_length,
        steps_per_epoch=None if batch is None else samples // batch,
        epochs=None if batch is None or recipe.max_steps is None or not samples else recipe.max_steps * batch / samples,
    )


def _packed(counts: RecordCounts, recipe: Recipe) -> NxdtSamples:
    packer = Packer(recipe.seq_length)
    sample_of_record = np.array([packer.place(length) for length in counts.lengths.tolist()], dtype=np.int64)
    kept = sample_of_record != DROPPED
    per_sample = np.bincount(sample_of_record[kept])
    samples, records = len(per_sample), int(kept.sum())
    tokens = samples * recipe.seq_length
    return NxdtSamples(
        samples=samples,
        tokens=tokens,
        records=records,
        samples_of_several_records=int((per_sample > 1).sum()),
        padding_tokens=tokens - int(counts.lengths[kept].sum()) - records,
        separator_tokens=records,
        prompt_tokens=int(counts.prompts[kept].sum()),
        dropped_records=int((~kept).sum()),
        dropped_tokens=int(counts.lengths[~kept].sum()),
        exact_length_records=int((counts.lengths == recipe.seq_length).sum()),
        failing_samples=0,
        **_nxdt_steps(samples, recipe),
    )


def _padded(counts: RecordCounts, recipe: Recipe) -> NxdtSamples:
    lengths = counts.lengths
    fits = padded_lengths(lengths, recipe.seq_length) == recipe.seq_length
    tokens = int(fits.sum()) * recipe.seq_length
    return NxdtSamples(
        samples=len(lengths),
        tokens=tokens,
        records=int(fits.sum()),
        samples_of_several_records=0,
        padding_tokens=tokens - int(lengths[fits].sum()),
        separator_tokens=0,
        prompt_tokens=int(counts.prompts[fits].sum()),
        dropped_records=0,
        dropped_tokens=0,
        exact_length_records=int((lengths == recipe.seq_length).sum()),
        failing_samples=int((~fits).sum()),
        **_nxdt_steps(len(lengths), recipe),
    )


def _nxdt_steps(samples: int, recipe: Recipe) -> dict[str, Any]:
    batch, ranks = recipe.global_batch_size, recipe.data_parallel_size
    if batch is None:
        return {"steps_per_epoch": None, "lost_samples_per_epoch": None, "epochs": None}
    steps = steps_per_epoch(samples, data_parallel_size=ranks, global_batch_size=batch)
    lost = samples - steps * (batch // ranks) * ranks
    epochs = None if recipe.max_steps is None or steps == 0 else recipe.max_steps / steps
    return {"steps_per_epoch": steps, "lost_samples_per_epoch": lost, "epochs": epochs}
