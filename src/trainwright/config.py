"""RunConfig: what a composed run means, parsed once and strictly from Hydra's resolved tree.

Values follow JSON semantics: lists become tuples, whole numbers become floats where a float is due, nothing else is
coerced ("yes" is no bool). All problems are reported at once, each with its key, its value and what would be right.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import Field, ValidationError, field_validator

from trainwright.config_backend import Backend
from trainwright.config_exp_manager import ExpManager
from trainwright.config_launcher import Launcher
from trainwright.config_problems import explain
from trainwright.config_types import Count, Name, Probability, Section
from trainwright.errors import UserError

Architecture = Literal["gpt2", "llama", "bert"]
CodeMode = Literal["record", "require_clean", "snapshot"]
Accelerator = Literal["cpu", "gpu", "neuron"]
Precision = Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true"]


class SlurmSite(Section):
    shared_dir: str
    partition: str | None
    account: str | None
    neuron_env: str
    nxdt_dir: str


class VertexSite(Section):
    project: str
    location: str
    bucket: str
    repository: str
    service_account: str | None  # None: the project's default
    network: str | None  # None: none of the user's


class Site(Section):
    slurm: SlurmSite
    vertex: VertexSite


class Model(Section):
    name: Name
    architecture: Architecture
    num_layers: Count
    hidden_size: Count
    ffn_hidden_size: Count
    num_attention_heads: Count
    num_query_groups: Count | None  # None: as many as query heads
    max_position_embeddings: Count
    vocab_size: Count
    make_vocab_size_divisible_by: Count
    share_embeddings_and_output_weights: bool
    hidden_dropout: Probability
    attention_dropout: Probability
    init_method_std: Annotated[float, Field(gt=0)]
    layernorm_epsilon: Annotated[float, Field(gt=0)]
    rope_theta: Annotated[float, Field(gt=0)] | None  # None: learned positions
    trains_on: tuple[str, ...]
    source: str | None  # None: no trained weights to begin with
    revision: str | None  # None: the newest
    chat_template: str | None  # None: the fetched tokenizer's own

    def disagreements(self) -> Iterator[str]:
        heads, groups = self.num_attention_heads, self.num_query_groups
        if self.hidden_size % heads:
            yield f"model.num_attention_heads: {heads} does not divide hidden_size={self.hidden_size}; use a divisor"
        if heads % (groups or heads):
            yield f"model.num_query_groups: {groups} does not divide num_attention_heads={heads}; use a divisor"
        if self.architecture == "llama" and self.rope_theta is None:
            yield "model.rope_theta: null, but llama has rotary positions; use a number such as 10000.0"


class Tokenizer(Section):
    type: Literal["gpt2_bpe", "bert_wordpiece", "huggingface"]
    name: str | None  # None: the type says it all
    vocab_size: Count

    def with_absolute_path(self, base: Path) -> "Tokenizer":
        """Return the same with the name made absolute, where it is a path, here or on the nodes; the hub's ids stay."""
        if not self.name or not (self.name[0] in "./" or (base / self.name).is_dir()):
            return self
        return self.model_copy(update={"name": os.path.normpath(base / self.name)})


class Data(Section):
    name: Name
    kind: Literal["gpt", "sft", "bert"]
    text: str | None  # None: not made from a text
    data_prefix: tuple[float | str, ...] | None  # None: made from `text`
    splits_string: Annotated[str, Field(pattern=r"^\s*\d+(\.\d+)?(\s*,\s*\d+(\.\d+)?){0,2}\s*$")]
    train_path: str | None  # None: not sft
    val_path: str | None  # None: not sft
    train_source: str | None  # None: train_path is there already
    val_source: str | None  # None: val_path is there already
    seq_length: Count
    micro_batch_size: Count
    global_batch_size: Count
    tokenizer: Tokenizer
    cache_dir: str
    index_mapping_dir: str | None  # None: beside the data
    shuffle_tokens: bool
    num_workers: Annotated[int, Field(ge=0)]

    @field_validator("data_prefix")
    @classmethod
    def _prefix_pairs(cls, value: tuple[float | str, ...] | None) -> tuple[float | str, ...] | None:
        if value is None or (len(value) == 1 and isinstance(value[0], str)):
            return value
        weights, paths = value[::2], value[1::2]
        if (
            not value
            or len(weights) != len(paths)
            or any(isinstance(weight, str) or weight <= 0 for weight in weights)
            or not all(isinstance(path, str) for path in paths)
        ):
            raise ValueError("write [PATH] or [WEIGHT, PATH, WEIGHT, PATH] with weights above 0")
        return value

    def disagreements(self) -> Iterator[str]:
        if self.kind == "gpt" and (self.text is None) == (self.data_prefix is None):
            yield (
                f"data.text: {self.text!r} with data.data_prefix={self.data_prefix!r}; "
                "give one of the two and set the other to null"
            )
        if self.kind == "sft" and (self.train_path is None or self.val_path is None):
            yield "data.train_path, data.val_path: null, but data.kind=sft needs both; give two jsonl files"


