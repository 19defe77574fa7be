"""JSON that users wrote: values, or in words what is wrong."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import partial
from typing import Any

_KINDS = {bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list", dict: "an object"}


def parse_json(text: bytes, fields: Collection[str]) -> tuple[Any, str | None]:
    """Return the value that JSON text stands for, or what is wrong; none of `fields` may stand twice in an object."""
    try:
        return json.loads(text.decode("utf-8"), object_pairs_hook=partial(_object, fields)), None
    except UnicodeDecodeError as error:
        return None, not_utf8(error)
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""  # of a file that is one array
        return None, f"is not JSON: {error.msg}, at {line}column {error.colno}"
    except ValueError as error:  # of _object
        return None, f"is not JSON: {error}"
    except RecursionError:
        return None, "is not JSON that can be read: nested too deeply"


def not_utf8(error: UnicodeDecodeError) -> str:
    """Return what is wrong with bytes that are no text."""
    return f"is not UTF-8: {error.reason} at byte {error.start} of it"


def kind_of(value: Any) -> str:
    """Return in words what kind of value it is."""
    return "null" if value is None else _KINDS[type(value)]


def _object(fields: Collection[str], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for field in fields:
        if names.count(field) > 1:
            raise ValueError(f"field {field!r} stands twice in an object")
    return dict(pairs)
