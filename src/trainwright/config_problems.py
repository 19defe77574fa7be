"""Every problem of a config in words: key, value, what is legal and, for a typo, the nearest key."""

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError


def explain(error: ValidationError, tree: Mapping[Any, Any], root: type[BaseModel]) -> list[str]:
    """Return a line for each problem that pydantic found in `tree` against the model `root`."""
    return [line for problem in error.errors() for line in _lines(problem, tree, root)]


def _lines(problem: Any, tree: Mapping[Any, Any], root: type[BaseModel]) -> list[str]:
    kind, context = problem["type"], problem.get("ctx", {})
    path = _key_path(list(problem["loc"]), tree, is_absent=kind in ("extra_forbidden", "missing"))
    key = ".".join(map(str, path))
    if kind == "extra_forbidden":
        return [f"{key}: unknown key{_nearest(path, tree, root)}"]
    if kind == "missing":
        return [f"{key}: missing; its group's file in conf/ lists it with its legal values"]
    value = _value_at(path, tree)
    if kind == "value_error" and isinstance(value, Mapping):  # fields that disagree: the lines name their keys
        return str(context["error"]).splitlines()
    if kind == "union_tag_invalid":
        return [f"{key}.kind: {context['tag']!r} must be one of {context['expected_tags']}"]
    return [f"{key}: {value!r} {_what_is_right(kind, context, problem['msg'], value)}"]


def _what_is_right(kind: str, context: Mapping[str, Any], message: str, value: object) -> str:
    if kind == "value_error":
        return f"is not understood: {context['error']}"
    if kind == "string_type":
        return f"is not text; quoted it would be, on a shell '\"{value}\"'"
    if kind == "string_pattern_mismatch":
        return f"has a form that is not allowed; it must match {context['pattern']}"
    if kind == "bool_type":
        return "must be true or false"
    if kind in ("int_type", "int_from_float"):
        return "must be a whole number"
    if kind == "float_type":
        return "must be a number"
    if kind == "literal_error":
        close = difflib.get_close_matches(str(value), re.findall(r"'([^']*)'", context["expected"]), n=1)
        return f"must be {context['expected']}" + (f"; did you mean {close[0]}?" if close else "")
    return re.sub(r"^Input should", "must", message)


def _key_path(location: list[Any], tree: Any, is_absent: bool) -> list[Any]:
    """Return the part of pydantic's location that is the key: tags of unions and names of validators are not.

    `is_absent`: the last part is a key that no config has, or that this one lacks.
    """
    path: list[Any] = []
    for i, part in enumerate(location):
        is_last_key = is_absent and isinstance(tree, Mapping) and i == len(location) - 1
        inside = tree if isinstance(tree, Mapping) else range(len(tree)) if isinstance(tree, list) else ()
        if part in inside:
            tree = tree[part]
            path.append(part)
        elif is_last_key:
            path.append(part)
    return path


def _value_at(path: list[Any], tree: Any) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def _nearest(path: list[Any], tree: Any, root: type[BaseModel]) -> str:
    """Return the hint for an unknown key: the nearest key of its section, else all of them."""
    kind = _value_at(path[:-1], tree).get("kind")
    sections = [one for one in _sections_at(path[:-1], root) if _is_of_kind(one, kind)]
    known = sorted({key for section in sections for key in section.model_fields})
    close = difflib.get_close_matches(str(path[-1]), known, n=1)
    if close:
        return f"; did you mean {'.'.join([*map(str, path[:-1]), close[0]])}?"
    return f"; known here: {', '.join(known)}" if known else ""


def _sections_at(path: list[Any], root: type[BaseModel]) -> list[type[BaseModel]]:
    """Return the models that may stand at `path`: several where a union decides."""
    sections = [root]
    for part in path:
        annotations = [section.model_fields[part].annotation for section in sections if part in section.model_fields]
        sections = [member for annotation in annotations for member in _members(annotation)]
    return sections


def _is_of_kind(section: type[BaseModel], kind: object) -> bool:
    """Return whether a section may say that it is of that kind; one that has no kinds may."""
    kinds = get_args(section.model_fields["kind"].annotation) if "kind" in section.model_fields else ()
    return not kinds or kind is None or kind in kinds


def _members(annotation: Any) -> Iterator[type[BaseModel]]:
    for member in (annotation, *get_args(annotation)):
        if isinstance(member, type) and issubclass(member, BaseModel):
            yield member
