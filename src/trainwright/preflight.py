"""What stands between a composed run and paying for it: `look` around, then `check` the table of rules.

`look` gathers what only the submitting machine can know; `check` is pure: values in, all findings out at once.
"""

import contextlib
import difflib
import importlib.util
import os
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright import storage
from trainwright.code_state import CodeState
from trainwright.config import RunConfig
from trainwright.config_backend import NxdtBackend
from trainwright.dataset.hf_tokenizer import is_path
from trainwright.dataset.index_header import HEADER, num_sequences
from trainwright.errors import UserError
from trainwright.places import corpus
from trainwright.plan import Plan
from trainwright.rules import RULES, Case, Facts, Rule, Severity, is_below, leaves

_SECRET_LENGTH = 8  # characters; what is shorter stands in a config by chance


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A rule that a run breaks."""

    rule: str
    severity: Severity
    message: str
    remedy: str
    is_allowed: bool = False  # an error that `allow` turned into a warning

    def __str__(self) -> str:
        return f"{self.severity} [{self.rule}] {self.message}; {self.remedy}"


def check(config: RunConfig, plan: Plan, facts: Facts) -> list[Finding]:
    """Return all findings, errors first. `allow` turns an error into a warning and silences a warning.

    Raises UserError when `allow` names no rule.
    """
    _refuse_unknown_rules(config.allow)
    case = Case(config=config, plan=plan, facts=facts)
    findings = [found for rule in RULES for found in _apply(rule, case)]
    return sorted(findings, key=lambda found: found.severity)  # "error" < "warning"; stable, so the table's order stays


def _apply(rule: Rule, case: Case) -> Iterator[Finding]:
    severity = rule.severity
    if case.config.dry_run and rule.dry_run_severity is not None:
        severity = rule.dry_run_severity
    is_allowed = rule.id in case.config.allow
    if is_allowed and severity == "warning":
        return
    for message, remedy in rule.find(case):
        yield Finding(
            rule=rule.id,
            severity="warning" if is_allowed else severity,
            message=message,
            remedy=remedy,
            is_allowed=is_allowed,
        )


def _refuse_unknown_rules(allow: Collection[str]) -> None:
    known = [rule.id for rule in RULES]
    lines = []
    for unknown in sorted(set(allow) - set(known)):
        close = difflib.get_close_matches(unknown, known, n=1)
        hint = f"did you mean {close[0]}?" if close else "`trainwright rules` lists them"
        lines.append(f"allow: {unknown!r} is no rule; {hint}")
    if lines:
        raise UserError("\n".join(lines))


def look(
    config: RunConfig,
    *,
    built_backends: Collection[str],
    built_launchers: Collection[str],
    scheduler_problems: tuple[tuple[str, str], ...] = (),
    bucket_problems: tuple[tuple[str, str], ...] = (),
    code: CodeState | None = None,
) -> Facts:
    """Look at files, packages and disk as the run would find them: on this machine, or in Slurm's shared directory."""
    known: dict[str, Any] = {
        "built_backends": built_backends,
        "built_launchers": built_launchers,
        "scheduler_problems": scheduler_problems,
        "bucket_problems": bucket_problems,
        "code": code,
        "unset_env": tuple(name for name in config.launcher.env_from if name not in os.environ),
        "exposed_env": _exposed_env(config),
        "num_sequences": _num_sequences(config, may_ask_bucket=not bucket_problems and _may_ask_bucket(config)),
    }
    if config.launcher.kind == "vertex" or config.backend.kind == "nemo":
        return Facts(**known)
    if config.launcher.kind == "slurm":
        shared = config.site.slurm.shared_dir
        missing = {key: path for key, path in _missing_files(config).items() if is_below(path, shared)}
        free_bytes = _free_bytes(config.exp_manager.exp_dir) if os.path.isdir(shared) else None
        return Facts(**known, missing_files=missing, free_bytes=free_bytes)
    if config.backend.kind != "native":
        return Facts(**known, missing_files=_missing_files(config))
    return Facts(
        **known,
        missing_files=_missing_files(config),
        missing_packages=_missing_packages(config),
        max_token_id=_max_token_id(config),
        tokenizer_vocab_size=_tokenizer_vocab_size(config),
        free_bytes=_free_bytes(config.exp_manager.exp_dir),
    )


def _exposed_env(config: RunConfig) -> tuple[tuple[str, str], ...]:
    """Find secrets that a value of the config spells out, so that the record would hold them."""
    values = {name: os.environ.get(name, "") for name in config.launcher.env_from}
    secrets = {name: value for name, value in values.items() if len(value) >= _SECRET_LENGTH}
    found = list(leaves(config.to_dict()))
    return tuple((name, key) for name, secret in secrets.items() for key, text in found if secret in text)


