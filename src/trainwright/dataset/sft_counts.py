"""Figures of each record of instruction data: what is kept of a file that streams by."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.dataset.sft import Record, TokenizedRecord
from trainwright.dataset.tokenizer import Tokenizer

_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True)
class RecordCounts:
    """A line of figures for each record of a file, in its order."""

    numbers: npt.NDArray[np.int64]  # of lines
    prompts: npt.NDArray[np.int64]  # tokens, bos included
    responses: npt.NDArray[np.int64]  # tokens, eos included
    largest: npt.NDArray[np.int64]  # token id
    has_special: npt.NDArray[np.bool_]  # the text itself spells bos or eos
    digests: npt.NDArray[np.uint64]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        return self.prompts + self.responses


def count_records(records: Iterable[TokenizedRecord], tokenizer: Tokenizer) -> RecordCounts:
    """Return the figures of `records`, of which there is one at least; some 50 bytes of each are kept."""
    numbers, prompts, responses, largest = array("q"), array("q"), array("q"), array("q")
    has_special, digests = array("b"), array("Q")
    for tokenized in records:
        numbers.append(tokenized.record.number)
        prompts.append(len(tokenized.prompt))
        responses.append(len(tokenized.response))
        largest.append(int(max(tokenized.prompt.max(), tokenized.response.max())))
        has_special.append(_spells_an_end(tokenized, tokenizer))
        digests.append(_digest(tokenized.record))
    return RecordCounts(
        **{
            name: np.frombuffer(column, dtype=np.int64)
            for name, column in (
                ("numbers", numbers),
                ("prompts", prompts),
                ("responses", responses),
                ("largest", largest),
            )
        },
        has_special=np.frombuffer(has_special, dtype=np.bool_),
        digests=np.frombuffer(digests, dtype=np.uint64),
    )


def _spells_an_end(tokenized: TokenizedRecord, tokenizer: Tokenizer) -> bool:
    texts = (tokenized.prompt[1:], tokenized.response[:-1])
    return any(bool(((text == tokenizer.bos) | (text == tokenizer.eod)).any()) for text in texts)


def _digest(record: Record) -> int:
    text = f"{record.input}\0{record.output}".encode("utf-8", "surrogatepass")  # JSON may escape half a character
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def spread(values: npt.NDArray[Any]) -> dict[str, float]:
    """Return minimum, percentiles, maximum, mean and sum of `values`, of which there is one at least."""
    percentiles = np.percentile(values, _PERCENTILES, method="inverted_cdf")
    return {
        "min": int(values.min()),
        **{f"p{share}": int(value) for share, value in zip(_PERCENTILES, percentiles, strict=True)},
        "max": int(values.max()),
        "mean": float(values.mean()),
        "sum": int(values.sum()),
    }
