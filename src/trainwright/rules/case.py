"""What a rule is and what it looks at.

A rule is pure: values in, findings out. What only the submitting machine can know comes to it as `Facts`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainwright.code_state import CodeState
from trainwright.config import RunConfig
from trainwright.plan import Plan

Severity = Literal["error", "warning"]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was seen around a run at submit time."""

    built_backends: Collection[str]
    built_launchers: Collection[str]
    missing_files: Mapping[str, str] = field(default_factory=dict)  # path by key
    missing_packages: tuple[tuple[str, str], ...] = ()  # (package, the extra of ours that brings it)
    max_token_id: int | None = None  # largest token of data.data_prefix; None: not looked at
    num_sequences: Mapping[str, int] = field(default_factory=dict)  # by prefix of data.data_prefix, as far as seen
    tokenizer_vocab_size: int | None = None  # of a tokenizer in a directory here; None: not looked at
    free_bytes: int | None = None  # on the disk of exp_manager.exp_dir; None: not on this machine
    scheduler_problems: tuple[tuple[str, str], ...] = ()  # (what is wrong, what to do), as the scheduler tells
    bucket_problems: tuple[tuple[str, str], ...] = ()  # (what is wrong, what to do) about writing runs to their bucket
    changed_keys: tuple[str, ...] = ()  # a resumed run: `key: old -> new`
    code: CodeState | None = None  # None: the run starts in no git repository
    unset_env: tuple[str, ...] = ()  # variables of launcher.env_from that this command does not have
    exposed_env: tuple[tuple[str, str], ...] = ()  # (variable of launcher.env_from, key that shows its value)
    holder: str | None = None  # a resumed run: the process that still works on it; None: none does


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a rule looks at."""

    config: RunConfig
    plan: Plan
    facts: Facts


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row of the table. `find` yields (what is wrong with values and key, what to do instead)."""

    id: str
    severity: Severity
    condition: str
    source: str
    find: Callable[[Case], Iterator[tuple[str, str]]]
    dry_run_severity: Severity | None = None  # None: as in a real run


def is_below(path: str, folder: str) -> bool:
    """Return whether `path` is `folder` or lies in it."""
    return Path(folder) in (Path(path), *Path(path).parents)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, text) for each text of a config."""
    if isinstance(tree, str):
        yield path, tree
    elif isinstance(tree, (dict, list)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from leaves(value, f"{path}.{key}" if path else str(key))
