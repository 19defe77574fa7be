"""The loss of the best model that ignores all context: what a language model must beat to have learnt anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.errors import UserError

_CHUNK_TOKENS = 1 << 22
# Counted of each split at most: past this the estimate moves in the fourth decimal, and terabytes would take hours.
_MOST_TOKENS = 1 << 27


def unigram_cross_entropy(
    train: Sequence[npt.NDArray[Any]], validation: Sequence[npt.NDArray[Any]], vocab_size: int
) -> float:
    """Return the cross-entropy, in nats a token, of add-one token frequencies of `train` on the tokens of `validation`.

    `vocab_size` is the tokenizer's, not the padded one of the model. Raises UserError for a token that it lacks.
    """
    seen = _count(train, vocab_size) + 1
    scored = _count(validation, vocab_size)
    log_probability = np.log(seen) - np.log(seen.sum())
    return float(-(scored * log_probability).sum() / scored.sum())


def _count(parts: Sequence[npt.NDArray[Any]], vocab_size: int) -> npt.NDArray[np.int64]:
    counts = np.zeros(vocab_size, dtype=np.int64)
    left = _MOST_TOKENS
    for part in parts:
        for start in range(0, min(len(part), left), _CHUNK_TOKENS):
            found = np.bincount(part[start : start + _CHUNK_TOKENS], minlength=vocab_size)
            if len(found) > vocab_size:
                raise UserError(f"model.vocab_size={vocab_size} is too small: the data holds token {len(found) - 1}")
            counts += found
        left = max(0, left - len(part))
    return counts
