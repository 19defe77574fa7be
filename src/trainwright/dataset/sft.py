"""Instruction data: files of {"input", "output"} records, and the tokens that a record becomes.

A file holds a JSON object a line, or one JSON array of objects, as Hugging Face's `json` loader takes both; other
fields are ignored, and so are blank lines. A record is bos + input, which is the prompt, and output + eos, the
response, without a template and without any other special token.
Source: NxDT, lightning_modules/data/model_alignment_data_module.py (SDK 2.26), which cuts input and output to
seq_length tokens each (transformers does, where max_length comes without `truncation`). Nothing is cut here: whatever
is that long is dropped there anyhow, or fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.dataset.json_text import kind_of, parse_json
from trainwright.dataset.tokenizer import Tokenizer
from trainwright.errors import UserError

SUFFIXES = (".jsonl", ".json")  # NxDT's loader refuses any other
IGNORE = -100  # the label of a token that is not to be trained on
_FIELDS = ("input", "output")
_SHOWN_FAULTS = 20
_BATCH_RECORDS = 1024  # tokenized at a time
_Entry = tuple[int, Any, str | None]  # number, value, what is wrong in place of a value


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One record, as it is written."""

    number: int  # of its line, from 1; in a file that is one array, of the record
    input: str
    output: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedRecord:
    """One record as token ids, int64."""

    record: Record
    prompt: npt.NDArray[np.int64]  # bos + input
    response: npt.NDArray[np.int64]  # output + eos

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        return np.concatenate([self.prompt, self.response])

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """The ids, with the prompt masked."""
        return np.concatenate([np.full_like(self.prompt, IGNORE), self.response])


def ignore_bytes(done: int) -> None:
    """Take a number of bytes read and show nothing."""


def unit_of(path: Path) -> str:
    """Return what the numbers of a file's records count: "line", or "record" where the file is one array."""
    with path.open("rb") as stream:
        for line in stream:
            if line.strip():
                return "record" if line.lstrip().startswith(b"[") else "line"
    return "line"


def read_records(path: Path, *, key: str, on_bytes: Callable[[int], None] = ignore_bytes) -> Iterator[Record]:
    """Yield the records of a file in its order; `on_bytes` hears how many bytes are read so far.

    Raises UserError with every fault of the file (at most 20 are shown), each with its line, at its end; from the first
    fault on nothing is yielded. `key` is the configuration key or option that named the file.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{key}: {path} is no {' or '.join(SUFFIXES)} file, which NxDT needs it to be; rename it")
    faults: list[str] = []
    num_faults = num_records = 0
    try:
        unit = unit_of(path)
        for number, value, fault in _lines(path, on_bytes) if unit == "line" else _elements(path):
            found = [fault] if fault is not None else list(_faults(value))
            num_faults += len(found)
            faults += [f"{unit} {number}: {line}" for line in found][: _SHOWN_FAULTS - len(faults)]
            num_records += 1
            if num_faults == 0:
                yield Record(number=number, **{field: value[field] for field in _FIELDS})
    except OSError as error:
        raise UserError(f"{key}: {path} cannot be read: {error.strerror or error}") from error
    if num_faults:
        more = [f"... and {num_faults - len(faults)} more"] if num_faults > len(faults) else []
        told = f"{num_faults:,} faults" if num_faults > 1 else "a fault"
        raise UserError("\n  ".join([f"{key}: {path} has {told}; correct or remove what is named", *faults, *more]))
    if num_records == 0:
        raise UserError(f'{key}: {path} holds no record; write a {{"input": TEXT, "output": TEXT}} a line')


def tokenize(records: Iterable[Record], tokenizer: Tokenizer) -> Iterator[TokenizedRecord]:
    """Yield the records as tokens, in order. Raises UserError for a tokenizer without a token that begins a text."""
    if tokenizer.bos is None:
        raise UserError(
            f"data.tokenizer: {tokenizer.name} has no token that begins a text (bos_token), and NxDT would put None "
            "among the token ids; set bos_token in its tokenizer_config.json to one of its tokens"
        )
    waiting = iter(records)
    while batch := list(islice(waiting, _BATCH_RECORDS)):
        tokens = tokenizer.encode([text for record in batch for text in (record.input, record.output)])
        for record, prompt, response in zip(batch, tokens[0::2], tokens[1::2], strict=True):
            yield TokenizedRecord(
                record=record,
                prompt=np.concatenate([[tokenizer.bos], prompt]),
                response=np.concatenate([response, [tokenizer.eod]]),
            )


def _lines(path: Path, on_bytes: Callable[[int], None]) -> Iterator[_Entry]:
    """Yield the lines that are not blank."""
    done = 0
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            done += len(line)
            if line.strip():
                yield number, *parse_json(line.rstrip(), _FIELDS)
            on_bytes(done)


def _elements(path: Path) -> Iterator[_Entry]:
    """Yield the elements of a file that is one array; it is read whole."""
    array, fault = parse_json(path.read_bytes(), _FIELDS)
    if fault is not None:
        yield 1, None, fault
        return
    for number, value in enumerate(array, 1):
        yield number, value, None


def _faults(value: Any) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"is {kind_of(value)}, not an object with the fields 'input' and 'output'"
        return
    for field in _FIELDS:
        if field not in value:
            yield f"field {field!r} is missing"
        elif not isinstance(value[field], str):
            yield f"field {field!r} is {kind_of(value[field])}, not a text"
    if value.get("output") == "":
        yield "field 'output' is empty, so there is nothing to learn"
