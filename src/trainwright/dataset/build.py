"""A text becomes a committed Megatron data set, once: CACHE_DIR/<stem>-<tokenizer>-<hash>/<unique>/text.{bin,idx}.

Documents (a form feed stands between them) each end with the tokenizer's end-of-document token. Megatron splits data
and draws samples by SEQUENCE, and 37 plays are too coarse for a 95 to 5 split; so a document is stored as many
sequences of about 1,600 tokens, cut where a paragraph begins, while the document bounds of the index still mark the
documents.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trainwright import places
from trainwright.dataset.encode import write_texts
from trainwright.dataset.indexed import IndexedDataset, IndexedWriter, token_dtype
from trainwright.dataset.splits import split_bounds
from trainwright.dataset.store import find_or_build
from trainwright.dataset.text_files import READ_ERRORS, decompressed
from trainwright.dataset.tokenizer import Tokenizer
from trainwright.errors import UserError

_FORMAT = "1"  # part of the name: raise it when the same text would be stored otherwise
_STEM = "text"
_SEQUENCE_CHARS = 5000
# Where a sequence may end, best first. GPT-2's pattern always gives the last white space before a word a token of its
# own or joins it to that word, so a cut right before it changes no token of the document.
_CUTS = tuple(re.compile(pattern) for pattern in (r"(?<=\n)\n(?=\S)", r"\n(?=\S)", r" (?=\S)"))


def build_text(text: str, tokenizer: Tokenizer, cache_dir: Path, report: Callable[[str], None]) -> Path:
    """Return the prefix of the data set made of `text`, the name of a shipped text or a path (.txt, .gz, .xz; UTF-8).

    Built where it is not in `cache_dir` yet, with progress lines to `report`. Raises UserError naming data.text when
    the text is missing, damaged or empty, and data.cache_dir when that cannot be written or is full.
    """
    path = places.corpus(text) or Path(text)
    content = _read(path)
    documents = [document for document in _decode(path, content).split("\f") if document.strip()]
    if not documents:
        raise UserError(f"data.text={path} holds no text")
    key = hashlib.sha256(b"\0".join([content, tokenizer.identity.encode(), _FORMAT.encode()])).hexdigest()[:10]
    stem = path.name.split(".")[0]

    def build(directory: Path) -> dict[str, Any]:
        report(f"tokenizing {path} ({len(content) / 1e6:.1f} MB) with {tokenizer.name} into {directory}")
        num_tokens = _write(directory / _STEM, documents, tokenizer, report)
        return {"source": str(path), "tokenizer": tokenizer.identity, "num_tokens": num_tokens}

    return find_or_build(cache_dir / f"{stem}-{tokenizer.name}-{key}", build, key="data.cache_dir") / _STEM


def shuffle_tokens(prefix: Path, splits_string: str, seed: int, cache_dir: Path) -> Path:
    """Return the prefix of the same data with all tokens permuted at random within each split; built only once.

    What is left is the frequency of the tokens: a model can learn no more from it than the unigram distribution.
    """
    entry = prefix.parent.parent.name  # <stem>-<tokenizer>-<hash>, see build_text
    key = hashlib.sha256(f"{entry} {splits_string} {seed} {_FORMAT}".encode()).hexdigest()[:10]

    def build(directory: Path) -> dict[str, Any]:
        source = IndexedDataset(prefix)
        random = np.random.RandomState(seed)
        bounds = split_bounds(splits_string, len(source), str(prefix))
        parts = [random.permutation(source.span(*split)) for split in bounds.values() if split is not None]
        tokens = np.concatenate(parts)
        ends = np.cumsum(source.sequence_lengths, dtype=np.int64)
        last_of_document = set((source.document_indices[1:] - 1).tolist())
        with IndexedWriter(directory / _STEM, source.dtype) as writer:
            for sequence, piece in enumerate(np.split(tokens, ends[:-1])):
                writer.add_sequence(piece)
                if sequence in last_of_document:
                    writer.end_document()
        return {"source": str(prefix), "seed": seed, "splits_string": splits_string}

    return find_or_build(cache_dir / f"{entry}-shuffled-{key}", build, key="data.cache_dir") / _STEM


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as stored, decompressed(stored, path.name) as stream:
            return stream.read()
    except FileNotFoundError as error:
        shipped = sorted(
            text.name.split(".")[0] for text in (Path(places.__file__).parent / "corpora").glob("*.txt.xz")
        )
        raise UserError(
            f"data.text={path} is neither a file nor a text shipped with trainwright ({', '.join(shipped)})"
        ) from error
    except READ_ERRORS as error:
        raise UserError(f"data.text={path} cannot be read: {error}") from error


def _decode(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"data.text={path} is not UTF-8: {error.reason} at byte {error.start}; convert it first (iconv -t utf-8)"
        ) from error


def _write(prefix: Path, documents: list[str], tokenizer: Tokenizer, report: Callable[[str], None]) -> int:
    """Write the pair; return its number of tokens."""
    pieces = (piece for document in documents for piece in _cut(document))
    with IndexedWriter(prefix, token_dtype(tokenizer.vocab_size)) as writer:
        counts = write_texts(
            writer,
            pieces,
            tokenizer,
            on_batch=lambda done: report(f"tokenized {done.tokens:,} tokens in {done.sequences:,} sequences"),
        )
    return counts.tokens


def _cut(document: str) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of a document in order, each with whether it is the last; together they are the document."""
    start = 0
    while len(document) - start > 2 * _SEQUENCE_CHARS:
        soonest, latest = start + _SEQUENCE_CHARS, start + 2 * _SEQUENCE_CHARS
        found = next(filter(None, (cut.search(document, soonest, latest) for cut in _CUTS)), None)
        end = found.start() if found else latest  # no white space in 5,000 characters: cut a word in two
        yield document[start:end], False
        start = end
    yield document[start:], True
