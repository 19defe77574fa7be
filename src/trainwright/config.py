"""RunConfig: what a composed run means, parsed once and strictly from Hydra's resolved tree.

Values follow JSON semantics: lists become tuples, whole numbers become floats where a float is due, nothing else is
coerced ("yes" is no bool). All problems are reported at once, each with its key, its value and what would be right.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from typing_extensions import Self

from trainwright.config_problems import explain
from trainwright.errors import UserError

Architecture = Literal["gpt2", "llama", "bert"]
BackendKind = Literal["native", "nemo", "nxdt"]
LauncherKind = Literal["local", "slurm", "vertex"]
Accelerator = Literal["cpu", "gpu", "neuron"]
Precision = Literal["32-true", "bf16-mixed", "16-mixed", "bf16-true"]

_CLOCK = re.compile(r"(?:(?P<d>\d+)[-:](?=\d+:\d+:\d+$))?(?P<h>\d+):(?P<m>[0-5]?\d):(?P<s>[0-5]?\d)")
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


def parse_duration(value: object) -> object:
    """Return seconds for a whole number, `HH:MM:SS`, `D-HH:MM:SS` or `DD:HH:MM:SS`; raise ValueError otherwise."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _CLOCK.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("write seconds, HH:MM:SS, D-HH:MM:SS or DD:HH:MM:SS")
    days, hours, minutes, seconds = (int(part or 0) for part in match.group("d", "h", "m", "s"))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


Duration = Annotated[int, Field(gt=0), BeforeValidator(parse_duration)]
Probability = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(pattern=NAME_PATTERN)]  # becomes a folder and part of a job name
# A template's keys are filled in when a checkpoint is written; anything else in braces is a mistake.
CHECKPOINT_NAME_KEYS = ("name", "step", "consumed_samples", "val_loss", "train_loss", "epoch")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def disagreements(self) -> Iterator[str]:
        """Yield what no single field shows: values that contradict each other whatever the hardware."""
        return iter(())

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        problems = tuple(self.disagreements())
        if problems:
            raise ValueError("\n".join(problems))
        return self


class SlurmSite(_Section):
    shared_dir: str
    partition: str | None
    account: str | None


class VertexSite(_Section):
    project: str
    location: str
    bucket: str


class Site(_Section):
    slurm: SlurmSite
    vertex: VertexSite


class Model(_Section):
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

    def disagreements(self) -> Iterator[str]:
        heads, groups = self.num_attention_heads, self.num_query_groups
        if self.hidden_size % heads:
            yield f"model.num_attention_heads: {heads} does not divide hidden_size={self.hidden_size}; use a divisor"
        if heads % (groups or heads):
            yield f"model.num_query_groups: {groups} does not divide num_attention_heads={heads}; use a divisor"
        if self.architecture == "llama" and self.rope_theta is None:
            yield "model.rope_theta: null, but llama has rotary positions; use a number such as 10000.0"


class Tokenizer(_Section):
    type: Literal["gpt2_bpe", "bert_wordpiece", "huggingface"]
    name: str | None  # None: the type says it all
    vocab_size: Count


class Data(_Section):
    name: Name
    kind: Literal["gpt", "sft", "bert"]
    text: str | None  # None: not made from a text
    data_prefix: tuple[float | str, ...] | None  # None: made from `text`
    splits_string: Annotated[str, Field(pattern=r"^\s*\d+(\.\d+)?(\s*,\s*\d+(\.\d+)?){0,2}\s*$")]
    train_path: str | None  # None: not sft
    val_path: str | None  # None: not sft
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


class Schedule(_Section):
    name: Literal["CosineAnnealing", "LinearAnnealingWithWarmUp", "constant"]
    warmup_steps: Annotated[int, Field(ge=0)]
    min_lr: Annotated[float, Field(ge=0)]


class Optim(_Section):
    name: Literal["adamw"]
    lr: Annotated[float, Field(gt=0)]
    betas: tuple[Probability, Probability]
    eps: Annotated[float, Field(gt=0)]
    weight_decay: Annotated[float, Field(ge=0)]
    sched: Schedule

    def disagreements(self) -> Iterator[str]:
        if self.sched.min_lr > self.lr:
            yield f"optim.sched.min_lr: {self.sched.min_lr} is above optim.lr={self.lr}; use at most that"


