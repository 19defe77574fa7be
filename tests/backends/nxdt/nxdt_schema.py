"""What NxDT 2.26 accepts, written from its sources: which keys, of which types, and what it asserts while it runs.

Stricter than NxDT in one thing: where it tolerates unknown keys, only those that it reads are known here.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import yaml
from omegaconf import OmegaConf

Types = tuple[type, ...]
NONE = type(None)
NUMBER: Types = (int, float)

# NLPTrainer.__init__ takes the section as keyword arguments: an unknown one is a TypeError.
TRAINER: Mapping[str, Types] = {
    "devices": (int,), "num_nodes": (int,), "max_epochs": (int, NONE), "max_steps": (int,), "min_steps": (int, NONE),
    "log_every_n_steps": (int,), "val_check_interval": (int, float), "check_val_every_n_epoch": (int, NONE),
    "num_sanity_val_steps": (int,), "limit_val_batches": NUMBER, "limit_test_batches": NUMBER,
    "limit_train_batches": (int, float, NONE), "gradient_clip_val": (int, float, NONE), "lnc": (int, NONE),
    "enable_progress_bar": (bool,), "sequential_move_factor": (int, NONE), "max_time": (str, NONE),
}  # fmt: skip
TRAINER_MANDATORY = ("devices", "num_nodes", "max_steps")

# NeMo 2.1.0's ExpManagerConfig and NxDT's fields: a structured merge, so unknown keys and wrong types raise.
EXP_MANAGER: Mapping[str, Types] = {
    "explicit_log_dir": (str, NONE), "exp_dir": (str, NONE), "name": (str, NONE), "version": (str, NONE),
    "use_datetime_version": (bool,), "resume_if_exists": (bool,), "resume_past_end": (bool,),
    "resume_ignore_no_checkpoint": (bool,), "resume_from_checkpoint": (str, NONE),
    "create_tensorboard_logger": (bool,), "summary_writer_kwargs": (dict, NONE), "create_wandb_logger": (bool,),
    "wandb_logger_kwargs": (dict, NONE), "create_mlflow_logger": (bool,), "mlflow_logger_kwargs": (dict, NONE),
    "create_dllogger_logger": (bool,), "create_clearml_logger": (bool,), "create_neptune_logger": (bool,),
    "create_checkpoint_callback": (bool,), "checkpoint_callback_params": (dict,),
    "create_early_stopping_callback": (bool,), "create_preemption_callback": (bool,), "files_to_copy": (list, NONE),
    "log_step_timing": (bool,), "log_delta_step_timing": (bool,), "step_timing_kwargs": (dict, NONE),
    "log_local_rank_0_only": (bool,), "log_global_rank_0_only": (bool,), "disable_validation_on_resume": (bool,),
    "max_time_per_run": (str, NONE), "seconds_to_sleep": NUMBER, "create_straggler_detection_callback": (bool,),
    "create_fault_tolerance_callback": (bool,), "log_tflops_per_sec_per_gpu": (bool,),
    "log_parameter_norm": (bool,), "log_gradient_norm": (bool,), "enable_recovery_time_instrumentation": (bool,),
    "save_xser": (bool,), "load_xser": (bool,), "save_bf16": (bool,), "async_checkpointing": (bool,),
    "ckpt_ptl_version": (str, NONE),
}  # fmt: skip
EXP_MANAGER_MANDATORY = ("explicit_log_dir", "resume_from_checkpoint", "checkpoint_callback_params")
CALLBACK: Mapping[str, Types] = {
    "filepath": (str, NONE), "dirpath": (str, NONE), "filename": (str, NONE), "monitor": (str,), "verbose": (bool,),
    "save_last": (bool,), "save_top_k": (int,), "save_weights_only": (bool,), "mode": (str,),
    "auto_insert_metric_name": (bool,), "every_n_epochs": (int,), "every_n_train_steps": (int, NONE),
    "train_time_interval": (int, NONE), "prefix": (str, NONE), "postfix": (str,), "save_best_model": (bool,),
    "always_save_nemo": (bool,), "save_nemo_on_train_end": (bool,), "model_parallel_size": (int, NONE),
    "save_on_train_epoch_end": (bool,), "async_save": (bool,), "save_last_n_optim_states": (int,),
    "use_master_weights_in_ckpt": (bool,), "enable_version_counter": (bool,),
}  # fmt: skip
STEP_TIMING: Mapping[str, Types] = {"reduction": (str,), "sync_cuda": (bool,), "buffer_size": (int,)}
MLFLOW: Mapping[str, Types] = {
    "experiment_name": (str, NONE), "run_name": (str, NONE), "tracking_uri": (str, NONE), "tags": (dict, NONE),
    "save_dir": (str, NONE), "prefix": (str,), "artifact_location": (str, NONE), "run_id": (str, NONE),
    "log_model": (bool,),
}  # fmt: skip

STRATEGY: Mapping[str, Types] = {
    "tensor_model_parallel_size": (int,), "pipeline_model_parallel_size": (int,),
    "virtual_pipeline_model_parallel_size": (int, NONE), "zero1": (bool,), "sequence_parallel": (bool,),
    "kv_replicator": (int,), "context_parallel_size": (int,), "expert_model_parallel_size": (int,),
}  # fmt: skip
DATA: Mapping[str, Types] = {
    "micro_batch_size": (int,), "global_batch_size": (int,), "train_dir": (str, NONE), "val_dir": (str, NONE),
    "dev_choose_samples": (int, NONE), "seq_length": (int,), "tokenizer": (dict,),
}  # fmt: skip
MODEL: Mapping[str, Types] = {
    "micro_batch_size": (int,), "global_batch_size": (int,), "model_config": (str,), "encoder_seq_length": (int,),
    "max_position_embeddings": (int,), "num_layers": (int,), "hidden_size": (int,), "rope_theta": (float,),
    "qkv_linear": (bool,), "fuse_qkv": (bool,), "transpose_nki_inputs": (bool,), "use_cpu_initialization": (bool,),
    "weight_init_only": (bool,), "activations_checkpoint_granularity": (str, NONE),
    "activations_checkpoint_recompute": (list, NONE), "fusions": (dict,), "do_layer_norm_weight_decay": (bool,),
    "optim": (dict,), "wrap_with_zero": (bool,),
}  # fmt: skip
MODEL_MANDATORY = ("model_config", "encoder_seq_length", "fusions", "optim")
OPTIM: Mapping[str, Types] = {
    "name": (str,), "lr": (float,), "weight_decay": (float,), "capturable": (bool,), "betas": (list,), "eps": (float,),
    "sched": (dict,),
}  # fmt: skip
SCHED: Mapping[str, Types] = {"name": (str,), "warmup_steps": (int,), "max_steps": (int,), "min_lr": (float,)}
PRECISION: Mapping[str, Types] = {
    "type": (str,), "master_weights": (bool,), "fp32_grad_acc": (bool,), "xla_use_bf16": (str,),
    "xla_downcast_bf16": (str,), "neuron_rt_stochastic_rounding_en": (str,), "parallel_layers_reduce_dtype": (str,),
}  # fmt: skip
TOP: Mapping[str, Types] = {
    "name": (str,), "model_source": (str,), "seed": (int,), "trainer": (dict,), "exp_manager": (dict,),
    "distributed_strategy": (dict,), "data": (dict,), "model": (dict,), "model_alignment_strategy": (dict,),
    "precision": (dict,), "compiler_flags": (str,), "compiler_cache_url": (str,),
    "aync_exec_max_inflight_requests": (int,), "bucket_size_collectives": (int,), "neuron_rt_exec_timeout": (int,),
    "neuron_experimental_compress_rg": (bool,), "wrap_with_zero": (bool,),
}  # fmt: skip
TOP_MANDATORY = tuple(key for key in TOP if key not in ("seed", "wrap_with_zero"))

DEVICES = (1, 2, 8, 32, 64, 128)
PRECISION_TYPES = ("bf16SR", "fp32", "autocast", "mixed_precision", "mixed_precision_SR", "manual")
SCHEDULES = {"LinearAnnealingWithWarmUp": False, "CosineAnnealing": True, "WarmupPolicy": True}  # takes min_lr?
RECOMPUTED = ("CoreAttention", "LlamaDecoderLayer", "LlamaMLP", "LlamaRMSNorm", "ActivationMultiplyMLP")
# get_attribute_from_cfg looks for these in the whole tree: (where they may stand, None: nowhere).
SEARCHED: Mapping[str, str | None] = {
    "dpo": None, "orpo": None, "peft": None, "ring_attention": None, "lora_rank": None, "lora_alpha": None,
    "target_modules": None, "max_prompt_length": None, "context_parallel_size": "distributed_strategy",
    "hidden_size": "model", "seq_length": "data", "model_alignment_strategy": "", "sft": "model_alignment_strategy",
}  # fmt: skip


def problems_of_text(text: str) -> list[str]:
    """Return what is wrong with a file: as text, as its reader OmegaConf sees it, and as a tree."""
    lines = [line for line in text.splitlines() if "devices:" in line]
    found = (
        [] if len(lines) == 1 and re.fullmatch(r"  devices: \d+", lines[0]) else [f"train.sh greps devices: {lines}"]
    )
    tree = yaml.safe_load(text)
    if OmegaConf.to_container(OmegaConf.create(text), resolve=False) != tree:
        found.append("OmegaConf reads other values than YAML")
    return found + list(problems(tree))


def problems(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield each reason why NxDT would not take a tree, or would fail at it later."""
    wrong = list(_shape(tree))
    yield from wrong
    if not wrong:
        yield from _meaning(tree)


