"""Parts of a pair: each piece of the text is tokenized by itself, in any process, and committed.

A part goes by what it is made of: the tokenizer, the options and the bytes of its documents. So an interrupted build
finds what it has, whatever the number of processes, and a part of other options or a changed file is never taken.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from trainwright.dataset.documents import documents_of
from trainwright.dataset.encode import Counts, write_texts
from trainwright.dataset.indexed import IndexedWriter, token_dtype
from trainwright.dataset.store import find_built, find_or_build
from trainwright.dataset.text_files import Piece
from trainwright.dataset.tokenizer import Tokenizer, load_tokenizer
from trainwright.node.commit import read_commit

SHOWN_FAULTS = 20
_FORMAT = "1"  # part of the key: raise it when the same text would be stored otherwise
_STEM = "text"


@dataclass(frozen=True, kw_only=True)
class PairRecipe:
    """What a pair depends on apart from the texts."""

    tokenizer_type: str
    tokenizer_name: str | None  # None: gpt2_bpe
    json_key: str = "text"
    append_eod: bool = True
    sequence_tokens: int | None = None  # None: a document is one sequence


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What is wrong with the documents of a piece."""

    count: int
    shown: tuple[tuple[int, int, str], ...]  # segment, line in it from 0, what is wrong; the first ones


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece that is done."""

    prefix: Path
    counts: Counts
    faults: Faults


class PartBuilder:
    """Makes the parts in one process."""

    def __init__(self, folder: Path, recipe: PairRecipe) -> None:
        self.tokenizer: Tokenizer = load_tokenizer(recipe.tokenizer_type, recipe.tokenizer_name)
        self._folder, self._recipe = folder, recipe
        options = asdict(recipe)
        del options["tokenizer_type"], options["tokenizer_name"]  # the identity says more
        self._made_by = f"{_FORMAT} {self.tokenizer.identity} {options}".encode()

    def key(self, piece: Piece) -> str:
        """Return the name of a piece's part."""
        digest = hashlib.sha256(self._made_by)
        for segment in piece.segments:
            digest.update(f"\0{segment.mode} {len(segment.content)}\0".encode())
            digest.update(segment.content)
        return digest.hexdigest()[:32]

    def find(self, key: str) -> Part | None:
        """Return the part of that name, None where it is not made yet."""
        directory = find_built(self._folder / key)
        return None if directory is None else _part(directory)

    def build(self, key: str, piece: Piece) -> Part:
        """Return the part of a piece, made where it is not there. Raises UserError naming --output for a full disk."""
        return _part(find_or_build(self._folder / key, lambda directory: self._fill(directory, piece), key="--output"))

    def check(self, piece: Piece) -> Faults:
        """Return what is wrong with a piece; nothing is tokenized."""
        faults = _FaultList()
        for _ in self._texts(piece, faults):
            pass
        return faults.all()

    def _fill(self, directory: Path, piece: Piece) -> dict[str, Any]:
        faults, recipe = _FaultList(), self._recipe
        with IndexedWriter(directory / _STEM, token_dtype(self.tokenizer.vocab_size)) as writer:
            counts = write_texts(
                writer,
                self._texts(piece, faults),
                self.tokenizer,
                append_eod=recipe.append_eod,
                sequence_tokens=recipe.sequence_tokens,
            )
        return {"counts": asdict(counts), "faults": asdict(faults.all())}

    def _texts(self, piece: Piece, faults: _FaultList) -> Iterator[tuple[str, bool]]:
        for number, segment in enumerate(piece.segments):
            for document in documents_of(segment, self._recipe.json_key):
                if document.fault is None:
                    yield document.text, True
                else:
                    faults.add(number, document.line - segment.first_line, document.fault)


class _FaultList:
    def __init__(self) -> None:
        self._count = 0
        self._shown: list[tuple[int, int, str]] = []

    def add(self, segment: int, line: int, told: str) -> None:
        self._count += 1
        if len(self._shown) < SHOWN_FAULTS:
            self._shown.append((segment, line, told))

    def all(self) -> Faults:
        return Faults(count=self._count, shown=tuple(self._shown))


def _part(directory: Path) -> Part:
    found = read_commit(directory)
    assert found is not None
    faults = Faults(
        count=found["faults"]["count"], shown=tuple((s, n, told) for s, n, told in found["faults"]["shown"])
    )
    return Part(prefix=directory / _STEM, counts=Counts(**found["counts"]), faults=faults)


# ---- in a process of its own

_builder: PartBuilder | None = None


def start_worker(folder: Path, recipe: PairRecipe) -> None:
    """Prepare this process, which ends with its parent, also where that is killed, and uses one core."""
    global _builder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _builder = PartBuilder(folder, recipe)


def build_in_worker(key: str, piece: Piece) -> Part:
    """Return the part of a piece."""
    assert _builder is not None
    return _builder.build(key, piece)


def check_in_worker(piece: Piece) -> Faults:
    """Return what is wrong with a piece."""
    assert _builder is not None
    return _builder.check(piece)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