class Trainer(_Section):
    max_steps: Count
    val_check_interval: Count
    limit_val_batches: Annotated[int, Field(ge=0)]
    log_every_n_steps: Count
    gradient_clip_val: Annotated[float, Field(gt=0)] | None  # None: never clipped
    precision: Precision
    num_threads: Count | None  # None: cores divided by the ranks of a node
    enable_progress_bar: bool
    recompute: Literal["none", "full"]


class Parallelism(_Section):
    strategy: Literal["ddp", "fsdp"]
    tensor_model_parallel_size: Count
    pipeline_model_parallel_size: Count
    context_parallel_size: Count
    sequence_parallel: bool
    kv_replicator: Count


class CheckpointCallbackParams(_Section):
    monitor: Literal["val_loss", "train_loss", "step"]
    mode: Literal["min", "max"]
    save_top_k: Annotated[int, Field(ge=-1)]
    save_last: bool
    every_n_train_steps: Count | None  # None: after each validation
    filename: str

    @field_validator("filename")
    @classmethod
    def _known_template_keys(cls, value: str) -> str:
        unknown = [key for key in re.findall(r"\{([^}:]*)", value) if key not in CHECKPOINT_NAME_KEYS]
        if unknown:
            raise ValueError(f"{{{unknown[0]}}} is not known; use {', '.join(CHECKPOINT_NAME_KEYS)}")
        if "{step}" not in value or "/" in value:
            raise ValueError("a name must hold {step}, which keeps it unique, and no /")
        return value


class ExpManager(_Section):
    exp_dir: Annotated[str, Field(min_length=1)]
    dry_run_dir: Annotated[str, Field(min_length=1)]
    resume_if_exists: bool
    resume_ignore_no_checkpoint: bool
    create_tensorboard_logger: bool
    create_checkpoint_callback: bool
    checkpoint_callback_params: CheckpointCallbackParams
    log_step_timing: bool


class Backend(_Section):
    kind: BackendKind


class _Launcher(_Section):
    grace_s: Annotated[float, Field(gt=0)]
    env: dict[str, str]


class LocalLauncher(_Launcher):
    kind: Literal["local"]
    python: str | None  # None: the interpreter of the command
    max_parallel: Count


class SlurmLauncher(_Launcher):
    kind: Literal["slurm"]
    python: str
    partition: str | None  # None: the cluster's default
    account: str | None  # None: the user's default
    time: Duration
    wait: bool


class VertexLauncher(_Launcher):
    kind: Literal["vertex"]
    python: str
    project: str
    location: str
    time: Duration
    wait: bool


Launcher = Annotated[LocalLauncher | SlurmLauncher | VertexLauncher, Field(discriminator="kind")]


class Hardware(_Section):
    name: str
    accelerator: Accelerator
    num_nodes: Count
    devices: Count
    device_memory_gib: Annotated[float, Field(gt=0)]
    peak_tflops: Annotated[float, Field(gt=0)] | None  # None: unknown
    machine: str | None  # None: this machine


class RunConfig(_Section):
    """One run, as composed. Field names are the keys of conf/, where each is commented."""

    name: Name
    run_id: Name | None  # None: a new run
    seed: Annotated[int, Field(ge=0, lt=2**32)]
    dry_run: bool
    allow: tuple[str, ...]
    on_failure: Literal["continue", "stop"]
    max_jobs: Count | None  # None: no limit
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
        longest = self.model.max_position_embeddings
        if self.data.seq_length > longest:
            yield (
                f"data.seq_length: {self.data.seq_length} is more than model.max_position_embeddings={longest}; "
                "lower the one or raise the other"
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
        data, manager = self.data, self.exp_manager

        def absolute(path: str) -> str:
            return path if path.startswith("<site.") else os.path.normpath(base / path)

        # A text's bare name may be one that is shipped, and a site that is unset stays recognisable.
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
                        **{
                            key: path and absolute(path)
                            for key, path in data.model_dump().items()
                            if key in ("train_path", "val_path", "cache_dir", "index_mapping_dir")
                        },
                    }
                ),
                "exp_manager": manager.model_copy(
                    update={"exp_dir": absolute(manager.exp_dir), "dry_run_dir": absolute(manager.dry_run_dir)}
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