def _shape(tree: Mapping[str, Any]) -> Iterator[str]:
    sections: list[tuple[str, Any, Mapping[str, Types], tuple[str, ...]]] = [
        ("", tree, TOP, TOP_MANDATORY),
        ("trainer", tree.get("trainer"), TRAINER, TRAINER_MANDATORY),
        ("exp_manager", tree.get("exp_manager"), EXP_MANAGER, EXP_MANAGER_MANDATORY),
        ("distributed_strategy", tree.get("distributed_strategy"), STRATEGY, tuple(STRATEGY)[:2]),
        ("data", tree.get("data"), DATA, tuple(DATA)),
        ("model", tree.get("model"), MODEL, MODEL_MANDATORY),
        ("precision", tree.get("precision"), PRECISION, ("type",)),
    ]
    manager, model = tree.get("exp_manager") or {}, tree.get("model") or {}
    optim = model.get("optim") or {}
    sections += [
        ("exp_manager.checkpoint_callback_params", manager.get("checkpoint_callback_params"), CALLBACK, ()),
        ("exp_manager.step_timing_kwargs", manager.get("step_timing_kwargs"), STEP_TIMING, ()),
        ("exp_manager.mlflow_logger_kwargs", manager.get("mlflow_logger_kwargs"), MLFLOW, ()),
        ("model.fusions", model.get("fusions"), {"softmax": (bool,), "flash_attention": (bool,)}, ("flash_attention",)),
        ("model.optim", optim, OPTIM, ("name", "lr", "betas", "weight_decay")),
        ("model.optim.sched", optim.get("sched"), SCHED, ("name", "warmup_steps")),
        ("data.tokenizer", (tree.get("data") or {}).get("tokenizer"), {"type": (str,)}, ("type",)),
    ]
    for name, section, known, mandatory in sections:
        if section is None:
            continue
        for key, value in section.items():
            if key not in known:
                yield f"{name}.{key}: unknown"
            elif type(value) not in known[key]:
                yield f"{name}.{key}: {value!r} is {type(value).__name__}"
        yield from (f"{name}.{key}: missing" for key in mandatory if key not in section)
    if set(tree.get("model_alignment_strategy") or {}) != {"sft"}:
        yield "model_alignment_strategy: one of sft, dpo, orpo"


