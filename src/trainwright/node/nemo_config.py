"""NeMo's YAML as trainwright renders it: what its exp_manager section says of resuming, and that said explicitly.

The standard library has no YAML parser; these files have two blanks a level (backends/rendered_yaml.py).
"""

from __future__ import annotations

import json
import re

_SECTION = re.compile(r"^exp_manager:\n((?:[ #].*\n|\n)*)", re.MULTILINE)
_AVERAGES = re.compile(r"^  ema:\n(?:    .*\n)*?    enable: true$", re.MULTILINE)


def says(text: str, key: str) -> str | None:
    """Return what stands behind a key of exp_manager; None: it is not there."""
    found = re.search(rf"^  {key}: (.*)$", _section(text), re.MULTILINE)
    return found.group(1) if found else None


def averages(text: str) -> bool:
    """Return whether NeMo keeps averaged weights beside each checkpoint."""
    return _AVERAGES.search(_section(text)) is not None


def with_resume(text: str, checkpoint: str | None) -> str:
    """Return the same YAML, in which NeMo is told what to go on from and so looks for nothing itself.

    None: from nothing but what the YAML says already. With `resume_if_exists` NeMo's own rules would win over
    `resume_from_checkpoint` (exp_manager.check_resume). A text in JSON is one in YAML, so any path can be said.
    """
    section = _section(text)
    told = re.sub(r"(?m)^  resume_if_exists: .*$", "  resume_if_exists: false", section)
    if checkpoint is not None:
        told = re.sub(r"(?m)^  resume_from_checkpoint: .*\n", "", told)
        told = f"  resume_from_checkpoint: {json.dumps(checkpoint)}\n{told}"
    return text.replace(section, told, 1)


def _section(text: str) -> str:
    found = _SECTION.search(text)
    if found is None:
        raise ValueError("NeMo's YAML has no section exp_manager")
    return found.group(1)
