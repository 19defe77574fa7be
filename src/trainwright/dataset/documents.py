"""The documents in a segment of a text file, or in words what is wrong with one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainwright.dataset.json_text import kind_of, not_utf8, parse_json
from trainwright.dataset.text_files import Segment


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One document; it may be without any text."""

    line: int  # of the file, from 1, where it begins
    text: str
    fault: str | None = None  # in place of a text


def documents_of(segment: Segment, json_key: str) -> Iterator[Document]:
    """Yield the documents of a segment in order; `json_key` is the field of a JSON object that holds the text.

    Line breaks around a document belong to no document where lines separate them. Blank lines are none.
    """
    if segment.mode == "jsonl":
        for number, line in _lines(segment):
            yield _from_json(line.strip(), number, json_key)
    elif segment.mode == "line":
        for number, line in _lines(segment):
            yield _decoded(line.rstrip(b"\r"), number)
    elif segment.mode == "blank-line":
        yield from _paragraphs(segment)
    else:
        first = segment.first_line
        for part in segment.content.split(b"\f") if segment.mode == "form-feed" else [segment.content]:
            if part.strip() or segment.mode == "file":
                yield _decoded(part, first)
            first += part.count(b"\n")


def _lines(segment: Segment) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers."""
    for number, line in enumerate(segment.content.split(b"\n"), segment.first_line):
        if line.strip():
            yield number, line


def _paragraphs(segment: Segment) -> Iterator[Document]:
    held: list[bytes] = []
    last = 0
    for number, line in _lines(segment):
        if held and number > last + 1:
            yield _decoded(b"\n".join(held), last + 1 - len(held))
            held.clear()
        held.append(line.rstrip(b"\r"))
        last = number
    if held:
        yield _decoded(b"\n".join(held), last + 1 - len(held))


def _decoded(content: bytes, line: int) -> Document:
    try:
        return Document(line=line, text=content.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Document(line=line, text="", fault=not_utf8(error))


def _from_json(content: bytes, line: int, json_key: str) -> Document:
    value, fault = parse_json(content, (json_key,))
    if fault is None and not isinstance(value, dict):
        fault = f"is {kind_of(value)}, not an object with the field {json_key!r}"
    elif fault is None and json_key not in value:
        fault = f"field {json_key!r} is missing"
    elif fault is None and not isinstance(value[json_key], str):
        fault = f"field {json_key!r} is {kind_of(value[json_key])}, not a text"
    elif fault is None and not _is_whole(value[json_key]):
        fault = f"field {json_key!r} holds half a character (a lone surrogate)"
    return Document(line=line, text="" if fault else value[json_key], fault=fault)


def _is_whole(text: str) -> bool:
    """Return whether a text can be encoded: JSON may escape half of a character."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