def _missing_files(config: RunConfig) -> dict[str, str]:
    data = config.data
    wanted = {"data.train_path": data.train_path, "data.val_path": data.val_path}
    if isinstance(config.backend, NxdtBackend):
        wanted = _wanted_by_nxdt(config, config.backend)
    if data.text is not None and corpus(data.text) is None:
        wanted["data.text"] = data.text
    wanted.update({f"exp_manager.files_to_copy[{i}]": path for i, path in enumerate(_files_to_copy(config))})
    is_fetched = isinstance(config.backend, NxdtBackend) and data.tokenizer.name == config.model.source
    if is_path(data.tokenizer.name or "") and not is_fetched:
        wanted["data.tokenizer.name"] = f"{data.tokenizer.name}/tokenizer.json"
    for prefix in _prefixes(config):
        wanted["data.data_prefix"] = f"{prefix}.idx" if os.path.isfile(f"{prefix}.bin") else f"{prefix}.bin"
    return {key: path for key, path in wanted.items() if path and "<site." not in path and not os.path.isfile(path)}


def _wanted_by_nxdt(config: RunConfig, backend: NxdtBackend) -> dict[str, str | None]:
    """Return what a chain of NxDT's stages begins with: what it fetches itself, not where it puts that."""
    data, source = config.data, config.model.source or ""
    files = {
        "data.train_source" if data.train_source else "data.train_path": data.train_source or data.train_path,
        "data.val_source" if data.val_source else "data.val_path": data.val_source or data.val_path,
        "backend.nxdt_dir": f"{backend.nxdt_dir}/examples/training_orchestrator.py",
        "model.source": f"{source}/config.json" if is_path(source) else None,
    }
    return {key: path for key, path in files.items() if path and "://" not in path}


def _prefixes(config: RunConfig) -> list[str]:
    return [part for part in config.data.data_prefix or () if isinstance(part, str)]


def _files_to_copy(config: RunConfig) -> tuple[str, ...]:
    return config.exp_manager.files_to_copy or ()


def _max_token_id(config: RunConfig) -> int | None:
    prefixes = _prefixes(config)
    if not prefixes or _missing_files(config) or _missing_packages(config):
        return None
    from trainwright.dataset.indexed import inspect_prefix

    return max(inspect_prefix(Path(prefix)).max_token_id for prefix in prefixes)


def _may_ask_bucket(config: RunConfig) -> bool:
    """Return whether a bucket may be asked: not by a dry run, which needs no network, or where it is not named yet.

    Without the packages for it the launcher tells what to install.
    """
    is_named = "<site." not in config.exp_manager.exp_dir
    return not config.dry_run and is_named and importlib.util.find_spec("upath") is not None


def _num_sequences(config: RunConfig, *, may_ask_bucket: bool) -> dict[str, int]:
    """Return how many sequences the data sets have, as far as their indices can be read from here."""
    launcher, counts = config.launcher, {}
    is_remote = launcher.kind == "vertex" and "://" in launcher.bucket_url
    for prefix in _prefixes(config):
        if "<site." in prefix or (is_remote and not may_ask_bucket):
            continue
        index = storage.seen_from_here(config, f"{prefix}.idx")
        with contextlib.suppress(*storage.failures(index)):
            counts[prefix] = num_sequences(storage.read_head(index, HEADER.size))
    return {prefix: count for prefix, count in counts.items() if count is not None}


def _tokenizer_vocab_size(config: RunConfig) -> int | None:
    tokenizer = config.data.tokenizer
    if tokenizer.type != "huggingface" or not os.path.isdir(tokenizer.name or "") or _missing_packages(config):
        return None
    from trainwright.dataset.tokenizer import load_tokenizer

    return load_tokenizer(tokenizer.type, tokenizer.name).vocab_size


def _missing_packages(config: RunConfig) -> tuple[tuple[str, str], ...]:
    wanted = [(name, "native") for name in ("torch", "lightning", "transformers", "tokenizers")]
    if config.exp_manager.create_wandb_logger:
        wanted.append(("wandb", "wandb"))
    if config.exp_manager.create_mlflow_logger:
        wanted.append(("mlflow", "mlflow"))
    return tuple((name, extra) for name, extra in wanted if importlib.util.find_spec(name) is None)


def _free_bytes(folder: str) -> int:
    return shutil.disk_usage(_nearest_existing(Path(folder))).free


def _nearest_existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.is_dir())