class Schedule(Section):
    name: Literal["CosineAnnealing", "LinearAnnealingWithWarmUp", "constant"]
    warmup_steps: Annotated[int, Field(ge=0)]
    min_lr: Annotated[float, Field(ge=0)]


class Optim(Section):
    name: Literal["adamw"]
    lr: Annotated[float, Field(gt=0)]
    betas: tuple[Probability, Probability]
    eps: Annotated[float, Field(gt=0)]
    weight_decay: Annotated[float, Field(ge=0)]
    sched: Schedule

    def disagreements(self) -> Iterator[str]:
        if self.sched.min_lr > self.lr:
            yield f"optim.sched.min_lr: {self.sched.min_lr} is above optim.lr={self.lr}; use at most that"


class Trainer(Section):
    max_steps: Count
    val_check_interval: Count
    limit_val_batches: Annotated[int, Field(ge=0)]
    log_every_n_steps: Count
    gradient_clip_val: Annotated[float, Field(gt=0)] | None  # None: never clipped
    precision: Precision
    num_threads: Count | None  # None: cores divided by the ranks of a node
    enable_progress_bar: bool
    recompute: Literal["none", "selective", "full"]


class Parallelism(Section):
    strategy: Literal["ddp", "fsdp"]
    tensor_model_parallel_size: Count
    pipeline_model_parallel_size: Count
    context_parallel_size: Count
    sequence_parallel: bool
    kv_replicator: Count


class Hardware(Section):
    name: str
    accelerator: Accelerator
    num_nodes: Count
    devices: Count
    device_memory_gib: Annotated[float, Field(gt=0)]
    peak_tflops: Annotated[float, Field(gt=0)] | None  # None: unknown
    machine: str | None  # None: this machine
    accelerator_type: str | None  # None: Vertex AI has no such accelerator, or none is there
    cpus: Count | None  # None: as many as the scheduler gives
    lnc: Literal[1, 2] | None  # None: no Trainium, or one without the choice
    env: dict[str, str]
    network_env: dict[str, str]

    @property
    def rank_env(self) -> dict[str, str]:
        """Variables that every rank gets because of the machine; one that meets no other needs no network's."""
        return {**self.env, **(self.network_env if self.num_nodes > 1 else {})}

    @property
    def neuron_generation(self) -> Literal["trn1", "trn2"]:
        """Whose rules of sharding hold; hardware that is no Trainium counts as the first."""
        return "trn2" if (self.machine or "").startswith("trn2") else "trn1"


# Keys of paths, or of what may be one. An interpreter may be a bare name, so it is none of them.
_DATA_PATHS = ("train_path", "val_path", "train_source", "val_source", "cache_dir", "index_mapping_dir")
_BACKEND_PATHS = ("nxdt_dir", "model_dir", "pretrained_dir", "compiler_cache_url", "data_cache_dir")


