"""Files of text as bytes: plain, .gz, .xz or .zst, and cut into pieces that end where a document does.

The pieces depend on the files alone. A piece may hold many small files; a file that fills several begins none with
another's end, so that a change in one large file leaves the pieces of the others as they were.
"""

from __future__ import annotations

import codecs
import gzip
import importlib
import lzma
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, cast

from trainwright import storage
from trainwright.errors import UserError

# What a document is: a line's JSON object, the whole file, a line, what blank lines separate, what form feeds separate.
Mode = Literal["jsonl", "file", "line", "blank-line", "form-feed"]
TEXT_MODES: tuple[Mode, ...] = ("file", "line", "blank-line", "form-feed")
READ_ERRORS: tuple[type[Exception], ...] = (OSError, EOFError, lzma.LZMAError, zlib.error)
_JSONL_SUFFIXES = (".jsonl", ".json", ".ndjson")
_TEXT_SUFFIXES = (".txt", ".text", ".md")
_COMPRESSED = (".gz", ".xz", ".zst")
# What ends a document; the text before the last match is whole documents.
_ENDS = {"jsonl": b"\n", "line": b"\n", "form-feed": b"\f", "blank-line": rb"\n[ \t\r]*\n"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Whole documents of one file."""

    mode: Mode
    path: str
    first_line: int  # of the file, from 1
    content: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Segments of some MB together, to be worked on at once."""

    segments: tuple[Segment, ...]
    read_bytes: int  # of the files as they are stored, since the piece before


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """A file to read: a path, or a URL that fsspec reaches."""

    path: Path
    mode: Mode
    num_bytes: int  # as it is stored


def find_text_files(texts: Sequence[str], mode: Mode) -> list[TextFile]:
    """Return the files that `texts` name; `mode` says what a document of a file is that is not JSON.

    Raises UserError with all that cannot be read, or are of no kind that is known.
    """
    files, problems = [], []
    for text in texts:
        try:
            path = storage.at(text) if "://" in text else Path(text)
            files.append(TextFile(path=path, mode=_mode_of(path, mode), num_bytes=_size_of(path)))
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("\n".join(problems))
    return files


def decompressed(stream: BinaryIO, name: str) -> BinaryIO:
    """Return a stream of what the file `name` holds. Raises UserError for .zst where Python cannot read that."""
    if name.endswith(".gz"):
        return cast(BinaryIO, gzip.open(stream))
    if name.endswith(".xz"):
        return cast(BinaryIO, lzma.open(stream))
    if name.endswith(".zst"):
        try:
            zstd = importlib.import_module("compression.zstd")  # in Python 3.14 and later
        except ModuleNotFoundError as error:
            raise UserError(f"{name}: only Python 3.14 and later reads .zst; run `zstd -d {name}` first") from error
        return cast(BinaryIO, zstd.open(stream))
    return stream


def read_pieces(files: Sequence[TextFile], piece_bytes: int) -> Iterator[Piece]:
    """Yield all that `files` hold, `piece_bytes` or more at a time. Raises UserError naming a file that is damaged."""
    held: list[Segment] = []
    read = told = 0

    def piece() -> Piece:
        nonlocal told
        made = Piece(segments=tuple(held), read_bytes=read - told)
        told = read
        held.clear()
        return made

    for file in files:
        before, is_first = read, True
        for segment, stored, is_last in _segments(file, piece_bytes):
            if held and is_first and not is_last:
                yield piece()  # of the small files before
            held.append(segment)
            read = before + stored
            if not (is_first and is_last) or sum(len(one.content) for one in held) >= piece_bytes:
                yield piece()
            is_first = False
        read = before + file.num_bytes
    if held or read > told:
        yield piece()


def _segments(file: TextFile, piece_bytes: int) -> Iterator[tuple[Segment, int, bool]]:
    """Yield the segments of one file, how many stored bytes are read with each, and whether it reaches the end."""
    errors = (*READ_ERRORS, *storage.failures(file.path))
    try:
        with file.path.open("rb") as raw, decompressed(raw, file.path.name) as stream:
            line, rest, more = 1, _read(stream, len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8), piece_bytes
            while True:
                block = _read(stream, more)
                is_last = len(block) < more
                content = rest + block
                end = len(content) if is_last else _end_of_documents(content, file.mode)
                if end:
                    segment = Segment(mode=file.mode, path=str(file.path), first_line=line, content=content[:end])
                    yield segment, raw.tell(), is_last
                    line += content.count(b"\n", 0, end)
                if is_last:
                    return
                rest, more = content[end:], piece_bytes if end else 2 * more
    except errors as error:
        raise UserError(f"{file.path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _read(stream: BinaryIO, count: int) -> bytes:
    """Return `count` bytes, fewer at the end only: a file on a server may give less at a time."""
    parts = []
    while count and (part := stream.read(count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _end_of_documents(content: bytes, mode: Mode) -> int:
    """Return how many bytes are whole documents; 0 where none ends."""
    if mode == "file":
        return 0
    if mode == "blank-line":
        return max((match.end() for match in re.finditer(_ENDS[mode], content)), default=0)
    return content.rfind(_ENDS[mode]) + 1


def _mode_of(path: Path, mode: Mode) -> Mode:
    suffixes = path.suffixes
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    suffix = suffixes[-1].lower() if suffixes else ""
    if suffix in _JSONL_SUFFIXES:
        return "jsonl"
    if suffix not in _TEXT_SUFFIXES:
        known = ", ".join((*_JSONL_SUFFIXES, *_TEXT_SUFFIXES))
        raise UserError(f"{path} is neither jsonl nor text by its name; rename it to end in one of {known}")
    return mode


def _size_of(path: Path) -> int:
    try:
        with storage.reached(path, "INPUT"):
            if not path.is_file():
                told = "is a directory; name its files" if path.is_dir() else "does not exist"
                raise UserError(f"{path} {told}")
            return path.stat().st_size
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
