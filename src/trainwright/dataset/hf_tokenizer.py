"""The files of a Hugging Face tokenizer: of a local directory, or of a hub id through huggingface_hub's cache."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.errors import UserError

_TOKENIZER, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
# Tokens that transformers' classes know without being told; for any other class, absent means that there is none.
_CLASS_TOKENS = {
    "LlamaTokenizer": ("<s>", "</s>"),
    "LlamaTokenizerFast": ("<s>", "</s>"),
    "GPT2Tokenizer": ("<|endoftext|>", "<|endoftext|>"),
    "GPT2TokenizerFast": ("<|endoftext|>", "<|endoftext|>"),
}


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """What a tokenizer is made of."""

    path: Path  # of tokenizer.json
    bos_token: str | None  # None: the tokenizer names none
    eos_token: str | None


def find_files(name: str) -> TokenizerFiles:
    """Return the files of data.tokenizer.name: a directory where there is one of that name, else an id on the hub.

    Raises UserError that says what is missing, or that the hub cannot be reached.
    """
    folder = Path(name)
    if folder.is_dir():
        if not (folder / _TOKENIZER).is_file():
            raise UserError(_no_tokenizer_json(name))
        path = folder / _TOKENIZER
        settings = folder / _SETTINGS if (folder / _SETTINGS).is_file() else None
    elif is_path(name):
        raise UserError(f"data.tokenizer.name={name} is no directory; give one that holds {_TOKENIZER}, or a hub id")
    else:
        found = _from_hub(name, _TOKENIZER)
        if found is None:
            raise UserError(_no_tokenizer_json(name))
        path, settings = found, _from_hub(name, _SETTINGS)
    bos, eos = _special_tokens(settings)
    return TokenizerFiles(path=path, bos_token=bos, eos_token=eos)


def is_path(name: str) -> bool:
    """Return whether a tokenizer's name cannot be a hub id, which is NAME or OWNER/NAME."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def _special_tokens(settings: Path | None) -> tuple[str | None, str | None]:
    """Return the tokens of tokenizer_config.json that begin and end a text."""
    if settings is None:
        return None, None
    try:
        content: dict[str, Any] = json.loads(settings.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"data.tokenizer.name: {settings} cannot be read: {error}") from error
    defaults = _CLASS_TOKENS.get(str(content.get("tokenizer_class")), (None, None))
    bos, eos = (content.get(key, default) for key, default in zip(("bos_token", "eos_token"), defaults, strict=True))
    return _text_of(bos), _text_of(eos)


def _text_of(token: Any) -> str | None:
    """Return the text of a token, which is written as one or as a description with its `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _from_hub(name: str, file: str) -> Path | None:
    """Return the file's path in huggingface_hub's cache, fetched where it is not there; None: the model lacks it."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import (
            EntryNotFoundError,
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
        )
    except ImportError as error:
        raise UserError(
            f"data.tokenizer.name={name} is an id on the hub and needs the Python package huggingface_hub, which is "
            "not installed: pip install 'trainwright[native]'; or give a directory"
        ) from error
    try:
        return Path(hf_hub_download(name, file))
    except LocalEntryNotFoundError as error:  # an EntryNotFoundError too, but of the cache
        raise UserError(
            f"data.tokenizer.name={name} is no directory here, huggingface_hub's cache does not hold its {file}, and "
            f"the hub cannot be reached; on a machine that reaches it run `hf download {name} --include "
            "'tokenizer*' --local-dir DIR`, and give data.tokenizer.name=DIR"
        ) from error
    except EntryNotFoundError:
        return None
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"data.tokenizer.name={name} is no directory here and not to be had from the hub ({reason}); correct the "
            "name, or log in with `hf auth login` where the model is private or gated"
        ) from error


def _no_tokenizer_json(name: str) -> str:
    return (
        f"data.tokenizer.name={name} holds no {_TOKENIZER}; make one with "
        f"`transformers.AutoTokenizer.from_pretrained({name!r}).save_pretrained(DIR)` and give data.tokenizer.name=DIR"
    )
