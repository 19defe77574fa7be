"""YAML whose plain scalars mean what the same characters mean in a Hydra override.

YAML 1.1 reads `12:00:00` as 43200, `007` as 7 and `on` as true; Hydra's command line reads text. A value must not
change its meaning when it moves from the command line into a file, so files follow the command line.
"""

import re
from typing import Any, ClassVar

import yaml

_INT = r"[-+]?(?:0|[1-9](?:_?[0-9])*)"
_FLOAT = (
    r"[-+]?(?:(?:(?:0|[1-9](?:_?[0-9])*)\.|(?:0|[1-9](?:_?[0-9])*)?\.[0-9](?:_?[0-9])*)(?:[eE][-+]?[0-9](?:_?[0-9])*)?"
    r"|(?:0|[1-9](?:_?[0-9])*)[eE][-+]?[0-9](?:_?[0-9])*|[iI][nN][fF]|[nN][aA][nN])"
)
# Tag, form, first characters: as in hydra/grammar/OverrideLexer.g4; `~` and the empty value are YAML's own null.
_SCALARS = (
    ("tag:yaml.org,2002:null", r"~|[nN][uU][lL][lL]|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", r"[tT][rR][uU][eE]|[fF][aA][lL][sS][eE]", list("tTfF")),
    ("tag:yaml.org,2002:int", _INT, list("-+0123456789")),
    ("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789iInN")),
)


class OverrideLikeLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A safe YAML loader with Hydra's scalars. A key that stands twice in one mapping is an error."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        for i, key in enumerate(keys):
            if key in keys[:i]:
                where = node.value[i][0].start_mark
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", where)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping

    def construct_int(self, node: yaml.ScalarNode) -> int:
        return int(self.construct_scalar(node))

    def construct_float(self, node: yaml.ScalarNode) -> float:
        return float(self.construct_scalar(node))

    def construct_bool(self, node: yaml.ScalarNode) -> bool:
        return bool(self.construct_scalar(node).lower() == "true")


for _tag, _form, _first in _SCALARS:
    OverrideLikeLoader.add_implicit_resolver(_tag, re.compile(rf"^(?:{_form})$"), _first)
for _kind in ("int", "float", "bool"):
    OverrideLikeLoader.add_constructor(f"tag:yaml.org,2002:{_kind}", getattr(OverrideLikeLoader, f"construct_{_kind}"))