class RunConfig(Section):
    """One run, as composed. Field names are the keys of conf/, where each is commented."""

    name: Name
    run_id: Name | None  # None: a new run
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    dry_run: bool
    code: CodeMode
    allow: tuple[str, ...]
    on_failure: Literal["continue", "stop"]
    max_jobs: Count | None  # None: no limit
    stages: Annotated[tuple[str, ...], Field(min_length=1)] | None  # None: all
    stages_from: str | None  # None: the first
    site: Site
    data: Data
    optim: Optim
    trainer: Trainer
    parallelism: Parallelism
    exp_manager: ExpManager
    launcher: Launcher
    backend: Backend
    model: Model
    hardware: Hardware

    def disagreements(self) -> Iterator[str]:
        if self.stages is not None and self.stages_from is not None:
            yield f"stages_from: {self.stages_from} with stages={list(self.stages)}; give one of the two"
        yield from self._contradict_exp_manager()
        manager = self.exp_manager
        for key, path in (("exp_dir", manager.exp_dir), ("explicit_log_dir", manager.explicit_log_dir)):
            if path is not None and "://" in path:
                yield (
                    f"exp_manager.{key}: {path} is a URL, and nodes see buckets as folders; "
                    f"use launcher=vertex and write /gcs/{path.partition('://')[2]}"
                )
        if self.launcher.kind == "slurm" and len(self.exp_manager.exp_dir.splitlines()) > 1:
            yield f"exp_manager.exp_dir: {self.exp_manager.exp_dir!r} has a line break, which no batch script can hold"
        longest = self.model.max_position_embeddings
        if self.data.seq_length > longest:
            yield (
                f"data.seq_length: {self.data.seq_length} is more than model.max_position_embeddings={longest}; "
                "lower the one or raise the other"
            )

    def _contradict_exp_manager(self) -> Iterator[str]:
        manager = self.exp_manager
        for key, fixed in (("version", manager.version), ("explicit_log_dir", manager.explicit_log_dir)):
            if self.run_id is not None and fixed is not None and Path(fixed).name != self.run_id:
                yield f"exp_manager.{key}: {fixed} with run_id={self.run_id}; give one of the two"
        stopping = manager.early_stopping_callback_params
        never_validates = self.trainer.limit_val_batches == 0
        if manager.create_early_stopping_callback and stopping.strict and never_validates:
            yield (
                f"exp_manager.create_early_stopping_callback: true, but with trainer.limit_val_batches=0 "
                f"{stopping.monitor} is never looked at; validate, or set "
                "exp_manager.early_stopping_callback_params.strict=false"
            )

    @classmethod
    def from_hydra(cls, config: DictConfig) -> "RunConfig":
        """Parse a composed config; the `hydra` node, if there, is left out.

        Raises UserError with every problem found: unknown keys, wrong types, impossible values, broken references.
        """
        tree = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        container, problems = _resolve(tree)
        return cls._parse(container, problems)

    @classmethod
    def from_dict(cls, tree: Mapping[Any, Any]) -> "RunConfig":
        """Parse a plain tree, such as the `config` of a run's record. Raises UserError as `from_hydra` does."""
        return cls._parse(tree, {})

    @classmethod
    def _parse(cls, tree: Mapping[Any, Any], unresolved: Mapping[str, str]) -> "RunConfig":
        """Parse `tree`; what could not be resolved is reported beside the other problems, by key."""
        problems = [f"{key}: {reason}" for key, reason in unresolved.items()]
        try:
            config = cls.model_validate_json(json.dumps(tree))
        except ValidationError as error:
            problems += [line for line in explain(error, tree, cls) if line.split(":")[0] not in unresolved]
        if problems:
            raise UserError("\n".join(problems))
        return config

    def with_absolute_paths(self, base: Path) -> "RunConfig":
        """Return the same config with its paths made absolute, so that a record means the same from everywhere."""
        data, manager, source = self.data, self.exp_manager, self.model.source

        def absolute(path: str) -> str:
            is_url = "://" in path
            return path if is_url or path.startswith("<site.") else os.path.normpath(base / path)

        # A text's bare name may be one that is shipped, and a site that is unset stays recognisable. NAME/NAME is a
        # model of the hub: a directory beside the command is ./NAME/NAME.
        is_path = data.text is not None and ("/" in data.text or (base / data.text).is_file())
        prefix = data.data_prefix and tuple(
            absolute(part) if isinstance(part, str) else part for part in data.data_prefix
        )
        return self.model_copy(
            update={
                "data": data.model_copy(
                    update={
                        "text": absolute(data.text) if data.text is not None and is_path else data.text,
                        "data_prefix": prefix,
                        "tokenizer": data.tokenizer.with_absolute_path(base),
                        **{
                            key: path and absolute(path)
                            for key, path in data.model_dump().items()
                            if key in _DATA_PATHS
                        },
                    }
                ),
                "model": self.model.model_copy(
                    update={"source": absolute(source) if source is not None and source[:1] in "./" else source}
                ),
                "backend": self.backend.model_copy(
                    update={
                        key: path and absolute(path)
                        for key, path in self.backend.model_dump().items()
                        if key in _BACKEND_PATHS
                    }
                ),
                "exp_manager": manager.model_copy(
                    update={
                        "files_to_copy": manager.files_to_copy and tuple(map(absolute, manager.files_to_copy)),
                        "mlflow_logger_kwargs": manager.mlflow_logger_kwargs.model_copy(
                            update={"save_dir": absolute(manager.mlflow_logger_kwargs.save_dir)}
                        ),
                        **{
                            key: path and absolute(path)
                            for key, path in manager.model_dump().items()
                            if key in ("exp_dir", "dry_run_dir", "explicit_log_dir", "resume_from_checkpoint")
                        },
                    }
                ),
            }
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the plain tree that `from_dict` parses back to an equal RunConfig."""
        tree: dict[str, Any] = self.model_dump(mode="json")
        return tree


def _resolve(tree: DictConfig) -> tuple[dict[Any, Any], dict[str, str]]:
    """Return `tree` as a plain container, and why by key for each value whose references lead nowhere."""
    try:
        return cast(dict[Any, Any], OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)), {}
    except OmegaConfBaseException:  # stops at the first problem: look at each value alone
        plain = cast(dict[Any, Any], OmegaConf.to_container(tree, resolve=False))
        problems: dict[str, str] = {}
        _resolve_below(tree, plain, "", problems)
        return plain, problems


def _resolve_below(root: DictConfig, node: Any, prefix: str, problems: dict[str, str]) -> None:
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        path = f"{prefix}{key}"
        if isinstance(value, (dict, list)):
            _resolve_below(root, value, f"{path}.", problems)
            continue
        try:
            node[key] = OmegaConf.select(root, path, throw_on_missing=True)
        except OmegaConfBaseException as error:
            problems[path] = f"{value!r} cannot be worked out: {str(error.msg or error).splitlines()[0]}"


def register_resolvers() -> None:
    """Register NeMo's resolvers `multiply` and `sum`, so that its configs mean the same here."""
    OmegaConf.register_new_resolver("multiply", lambda a, b: a * b, replace=True)
    OmegaConf.register_new_resolver("sum", lambda a, b: a + b, replace=True)
