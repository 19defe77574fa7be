"""The rules that a run must meet before anything is paid for: one table, all findings at once.

`look` gathers what only the submitting machine can know; `check` is pure: values in, findings out.
"""

import difflib
import importlib.util
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trainwright.config import RunConfig
from trainwright.errors import UserError
from trainwright.places import corpus
from trainwright.plan import GIB, Plan, model_parallel_size

Severity = Literal["error", "warning"]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was seen around a run at submit time."""

    built_backends: Collection[str]
    built_launchers: Collection[str]
    missing_files: Mapping[str, str] = field(default_factory=dict)  # path by key
    missing_packages: tuple[str, ...] = ()
    max_token_id: int | None = None  # largest token of data.data_prefix; None: not looked at
    free_bytes: int | None = None  # on the disk of exp_manager.exp_dir; None: not on this machine
    changed_keys: tuple[str, ...] = ()  # a resumed run: `key: old -> new`


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


# ---- what can be seen from here


def look(config: RunConfig, *, built_backends: Collection[str], built_launchers: Collection[str]) -> Facts:
    """Look at files, packages and disk where the run would be on this machine; elsewhere only what was built counts."""
    built: dict[str, Any] = {"built_backends": built_backends, "built_launchers": built_launchers}
    if config.launcher.kind != "local" or config.backend.kind != "native":
        return Facts(**built)
    return Facts(
        **built,
        missing_files=_missing_files(config),
        missing_packages=_missing_packages(),
        max_token_id=_max_token_id(config),
        free_bytes=shutil.disk_usage(_nearest_existing(Path(config.exp_manager.exp_dir))).free,
    )


def _missing_files(config: RunConfig) -> dict[str, str]:
    data = config.data
    wanted = {"data.train_path": data.train_path, "data.val_path": data.val_path}
    if data.text is not None and corpus(data.text) is None:
        wanted["data.text"] = data.text
    for prefix in _prefixes(config):
        wanted["data.data_prefix"] = f"{prefix}.idx" if os.path.isfile(f"{prefix}.bin") else f"{prefix}.bin"
    return {key: path for key, path in wanted.items() if path and "<site." not in path and not os.path.isfile(path)}


def _prefixes(config: RunConfig) -> list[str]:
    return [part for part in config.data.data_prefix or () if isinstance(part, str)]


def _max_token_id(config: RunConfig) -> int | None:
    prefixes = _prefixes(config)
    if not prefixes or _missing_files(config) or _missing_packages():
        return None
    from trainwright.dataset.indexed import inspect_prefix

    return max(inspect_prefix(Path(prefix)).max_token_id for prefix in prefixes)


def _missing_packages() -> tuple[str, ...]:
    return tuple(name for name in ("torch", "lightning", "transformers") if importlib.util.find_spec(name) is None)


def _nearest_existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


# ---- the rules

# Architectures that a backend can train; a later order adds a row where it adds the code.
_ARCHITECTURES = {"native": ("gpt2", "llama"), "nemo": ("gpt2",), "nxdt": ("llama",)}
_ACCELERATORS = {"native": ("cpu", "gpu"), "nemo": ("gpu",), "nxdt": ("neuron",)}


def _works_on(case: Case) -> str:
    model = case.config.model
    if not model.trains_on:
        return f"no hardware has a recipe for {model.name} yet"
    return f"use hardware={' or hardware='.join(model.trains_on)}"


def _not_built(case: Case) -> Iterator[tuple[str, str]]:
    config, facts = case.config, case.facts
    instead = "it is recorded only" if config.dry_run else "add dry_run=true to compose, check and record it"
    if config.backend.kind not in facts.built_backends:
        yield f"backend={config.backend.kind} is not built yet, so nothing is rendered for it", instead
    if config.launcher.kind not in facts.built_launchers:
        yield f"launcher={config.launcher.kind} is not built yet, so nothing can be submitted to it", instead
    if config.backend.kind == "native":
        if config.model.architecture not in _ARCHITECTURES["native"]:
            yield f"model={config.model.name}: {config.model.architecture} training is not built yet", instead
        elif config.data.kind != "gpt":
            yield f"data={config.data.name}: backend=native does not read data.kind={config.data.kind} yet", instead
        if config.parallelism.strategy == "fsdp":
            yield "parallelism.strategy=fsdp is not built yet", f"use ddp if the model fits, or {instead}"
        if model_parallel_size(config) > 1:
            sizes = config.parallelism.model_dump(
                include={"tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"}
            )
            yield f"backend=native splits no layers: parallelism has {sizes}", "set all three to 1"


def _architecture(case: Case) -> Iterator[tuple[str, str]]:
    config = case.config
    backend, architecture = config.backend.kind, config.model.architecture
    if backend != "native" and architecture not in _ARCHITECTURES[backend]:
        yield f"backend={backend} has no {architecture} recipe, which model={config.model.name} needs", _works_on(case)


def _accelerator(case: Case) -> Iterator[tuple[str, str]]:
    backend, accelerator = case.config.backend.kind, case.config.hardware.accelerator
    if accelerator not in _ACCELERATORS[backend]:
        fitting = [name for name, accelerators in _ACCELERATORS.items() if accelerator in accelerators]
        yield (
            f"backend={backend} does not run on hardware.accelerator={accelerator}",
            f"use backend={' or backend='.join(fitting)}",
        )
    if accelerator == "neuron" and case.config.launcher.kind == "vertex":
        yield "launcher=vertex has no Trainium machines", "use launcher=slurm"


def _memory(case: Case) -> Iterator[tuple[str, str]]:
    plan, hardware = case.plan, case.config.hardware
    if plan.device_bytes > hardware.device_memory_gib * GIB:
        yield (
            f"model={case.config.model.name} needs about {plan.device_bytes / GIB:.1f} GiB a device, but "
            f"hardware.device_memory_gib={hardware.device_memory_gib:g}",
            _works_on(case),
        )


def _world_divides(case: Case) -> Iterator[tuple[str, str]]:
    world, parallel = case.plan.world_size, model_parallel_size(case.config)
    if world % parallel:
        below = world // parallel * parallel
        fits = f"{below} or {below + parallel}" if below else str(parallel)
        yield (
            f"world size {world} (hardware.num_nodes * hardware.devices) is no multiple of tensor * pipeline * context "
            f"parallel size = {parallel}",
            f"use a world of {fits}",
        )


def _batch_divides(case: Case) -> Iterator[tuple[str, str]]:
    data = case.config.data
    step = data.micro_batch_size * case.plan.data_parallel_size
    if data.global_batch_size % step:
        below = data.global_batch_size // step * step
        fits = f"{below} or {below + step}" if below else str(step)
        yield (
            f"data.global_batch_size={data.global_batch_size} is no multiple of data.micro_batch_size * data parallel "
            f"size = {data.micro_batch_size} * {case.plan.data_parallel_size} = {step}",
            f"use {fits}",
        )


def _shards_divide(case: Case) -> Iterator[tuple[str, str]]:
    model, sizes = case.config.model, case.config.parallelism
    tensor, pipeline = sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size
    if model.num_attention_heads % tensor:
        yield (
            f"parallelism.tensor_model_parallel_size={tensor} does not divide "
            f"model.num_attention_heads={model.num_attention_heads}",
            "use a divisor",
        )
    if model.num_layers % pipeline:
        yield (
            f"parallelism.pipeline_model_parallel_size={pipeline} does not divide model.num_layers={model.num_layers}",
            "use a divisor",
        )
    if case.plan.padded_vocab_size % tensor:
        yield (
            f"parallelism.tensor_model_parallel_size={tensor} does not divide model.vocab_size={model.vocab_size}, "
            "which NxDT does not pad",
            "use a divisor",
        )


def _vocabulary(case: Case) -> Iterator[tuple[str, str]]:
    data, entries = case.config.data, case.config.model.vocab_size  # the rows of padding are no tokens
    if data.tokenizer.vocab_size > entries:
        yield (
            f"data.tokenizer.vocab_size={data.tokenizer.vocab_size} is more than model.vocab_size={entries}",
            f"set model.vocab_size={data.tokenizer.vocab_size} or choose the model's own tokenizer",
        )
    largest = case.facts.max_token_id
    if largest is not None and largest >= entries:
        yield (
            f"data.data_prefix holds token {largest}, but model.vocab_size={entries}",
            f"set model.vocab_size={largest + 1} or more, or choose data of the model's tokenizer",
        )


def _missing_file(case: Case) -> Iterator[tuple[str, str]]:
    for key, path in case.facts.missing_files.items():
        yield f"{key}: {path} does not exist", f"correct {key}"


def _missing_package(case: Case) -> Iterator[tuple[str, str]]:
    if case.facts.missing_packages:
        yield (
            f"backend=native needs {', '.join(case.facts.missing_packages)}, not installed here",
            "pip install 'trainwright[native]'",
        )


def _site_unset(case: Case) -> Iterator[tuple[str, str]]:
    tree = case.config.to_dict()
    tree.pop("site")
    unset = sorted({part.split(">")[0] for value in _texts(tree) for part in value.split("<site.")[1:]})
    for key in unset:
        yield f"site.{key} is unset, but this run needs it", f"set it in conf/local/default.yaml or give site.{key}=..."


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, (dict, list)):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _texts(value)


def _disk_space(case: Case) -> Iterator[tuple[str, str]]:
    free, needed = case.facts.free_bytes, case.plan.checkpoint_bytes
    if free is not None and case.config.exp_manager.create_checkpoint_callback and free < needed:
        yield (
            f"exp_manager.exp_dir={case.config.exp_manager.exp_dir} has {free / GIB:.2f} GiB free, a checkpoint takes "
            f"about {needed / GIB:.2f} GiB",
            "free space or choose another exp_manager.exp_dir",
        )


def _resume_changed(case: Case) -> Iterator[tuple[str, str]]:
    if case.facts.changed_keys:
        yield (
            f"run_id={case.config.run_id} was started with another config: {'; '.join(case.facts.changed_keys)}",
            "give the old values, start a new run without run_id, or allow=[resume-config]",
        )


RULES = (
    Rule(
        id="not-built",
        severity="error",
        dry_run_severity="warning",
        condition="the run needs a backend, launcher, data kind or strategy that this version does not have yet",
        source="README.md, what is not built yet",
        find=_not_built,
    ),
    Rule(
        id="architecture",
        severity="error",
        condition="the backend has no recipe for model.architecture",
        source="NeMo 24.03 megatron_gpt_pretraining.py; NxDT's examples: Llama",
        find=_architecture,
    ),
    Rule(
        id="accelerator",
        severity="error",
        condition="the backend does not run on hardware.accelerator",
        source="NeMo needs CUDA, NxDT needs NeuronCores, Lightning here runs on CPU and CUDA",
        find=_accelerator,
    ),
    Rule(
        id="memory",
        severity="error",
        condition="weights, gradients, optimizer state and activations exceed hardware.device_memory_gib",
        source="Rajbhandari et al. 2020 (ZeRO) for the state, Korthikanti et al. 2022 for activations; an estimate",
        find=_memory,
    ),
    Rule(
        id="world-divides",
        severity="error",
        condition="world size is no multiple of tensor * pipeline * context parallel size",
        source="megatron.core.parallel_state.initialize_model_parallel",
        find=_world_divides,
    ),
    Rule(
        id="batch-divides",
        severity="error",
        condition="data.global_batch_size is no multiple of data.micro_batch_size * data parallel size",
        source="NeMo's sampler raises; NxDT drops the remainder silently",
        find=_batch_divides,
    ),
    Rule(
        id="shards-divide",
        severity="error",
        condition="a parallel size does not divide heads, layers or vocabulary",
        source="megatron.core.transformer.TransformerConfig; NxDT needs the vocabulary to divide",
        find=_shards_divide,
    ),
    Rule(
        id="vocabulary",
        severity="error",
        condition="tokenizer or data set hold tokens that the model's table does not",
        source="an index beyond the embedding fails on CPU and reads foreign memory on a GPU",
        find=_vocabulary,
    ),
    Rule(
        id="missing-file",
        severity="error",
        condition="a data file that this machine should have is not there",
        source="the file system, for launcher=local",
        find=_missing_file,
    ),
    Rule(
        id="missing-package",
        severity="error",
        dry_run_severity="warning",
        condition="backend=native on this machine lacks a package",
        source="pyproject.toml, extra `native`",
        find=_missing_package,
    ),
    Rule(
        id="site-unset",
        severity="error",
        dry_run_severity="warning",
        condition="a value of the run refers to a fact of the site that is not filled in",
        source="conf/site.yaml",
        find=_site_unset,
    ),
    Rule(
        id="disk-space",
        severity="error",
        dry_run_severity="warning",
        condition="the disk of exp_manager.exp_dir cannot hold one checkpoint",
        source="12 bytes a parameter: fp32 weights and Adam's two moments",
        find=_disk_space,
    ),
    Rule(
        id="resume-config",
        severity="error",
        condition="run_id names an existing run whose config differs in more than length, launcher and logging",
        source="a resumed run that trains something else is a new run",
        find=_resume_changed,
    ),
)
