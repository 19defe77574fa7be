"""Texts become tokens in a pair: each document ends with the end-of-document token, and is one or more sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

import numpy as np

from trainwright.dataset.indexed import IndexedWriter
from trainwright.dataset.tokenizer import Tokenizer

_BATCH_TEXTS = 512  # encoded at a time: bounds the memory, and is what a progress line reports


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What was written; the names are those of reports."""

    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    empty: int = 0  # documents without any token, which are left out


def write_texts(
    writer: IndexedWriter,
    texts: Iterable[tuple[str, bool]],
    tokenizer: Tokenizer,
    *,
    append_eod: bool = True,
    sequence_tokens: int | None = None,
    on_batch: Callable[[Counts], None] | None = None,
) -> Counts:
    """Write texts, each with whether it ends its document, and return what became of them.

    A text is a sequence; `sequence_tokens` cuts it after so many tokens (None: never). `on_batch` hears of each batch.
    """
    waiting = iter(texts)
    documents = sequences = tokens = empty = 0
    in_document = 0  # sequences
    counts = Counts()
    while batch := list(islice(waiting, _BATCH_TEXTS)):
        for ids, (_, is_last) in zip(tokenizer.encode([text for text, _ in batch]), batch, strict=True):
            if is_last and append_eod and (in_document or len(ids)):
                ids = np.append(ids, tokenizer.eod)
            step = sequence_tokens or max(1, len(ids))
            for start in range(0, len(ids), step):
                writer.add_sequence(ids[start : start + step])
                in_document += 1
            tokens += len(ids)
            if is_last and in_document:
                writer.end_document()
                documents, sequences, in_document = documents + 1, sequences + in_document, 0
            elif is_last:
                empty += 1
        counts = Counts(documents=documents, sequences=sequences + in_document, tokens=tokens, empty=empty)
        if on_batch is not None:
            on_batch(counts)
    return counts
