"""How a table of a backend's rules is read: what is found for a config with changes."""

import json
from typing import Any

from trainwright.config import RunConfig
from trainwright.plan import make_plan
from trainwright.preflight import check
from trainwright.rules import Facts

Changes = dict[str, Any]  # value by key path


def findings(config: dict[str, Any], changes: Changes, facts: Facts) -> dict[str, list[str]]:
    """Return what is found for a config's tree with `changes`, by rule."""
    tree = json.loads(json.dumps(config))
    for path, value in changes.items():
        *sections, key = path.split(".")
        node = tree
        for section in sections:
            node = node[section]
        node[key] = value
    changed = RunConfig.from_dict(tree)
    found: dict[str, list[str]] = {}
    for one in check(changed, make_plan(changed), facts):
        found.setdefault(one.rule, []).append(str(one))
    return found
