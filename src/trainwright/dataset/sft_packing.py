"""What NxDT makes of instruction data: samples of seq_length tokens, with its mistakes.

Source: NxDT, lightning_modules/data/datasets/{ConcatDataset,PaddedDataset}.py and data/utils.py (SDK 2.26). Padding is
id 0, its pad_token_type_id. The loss has no ignore index: a label of -100 gives logsumexp and a gradient, and the mean
divides by all tokens (modeling_llama.py), so what a mask leaves out is trained on all the same, towards nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.dataset.sft import IGNORE, TokenizedRecord

DROPPED = -1
_PAD_ID = 0


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A sample as NxDT's data loader gives it to the model: three columns of seq_length int64."""

    input_ids: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    attention_mask: npt.NDArray[np.int64]


class Packer:
    """Gives records to samples in file order, as ConcatDataset does.

    A sample takes a record while its tokens and the record's stay below `seq_length`; each brings one more end-of-text
    token. A record of `seq_length` tokens or more is left out, and ends the sample before it.
    """

    def __init__(self, seq_length: int) -> None:
        self._seq_length = seq_length
        self._sample = self._filled = 0

    def place(self, length: int) -> int:
        """Return the number of the sample that takes the next record, of `length` tokens, or DROPPED."""
        if self._filled and self._filled + length >= self._seq_length:
            self._sample, self._filled = self._sample + 1, 0
        if length >= self._seq_length:
            return DROPPED
        self._filled += length + 1
        return self._sample


def padded_lengths(lengths: npt.NDArray[Any], seq_length: int) -> npt.NDArray[np.int64]:
    """Return what each record is padded to without packing: the next multiple of `seq_length` ABOVE its length.

    So a record of exactly `seq_length` tokens doubles; a sample of any other length than `seq_length` fails the step.
    """
    return (np.asarray(lengths, dtype=np.int64) // seq_length + 1) * seq_length


def packed_sample(records: Sequence[TokenizedRecord], seq_length: int, eos: int) -> Sample:
    """Return the sample that packing makes of `records`, which `Packer` gave to it.

    All three columns are copies of the ids (line 59 of ConcatDataset.py), and so the prompt is trained on; they differ
    in separators and padding only.
    """

    def column(separator: int, padding: int) -> npt.NDArray[np.int64]:
        joined = np.concatenate([part for record in records for part in (record.ids, [separator])])
        return _padded(joined, seq_length, padding)

    return Sample(input_ids=column(eos, _PAD_ID), labels=column(IGNORE, IGNORE), attention_mask=column(0, 0))


def padded_sample(record: TokenizedRecord, seq_length: int) -> Sample:
    """Return the sample that padding makes of a record without packing; its length is that of `padded_lengths`."""
    length = int(padded_lengths(np.array([len(record.ids)]), seq_length)[0])
    return Sample(
        input_ids=_padded(record.ids, length, _PAD_ID),
        labels=_padded(record.labels, length, IGNORE),
        attention_mask=_padded(np.ones_like(record.ids), length, 0),
    )


def steps_per_epoch(num_samples: int, *, data_parallel_size: int, global_batch_size: int) -> int:
    """Return the optimizer steps of an epoch; sampler and loader both leave out what fills no whole batch.

    Source: NxDT, model_alignment_data_module._build_dataloader: DistributedSampler and DataLoader with drop_last.
    """
    per_rank = global_batch_size // data_parallel_size
    return num_samples // data_parallel_size // per_rank if per_rank else 0


def _padded(column: npt.NDArray[Any], length: int, padding: int) -> npt.NDArray[np.int64]:
    return np.concatenate([column, np.full(length - len(column), padding)]).astype(np.int64)