def _meaning(tree: Mapping[str, Any]) -> Iterator[str]:
    trainer, data, model, sizes = tree["trainer"], tree["data"], tree["model"], tree["distributed_strategy"]
    for path, value in leaves(tree):
        if isinstance(value, str) and ("${" in value or value == "???"):
            yield f"{path}: {value} is left to be worked out"
    for path, _ in nodes(tree):
        where, _, key = path.rpartition(".")
        if key in SEARCHED and SEARCHED[key] != where:
            yield f"{path}: NxDT finds this key wherever it stands"
    if tree["model_source"] not in ("hf", "megatron") or "mixtral" in tree["name"]:
        yield "model_source, name: another architecture"
    if tree.get("seed", 1234) <= 0:
        yield "seed: must be above 0"
    if trainer["devices"] not in DEVICES:
        yield f"trainer.devices: {trainer['devices']}"
    if data["seq_length"] != model["encoder_seq_length"]:
        yield f"model.encoder_seq_length: {model['encoder_seq_length']}, but batches have {data['seq_length']}"
    yield from (
        f"data.{key}: no jsonl" for key in ("train_dir", "val_dir") if not data[key].endswith((".jsonl", ".json"))
    )
    parts = sizes["tensor_model_parallel_size"] * sizes["pipeline_model_parallel_size"]
    world = trainer["devices"] * trainer["num_nodes"]
    if world % parts or data["global_batch_size"] % (data["micro_batch_size"] * max(1, world // parts)):
        yield "data: samples would be dropped silently"
    if sizes["sequence_parallel"] and data["seq_length"] % sizes["tensor_model_parallel_size"]:
        yield "distributed_strategy.sequence_parallel: the sequence does not divide"
    if sizes.get("zero1", True) and world > parts and not (tree.get("wrap_with_zero") and model.get("wrap_with_zero")):
        yield "wrap_with_zero: optimizer state would be saved as if it were replicated"
    yield from _precision(tree)
    yield from _optimizer(model["optim"])
    yield from _saving(tree)
    granularity, named = model.get("activations_checkpoint_granularity"), model.get("activations_checkpoint_recompute")
    if granularity not in (None, "selective", "full"):
        yield f"model.activations_checkpoint_granularity: {granularity}"
    if granularity == "selective" and not (named and set(named) <= set(RECOMPUTED)):
        yield f"model.activations_checkpoint_recompute: {named}"


def _precision(tree: Mapping[str, Any]) -> Iterator[str]:
    precision, optimizer = tree["precision"], tree["model"]["optim"]["name"]
    kind = precision["type"]
    if kind not in PRECISION_TYPES:
        yield f"precision.type: {kind}"
    if kind == "mixed_precision_SR":
        yield "precision.type: no fp32 master weights"
    if kind == "manual":
        needed = ("master_weights", "fp32_grad_acc", "xla_downcast_bf16", "neuron_rt_stochastic_rounding_en")
        yield from (
            f"precision.{key}: type manual needs it" for key in (*needed, "xla_use_bf16") if key not in precision
        )
    is_downcast = kind == "mixed_precision" or (kind == "manual" and precision.get("xla_downcast_bf16") == "1")
    if optimizer == "adamw_fp32OptState" and not is_downcast:
        yield "model.optim.name: versions before 2.29 start only with XLA_DOWNCAST_BF16=1"


def _optimizer(optim: Mapping[str, Any]) -> Iterator[str]:
    if optim["name"] not in ("adamw", "adamw_fp32OptState"):
        yield f"model.optim.name: {optim['name']}"
    sched = optim.get("sched")
    if sched is not None and sched["name"] not in SCHEDULES:
        yield f"model.optim.sched.name: {sched['name']}"
    elif sched is not None and "min_lr" in sched and not SCHEDULES[sched["name"]]:
        yield "model.optim.sched.min_lr: an unexpected argument"


def _saving(tree: Mapping[str, Any]) -> Iterator[str]:
    manager = tree["exp_manager"]
    callback = manager["checkpoint_callback_params"]
    if manager.get("log_local_rank_0_only") and manager.get("log_global_rank_0_only"):
        yield "exp_manager.log_local_rank_0_only: with log_global_rank_0_only"
    triggers = [
        callback.get("every_n_train_steps"),
        callback.get("every_n_epochs"),
        callback.get("train_time_interval"),
    ]
    if sum(1 for trigger in triggers if trigger) > 1:
        yield "exp_manager.checkpoint_callback_params: Lightning takes one of its triggers"
    if not any(triggers):
        yield "exp_manager.checkpoint_callback_params: nothing is ever saved"
    filename = re.sub(r"\{(\w+)[^}]*\}", r"\1=1", callback["filename"])
    folders = [manager.get(key) or "" for key in ("exp_dir", "name", "version")]
    place = PurePath(*folders, "checkpoints", filename)
    if "-v" in str(place):
        yield f"exp_manager: {place} would be cut at -v"
    if not manager.get("version"):
        yield "exp_manager.version: a job of another id would not resume"
    if (manager["resume_from_checkpoint"] or "").endswith("/"):
        yield "exp_manager.resume_from_checkpoint: the name behind the last slash is the checkpoint's"
    if bool(manager["resume_from_checkpoint"]) != bool(tree["model"].get("weight_init_only")):
        yield "model.weight_init_only: a resume would lose optimizer and schedule, or a start look for them"


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of each leaf; a list is one."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}" if path else key)
    else:
        yield path, tree


def nodes(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of each key, sections too."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            here = f"{path}.{key}" if path else key
            yield here, value
            yield from nodes(value, here)
