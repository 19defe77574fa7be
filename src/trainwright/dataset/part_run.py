"""All parts of a pair: made here or in several processes, or found where an interrupted build left them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from trainwright.dataset.encode import Counts
from trainwright.dataset.parts import (
    SHOWN_FAULTS,
    Faults,
    PairRecipe,
    Part,
    PartBuilder,
    build_in_worker,
    check_in_worker,
    start_worker,
)
from trainwright.dataset.text_files import Piece, TextFile
from trainwright.errors import RunFailedError, UserError


@dataclass(frozen=True, kw_only=True)
class BuildProgress:
    """How far a build is."""

    read_bytes: int  # of the files as they are stored, documents of which are done
    total_bytes: int
    parts: int
    counts: Counts


class PartRun:
    """One build from its start to the last part."""

    def __init__(
        self,
        files: Sequence[TextFile],
        builder: PartBuilder,
        *,
        skip_bad: bool,
        on_progress: Callable[[BuildProgress], None],
    ) -> None:
        self._builder, self._skip_bad, self._on_progress = builder, skip_bad, on_progress
        self._total_bytes = sum(file.num_bytes for file in files)
        self._read_bytes = 0
        self._faults: dict[int, list[str]] = {}  # by piece
        self.num_faults = 0
        self.parts: dict[int, Part] = {}  # by piece
        self.parts_found = 0
        self.counts = Counts()
        self._keys: set[str] = set()
        self.digest = hashlib.sha256()

    def here(self, pieces: Iterator[Piece]) -> None:
        for number, piece in enumerate(pieces):
            key = self._key(piece)
            if self._is_found(number, key, piece):
                continue
            made = self._builder.check(piece) if self._is_doomed else self._builder.build(key, piece)
            self._take(number, made, piece)

    def in_processes(self, pieces: Iterator[Piece], workers: int, folder: Path, recipe: PairRecipe) -> None:
        pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=start_worker, initargs=(folder, recipe))
        waiting: dict[Future[Any], tuple[int, Piece]] = {}  # of a Part or Faults

        def take(most: int) -> None:
            """Take what is done until at most so many are not."""
            while len(waiting) > most:
                for done in wait(waiting, return_when=FIRST_COMPLETED).done:
                    self._take(waiting[done][0], done.result(), waiting.pop(done)[1])

        try:
            for number, piece in enumerate(pieces):
                key = self._key(piece)
                if not self._is_found(number, key, piece):
                    work = (check_in_worker, piece) if self._is_doomed else (build_in_worker, key, piece)
                    waiting[pool.submit(*work)] = number, piece
                take(2 * workers)  # so many wait at most: a piece holds some MB
            take(0)
        except KeyboardInterrupt:
            for process in active_children():
                process.terminate()  # what is lost is some seconds of work
            raise
        except BrokenProcessPool as error:
            raise RunFailedError(
                "a process that tokenizes was killed, perhaps for want of memory; start again with fewer --workers: "
                "what is done so far counts"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)

    def refuse_faults(self) -> None:
        if self.num_faults and not self._skip_bad:
            lines = [line for number in sorted(self._faults) for line in self._faults[number]]
            more = [f"... and {self.num_faults - SHOWN_FAULTS:,} more"] if self.num_faults > SHOWN_FAULTS else []
            told = f"{self.num_faults:,} documents have faults" if self.num_faults > 1 else "a document has a fault"
            told = f"INPUT: {told}; correct or remove what is named, or give --skip-bad to go without"
            raise UserError("\n  ".join([told, *lines[:SHOWN_FAULTS], *more]))
        if not self.counts.documents:
            raise UserError("INPUT: the files hold no document with any text")

    @property
    def _is_doomed(self) -> bool:
        """Whether faults were found that end the build: what follows is only looked at for more."""
        return self.num_faults > 0 and not self._skip_bad

    def _key(self, piece: Piece) -> str:
        key = self._builder.key(piece)
        self.digest.update(key.encode())
        return key

    def _is_found(self, number: int, key: str, piece: Piece) -> bool:
        part = self._builder.find(key)
        if part is not None:
            self.parts_found += key not in self._keys  # of an earlier build, not of a piece that is just the same
            self._take(number, part, piece)
        self._keys.add(key)
        return part is not None

    def _take(self, number: int, made: Part | Faults, piece: Piece) -> None:
        faults = made
        if isinstance(made, Part):
            self.parts[number], faults = made, made.faults
            self.counts = _sum(self.counts, made.counts)
        assert isinstance(faults, Faults)
        self.num_faults += faults.count
        named = [(piece.segments[segment], line, told) for segment, line, told in faults.shown]
        if named:
            self._faults[number] = [
                f"{segment.path} line {segment.first_line + line}: {told}" for segment, line, told in named
            ]
        self._read_bytes += piece.read_bytes
        self._on_progress(
            BuildProgress(
                read_bytes=self._read_bytes,
                total_bytes=self._total_bytes,
                parts=len(self.parts),
                counts=self.counts,
            )
        )


def _sum(one: Counts, other: Counts) -> Counts:
    return Counts(**{name: value + getattr(other, name) for name, value in asdict(one).items()})
