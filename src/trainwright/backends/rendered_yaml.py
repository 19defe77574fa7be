"""YAML for a framework to read: plain values, spelled so that PyYAML and OmegaConf read the same."""

from collections.abc import Mapping
from typing import Any

import yaml


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of which `leaves` holds the values by dotted path."""
    tree: dict[str, Any] = {}
    for path, value in leaves.items():
        *sections, key = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[key] = value
    return tree


def to_yaml(tree: Mapping[str, Any], *, reader: str, run_id: str) -> str:
    """Return `tree` as the text of a file that `reader`, a framework, reads for a run."""
    header = (
        f"# What {reader} reads for run {run_id}. Written by trainwright: change the run's config, not this file.\n"
    )
    return header + yaml.dump(dict(tree), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1000)


class _Dumper(yaml.SafeDumper):
    """Quotes texts that could be taken for numbers: OmegaConf knows 1e5 as one, PyYAML 12:00:00."""

    def represent_text(self, text: str) -> yaml.Node:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="'" if text[:1] in "+-.0123456789" else None)


_Dumper.add_representer(str, _Dumper.represent_text)
