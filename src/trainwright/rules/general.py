"""Rules that hold whatever trains and wherever it runs."""

from collections.abc import Iterator

from trainwright.dataset.splits import empty_split
from trainwright.exp_manager import idle_keys
from trainwright.plan import GIB, model_parallel_size, multiples_around
from trainwright.rules.case import Case, Rule, is_below, leaves

_MAX_SNAPSHOT_GIB = 1

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
        elif config.data.kind not in ("gpt", "sft"):
            yield f"data={config.data.name}: backend=native does not read data.kind={config.data.kind} yet", instead
        if config.exp_manager.resume_from_checkpoint is not None:
            path = config.exp_manager.resume_from_checkpoint
            yield f"exp_manager.resume_from_checkpoint={path}: native begins no run with another's checkpoint", instead
        if config.trainer.recompute == "selective":
            yield "trainer.recompute=selective: backend=native computes all layers again or none", "use full or none"
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
        yield (
            f"world size {world} (hardware.num_nodes * hardware.devices) is no multiple of tensor * pipeline * context "
            f"parallel size = {parallel}",
            f"use a world of {multiples_around(world, parallel)}",
        )


def _batch_divides(case: Case) -> Iterator[tuple[str, str]]:
    data = case.config.data
    step = data.micro_batch_size * case.plan.data_parallel_size
    if data.global_batch_size % step:
        yield (
            f"data.global_batch_size={data.global_batch_size} is no multiple of data.micro_batch_size * data parallel "
            f"size = {data.micro_batch_size} * {case.plan.data_parallel_size} = {step}",
            f"use {multiples_around(data.global_batch_size, step)}",
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
    is_tokenized_here = case.config.backend.kind == "native" and data.kind == "sft"
    if is_tokenized_here and data.tokenizer.type == "huggingface" and data.tokenizer.name is None:
        yield "data.tokenizer.name=null, but the records are tokenized with it", "give a directory or hub id"
    if data.tokenizer.vocab_size > entries:
        yield (
            f"data.tokenizer.vocab_size={data.tokenizer.vocab_size} is more than model.vocab_size={entries}",
            f"set model.vocab_size={data.tokenizer.vocab_size} or choose the model's own tokenizer",
        )
    tokens = case.facts.tokenizer_vocab_size
    if tokens is not None and tokens > max(entries, data.tokenizer.vocab_size):
        yield (
            f"data.tokenizer.name={data.tokenizer.name} has {tokens} tokens, but model.vocab_size={entries} and "
            f"data.tokenizer.vocab_size={data.tokenizer.vocab_size}",
            f"set both to {tokens} or choose the model's own tokenizer",
        )
    largest = case.facts.max_token_id
    if largest is not None and largest >= entries:
        yield (
            f"data.data_prefix holds token {largest}, but model.vocab_size={entries}",
            f"set model.vocab_size={largest + 1} or more, or choose data of the model's tokenizer",
        )


def _sft_unmasked(case: Case) -> Iterator[tuple[str, str]]:
    if case.config.backend.kind == "native" and case.config.data.kind == "sft":
        yield (
            f"data={case.config.data.name}: backend=native trains on every token of a record, those of prompts too, "
            "and cuts samples across records",
            "take its loss for one over prompts and responses, or allow=[sft-unmasked]",
        )


def _empty_split(case: Case) -> Iterator[tuple[str, str]]:
    for prefix, num_sequences in case.facts.num_sequences.items():
        problem = empty_split(case.config.data.splits_string, num_sequences, f"{prefix}.idx")
        if problem is not None:
            yield problem


def _missing_file(case: Case) -> Iterator[tuple[str, str]]:
    for key, path in case.facts.missing_files.items():
        yield f"{key}: {path} does not exist", f"correct {key}"


def _missing_package(case: Case) -> Iterator[tuple[str, str]]:
    missing = case.facts.missing_packages
    for extra in dict.fromkeys(extra for _, extra in missing):
        packages = ", ".join(package for package, its_extra in missing if its_extra == extra)
        yield f"this run needs {packages}, not installed here", f"pip install 'trainwright[{extra}]'"


def _site_unset(case: Case) -> Iterator[tuple[str, str]]:
    tree = case.config.to_dict()
    tree.pop("site")
    unset = sorted({part.split(">")[0] for _, value in leaves(tree) for part in value.split("<site.")[1:]})
    for key in unset:
        yield f"site.{key} is unset, but this run needs it", f"set it in conf/local/default.yaml or give site.{key}=..."


def _disk_space(case: Case) -> Iterator[tuple[str, str]]:
    free, needed = case.facts.free_bytes, case.plan.checkpoint_bytes
    if free is not None and case.config.exp_manager.create_checkpoint_callback and free < needed:
        yield (
            f"exp_manager.exp_dir={case.config.exp_manager.exp_dir} has {free / GIB:.2f} GiB free, a checkpoint takes "
            f"about {needed / GIB:.2f} GiB",
            "free space or choose another exp_manager.exp_dir",
        )


def _scheduler(case: Case) -> Iterator[tuple[str, str]]:
    yield from case.facts.scheduler_problems


def _shared_dir(case: Case) -> Iterator[tuple[str, str]]:
    config, shared = case.config, case.config.site.slurm.shared_dir
    exp_dir = config.exp_manager.exp_dir
    if config.launcher.kind == "slurm" and "<site." not in exp_dir + shared and not is_below(exp_dir, shared):
        yield (
            f"exp_manager.exp_dir={exp_dir} is not below site.slurm.shared_dir={shared}, so nodes may not see it",
            f"use exp_manager.exp_dir={shared}/experiments or correct site.slurm.shared_dir",
        )


def _on_failure(case: Case) -> Iterator[tuple[str, str]]:
    config = case.config
    if config.on_failure == "stop" and config.launcher.kind == "slurm" and config.launcher.max_parallel is None:
        yield (
            "on_failure=stop holds nothing back where launcher=slurm takes all runs of a sweep at once",
            "set launcher.max_parallel: a run then waits for the success of the one before it in its lane",
        )
    if config.on_failure == "stop" and config.launcher.kind == "vertex":
        yield (
            "on_failure=stop holds nothing back: launcher=vertex takes all runs of a sweep at once",
            "use on_failure=continue and trainwright cancel SWEEP",
        )


def _resume_changed(case: Case) -> Iterator[tuple[str, str]]:
    if case.facts.changed_keys:
        yield (
            f"run_id={case.config.run_id} was started with another config: {'; '.join(case.facts.changed_keys)}",
            "give the old values, start a new run without run_id, or allow=[resume-config]",
        )


def _idle_keys(case: Case) -> Iterator[tuple[str, str]]:
    idle = idle_keys(case.config)
    if idle:
        yield (
            f"without effect on backend={case.config.backend.kind}: {', '.join(idle)}",
            "leave them, or allow=[idle-keys]",
        )


def _still_running(case: Case) -> Iterator[tuple[str, str]]:
    if case.facts.holder is not None:
        yield (
            f"run_id={case.config.run_id} is still worked on by {case.facts.holder}, and two at once would spoil it",
            "wait for its end or stop it; allow=[still-running] if it is on another host and you know that it is dead",
        )


def _code(case: Case) -> Iterator[tuple[str, str]]:
    mode, code = case.config.code, case.facts.code
    if mode == "record":
        return
    if code is None:
        yield f"code={mode}, but the run is not started in a git repository", "start it in one or use code=record"
    elif mode == "require_clean" and code.is_dirty:
        files = [*(f"changed {name}" for name in code.changed), *(f"new {name}" for name in code.untracked)]
        yield f"code=require_clean, but {code.top} has {', '.join(files)}", "commit them or use code=snapshot"
    elif mode == "snapshot" and code.num_bytes > _MAX_SNAPSHOT_GIB * GIB:
        yield (
            f"code=snapshot would copy {code.num_bytes / GIB:.1f} GiB, {_MAX_SNAPSHOT_GIB} are allowed",
            f"let .gitignore name what is not code below {code.top}",
        )


def _env_from(case: Case) -> Iterator[tuple[str, str]]:
    for name in case.facts.unset_env:
        yield f"launcher.env_from names {name}, which is not set here", f"export {name} or leave it out"
    for name, key in case.facts.exposed_env:
        yield f"{key} spells out the value of {name}, so records would show it", "let launcher.env_from alone bring it"


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
        condition="tokenizer or data set hold tokens that the model's table does not, or no tokenizer is named",
        source="an index beyond the embedding fails on CPU and reads foreign memory on a GPU",
        find=_vocabulary,
    ),
    Rule(
        id="sft-unmasked",
        severity="warning",
        condition="backend=native reads instruction data as plain text: no mask, no packing",
        source="trainwright.backends.native.data",
        find=_sft_unmasked,
    ),
    Rule(
        id="empty-split",
        severity="error",
        condition="data.splits_string leaves a part of a data set of data.data_prefix without any sequence",
        source="megatron.core.datasets.gpt_dataset, 0.5: it counts epochs of a part without tokens for ever",
        find=_empty_split,
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
        condition="backend=native, or a logger of exp_manager, lacks a package on this machine",
        source="pyproject.toml, extras `native`, `wandb`, `mlflow`",
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
        id="scheduler",
        severity="error",
        dry_run_severity="warning",
        condition="the scheduler is not here, does not answer, lacks the partition, or still has the run",
        source="the scheduler, asked at submit time",
        find=_scheduler,
    ),
    Rule(
        id="shared-dir",
        severity="error",
        dry_run_severity="warning",
        condition="the runs of launcher=slurm lie where its nodes may not see them",
        source="conf/site.yaml, site.slurm.shared_dir",
        find=_shared_dir,
    ),
    Rule(
        id="on-failure",
        severity="error",
        condition="on_failure=stop without the lanes that it needs on Slurm, or on Vertex AI, which has none",
        source="sbatch --dependency=afterok,singleton; Vertex AI knows no dependencies between jobs",
        find=_on_failure,
    ),
    Rule(
        id="idle-keys",
        severity="warning",
        condition="keys of NeMo's exp_manager are set that do nothing on this backend",
        source="conf/exp_manager/default.yaml",
        find=_idle_keys,
    ),
    Rule(
        id="code",
        severity="error",
        condition="the repository is not what `code` asks for: none, with changes, or too large to copy",
        source="git, asked in the directory where the command is given",
        find=_code,
    ),
    Rule(
        id="env-from",
        severity="error",
        dry_run_severity="warning",
        condition="a variable of launcher.env_from is not set, or its value stands in the config",
        source="the environment of the command",
        find=_env_from,
    ),
    Rule(
        id="still-running",
        severity="error",
        dry_run_severity="warning",
        condition="run_id names a run of launcher=local that a process still works on, or may on another host",
        source="the process ids and start times that the run's record and events hold",
        find=_still_running,
    ),
    Rule(
        id="resume-config",
        severity="error",
        condition="run_id names an existing run whose config differs in more than length, launcher and logging",
        source="a resumed run that trains something else is a new run",
        find=_resume_changed,
    ),
)
