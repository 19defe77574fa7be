"""What NeMo 1.23's GPT script accepts, written from its sources: which keys, of which types, and what it asserts later.

Stricter than NeMo in one thing: where it tolerates unknown keys, only those that it reads, or that NVIDIA's own files
have, are known here.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from omegaconf import OmegaConf

Types = tuple[type, ...]
NONE = type(None)
TEXT: Types = (str, NONE)
COUNT: Types = (int, NONE)
BOOL: Types = (bool,)

# pytorch_lightning 2.0.7, Trainer.__init__: MegatronTrainerBuilder hands the section over as keyword arguments, beside
# plugins, strategy and callbacks. An unknown one is a TypeError.
TRAINER: Mapping[str, Types] = {
    "accelerator": (str,), "devices": (str, int), "num_nodes": (int,), "precision": (str, int), "logger": BOOL,
    "fast_dev_run": (int, bool), "max_epochs": COUNT, "min_epochs": COUNT, "max_steps": (int,), "min_steps": COUNT,
    "max_time": TEXT, "limit_train_batches": (int, float, NONE), "limit_val_batches": (int, float, NONE),
    "limit_test_batches": (int, float, NONE), "limit_predict_batches": (int, float, NONE),
    "overfit_batches": (int, float), "val_check_interval": (int, float, NONE), "check_val_every_n_epoch": COUNT,
    "num_sanity_val_steps": COUNT, "log_every_n_steps": COUNT, "enable_checkpointing": BOOL,
    "enable_progress_bar": BOOL, "enable_model_summary": BOOL, "accumulate_grad_batches": (int,),
    "gradient_clip_val": (int, float, NONE), "gradient_clip_algorithm": TEXT, "deterministic": (bool, str, NONE),
    "benchmark": (bool, NONE), "inference_mode": BOOL, "use_distributed_sampler": BOOL, "profiler": TEXT,
    "detect_anomaly": BOOL, "barebones": BOOL, "sync_batchnorm": BOOL, "reload_dataloaders_every_n_epochs": (int,),
    "default_root_dir": TEXT,
}  # fmt: skip
TRAINER_MANDATORY = (
    "devices", "num_nodes", "precision", "max_steps", "val_check_interval", "limit_val_batches", "limit_test_batches",
)  # fmt: skip

# nemo/utils/exp_manager.py 1.23.0, merged onto a structured schema: an unknown key is a ConfigKeyError.
EXP_MANAGER: Mapping[str, Types] = {
    "explicit_log_dir": TEXT, "exp_dir": TEXT, "name": TEXT, "version": TEXT, "use_datetime_version": BOOL,
    "resume_if_exists": BOOL, "resume_past_end": BOOL, "resume_ignore_no_checkpoint": BOOL,
    "resume_from_checkpoint": TEXT, "create_tensorboard_logger": BOOL, "summary_writer_kwargs": (dict, NONE),
    "create_wandb_logger": BOOL, "wandb_logger_kwargs": (dict, NONE), "create_mlflow_logger": BOOL,
    "mlflow_logger_kwargs": (dict, NONE), "create_dllogger_logger": BOOL, "dllogger_logger_kwargs": (dict, NONE),
    "create_clearml_logger": BOOL, "clearml_logger_kwargs": (dict, NONE), "create_neptune_logger": BOOL,
    "neptune_logger_kwargs": (dict, NONE), "create_checkpoint_callback": BOOL, "checkpoint_callback_params": (dict,),
    "create_early_stopping_callback": BOOL, "early_stopping_callback_params": (dict, NONE),
    "create_preemption_callback": BOOL, "files_to_copy": (list, NONE), "log_step_timing": BOOL,
    "step_timing_kwargs": (dict, NONE), "log_local_rank_0_only": BOOL, "log_global_rank_0_only": BOOL,
    "disable_validation_on_resume": BOOL, "ema": (dict, NONE), "max_time_per_run": TEXT,
    "seconds_to_sleep": (int, float),
}  # fmt: skip
EXP_MANAGER_SINCE_2: Mapping[str, Types] = {
    "create_ipl_epoch_stopper_callback": BOOL, "ipl_epoch_stopper_callback_params": (dict, NONE),
    "log_delta_step_timing": BOOL, "log_tflops_per_sec_per_gpu": BOOL, "create_straggler_detection_callback": BOOL,
    "straggler_detection_params": (dict, NONE), "create_fault_tolerance_callback": BOOL,
    "fault_tolerance": (dict, NONE),
}  # fmt: skip
CALLBACK: Mapping[str, Types] = {
    "filepath": TEXT, "dirpath": TEXT, "filename": TEXT, "monitor": (str,), "verbose": BOOL, "save_last": BOOL,
    "save_top_k": (int,), "save_weights_only": BOOL, "mode": (str,), "auto_insert_metric_name": BOOL,
    "every_n_epochs": COUNT, "every_n_train_steps": COUNT, "train_time_interval": TEXT, "prefix": TEXT,
    "postfix": (str,), "save_best_model": BOOL, "always_save_nemo": BOOL, "save_nemo_on_train_end": BOOL,
    "model_parallel_size": COUNT, "save_on_train_epoch_end": BOOL,
}  # fmt: skip
CALLBACK_SINCE_2: Mapping[str, Types] = {"async_save": BOOL, "save_last_n_optim_states": (int,)}
STEP_TIMING: Mapping[str, Types] = {"reduction": (str,), "sync_cuda": BOOL, "buffer_size": (int,)}
EMA: Mapping[str, Types] = {
    "enable": BOOL, "decay": (float,), "cpu_offload": BOOL, "validate_original_weights": BOOL, "every_n_steps": (int,),
}  # fmt: skip

# megatron_gpt_model.py, megatron_base_model.py and NVIDIA's megatron_gpt_config.yaml.
MODEL: Mapping[str, Types] = {
    "micro_batch_size": (int,), "global_batch_size": (int,), "rampup_batch_size": (list, NONE),
    "tensor_model_parallel_size": (int,), "pipeline_model_parallel_size": (int,), "context_parallel_size": (int,),
    "virtual_pipeline_model_parallel_size": COUNT, "resume_from_checkpoint": TEXT, "encoder_seq_length": (int,),
    "max_position_embeddings": (int,), "num_layers": (int,), "hidden_size": (int,), "ffn_hidden_size": (int,),
    "num_attention_heads": (int,), "init_method_std": (float,), "hidden_dropout": (float,),
    "attention_dropout": (float,), "kv_channels": COUNT, "apply_query_key_layer_scaling": BOOL,
    "layernorm_epsilon": (float,), "make_vocab_size_divisible_by": (int,), "pre_process": BOOL, "post_process": BOOL,
    "persist_layer_norm": BOOL, "gradient_as_bucket_view": BOOL, "grad_div_ar_fusion": BOOL,
    "gradient_accumulation_fusion": BOOL, "bias_activation_fusion": BOOL, "bias_dropout_add_fusion": BOOL,
    "masked_softmax_fusion": BOOL, "activations_checkpoint_granularity": TEXT, "activations_checkpoint_method": TEXT,
    "activations_checkpoint_num_layers": COUNT, "num_micro_batches_with_partial_activation_checkpoints": COUNT,
    "activations_checkpoint_layers_per_pipeline": COUNT, "sequence_parallel": BOOL, "overlap_p2p_comm": BOOL,
    "batch_p2p_comm": BOOL, "num_query_groups": COUNT, "tokenizer": (dict,), "native_amp_init_scale": (int,),
    "native_amp_growth_interval": (int,), "hysteresis": (int,), "fp32_residual_connection": BOOL,
    "fp16_lm_cross_entropy": BOOL, "megatron_amp_O2": BOOL, "grad_allreduce_chunk_size_mb": (int,), "mcore_gpt": BOOL,
    "transformer_engine": BOOL, "fp8": BOOL, "fp8_e4m3": BOOL, "fp8_hybrid": BOOL, "fp8_margin": (int,),
    "fp8_interval": (int,), "fp8_amax_history_len": (int,), "fp8_amax_compute_algo": (str,), "fp8_wgrad": BOOL,
    "ub_tp_comm_overlap": BOOL, "seed": (int,), "sync_batch_comm": BOOL, "use_cpu_initialization": BOOL,
    "onnx_safe": BOOL, "apex_transformer_log_level": (int,), "nsys_profile": (dict,), "optim": (dict,),
    "data": (dict,), "share_embeddings_and_output_weights": BOOL,
}  # fmt: skip
MODEL_MANDATORY = (
    "micro_batch_size", "global_batch_size", "encoder_seq_length", "max_position_embeddings", "num_layers",
    "hidden_size", "ffn_hidden_size", "num_attention_heads", "tokenizer", "optim", "seed", "gradient_as_bucket_view",
    "activations_checkpoint_granularity", "activations_checkpoint_method", "activations_checkpoint_num_layers",
    "activations_checkpoint_layers_per_pipeline", "sequence_parallel", "data",
)  # fmt: skip
TOKENIZER: Mapping[str, Types] = {
    "library": (str,), "type": TEXT, "model": TEXT, "delimiter": TEXT, "vocab_file": TEXT, "merge_file": TEXT,
}  # fmt: skip
NSYS: Mapping[str, Types] = {
    "enabled": BOOL, "trace": (list,), "start_step": (int,), "end_step": (int,), "ranks": (list,), "gen_shape": BOOL,
}  # fmt: skip
DATA: Mapping[str, Types] = {
    "data_prefix": (list, dict), "exchange_indices_distributed": BOOL, "data_impl": (str,), "splits_string": (str,),
    "seq_length": (int,), "skip_warmup": BOOL, "num_workers": (int,), "dataloader_type": (str,),
    "reset_position_ids": BOOL, "reset_attention_mask": BOOL, "eod_mask_loss": BOOL, "index_mapping_dir": TEXT,
}  # fmt: skip
DATA_MANDATORY = ("data_prefix", "splits_string", "seq_length", "num_workers", "dataloader_type", "index_mapping_dir")
# apex's optimizers take the section as keyword arguments.
FUSED_ADAM: Mapping[str, Types] = {
    "name": (str,), "lr": (float,), "weight_decay": (float,), "betas": (list,), "eps": (float,), "sched": (dict,),
}  # fmt: skip
DISTRIBUTED: Mapping[str, Types] = {
    **FUSED_ADAM, "bucket_cap_mb": (int,), "overlap_grad_sync": BOOL, "overlap_param_sync": BOOL,
    "contiguous_grad_buffer": BOOL, "grad_sync_dtype": (str,),
}  # fmt: skip
# nemo/core/optim/lr_scheduler.py: arguments beyond name and warmup_steps.
SCHEDULES: Mapping[str, tuple[str, ...]] = {
    "CosineAnnealing": ("min_lr", "constant_steps"),
    "PolynomialDecayAnnealing": ("min_lr", "power", "cycle"),
    "WarmupPolicy": (),
}
TOP: Mapping[str, Types] = {
    "run": (dict,), "hydra": (dict,), "trainer": (dict,), "exp_manager": (dict,), "model": (dict,),
    "cluster_type": (str,),
}  # fmt: skip
PRECISIONS = {"1.23": (32, 16, "bf16"), "2.7": ("32-true", "16-mixed", "bf16-mixed")}


def problems_of_text(text: str, nemo: str = "1.23") -> list[str]:
    """Return what is wrong with a file: as its reader OmegaConf sees it, and as a tree."""
    tree = yaml.safe_load(text)
    found = []
    if OmegaConf.to_container(OmegaConf.create(text), resolve=False) != tree:
        found.append("OmegaConf reads other values than YAML")
    return found + list(problems(tree, nemo))


def problems(tree: Mapping[str, Any], nemo: str = "1.23") -> Iterator[str]:
    """Yield each reason why NeMo would not take a tree, or would fail at it later."""
    wrong = list(_shape(tree, nemo))
    yield from wrong
    if not wrong:
        yield from _meaning(tree, nemo)


def _shape(tree: Mapping[str, Any], nemo: str) -> Iterator[str]:
    manager, model = tree.get("exp_manager") or {}, tree.get("model") or {}
    optim = model.get("optim") or {}
    is_new = nemo != "1.23"
    sections: list[tuple[str, Any, Mapping[str, Types], tuple[str, ...]]] = [
        ("", tree, TOP, ("trainer", "exp_manager", "model")),
        ("trainer", tree.get("trainer"), TRAINER, TRAINER_MANDATORY),
        ("exp_manager", manager, {**EXP_MANAGER, **(EXP_MANAGER_SINCE_2 if is_new else {})}, ()),
        (
            "exp_manager.checkpoint_callback_params",
            manager.get("checkpoint_callback_params"),
            {**CALLBACK, **(CALLBACK_SINCE_2 if is_new else {})},
            (),
        ),
        ("exp_manager.step_timing_kwargs", manager.get("step_timing_kwargs"), STEP_TIMING, ()),
        ("exp_manager.ema", manager.get("ema"), EMA, ()),
        ("model", model, MODEL, MODEL_MANDATORY),
        ("model.tokenizer", model.get("tokenizer"), TOKENIZER, ("library", "type")),
        ("model.nsys_profile", model.get("nsys_profile"), NSYS, tuple(NSYS)),
        ("model.data", model.get("data"), DATA, DATA_MANDATORY),
        ("model.optim", optim, DISTRIBUTED if "distributed" in str(optim.get("name")) else FUSED_ADAM, ("name", "lr")),
    ]
    for name, section, known, mandatory in sections:
        for key, value in (section or {}).items():
            if key not in known:
                yield f"{name}.{key}: unknown"
            elif type(value) not in known[key]:
                yield f"{name}.{key}: {value!r} is {type(value).__name__}"
        yield from (f"{name}.{key}: missing" for key in mandatory if key not in (section or {}))


def _meaning(tree: Mapping[str, Any], nemo: str) -> Iterator[str]:
    trainer, model, data = tree["trainer"], tree["model"], tree["model"]["data"]
    for path, value in leaves(tree):
        if isinstance(value, str) and ("${" in value or value == "???"):
            yield f"{path}: {value} is left to be worked out"
    if tree.get("hydra") != {"run": {"dir": "."}, "output_subdir": None}:
        yield "hydra: NeMo's exp_manager refuses another working directory"
    if trainer.get("logger", True) or trainer.get("enable_checkpointing", True):
        yield "trainer: logger and checkpoint callback are exp_manager's"
    if trainer["precision"] not in PRECISIONS[nemo]:
        yield f"trainer.precision: {trainer['precision']}"
    if model["encoder_seq_length"] != data["seq_length"]:
        yield "model.encoder_seq_length: another length than batches have"
    if model["seed"] <= 0:
        yield "model.seed: Seed should be a positive integer"
    if not data["data_prefix"]:
        yield "model.data.data_prefix: no data"
    yield from _sizes(tree)
    yield from _half_precision(tree)
    yield from _recompute(model)
    yield from _schedule(tree)
    yield from _saving(tree)


def _sizes(tree: Mapping[str, Any]) -> Iterator[str]:
    trainer, model = tree["trainer"], tree["model"]
    tensor, pipeline = model["tensor_model_parallel_size"], model["pipeline_model_parallel_size"]
    context, pieces = model.get("context_parallel_size", 1), model["virtual_pipeline_model_parallel_size"] or 1
    for key in ("num_attention_heads", "ffn_hidden_size", "num_query_groups"):
        if (model[key] or tensor) % tensor:
            yield f"model.{key}: not a multiple of tensor parallel size"
    if model["num_layers"] % (pipeline * pieces) or (pieces > 1 and pipeline == 1):
        yield "model.num_layers: pipeline stages differ"
    if pieces > 1 and not model["megatron_amp_O2"]:
        yield "model.virtual_pipeline_model_parallel_size: with megatron_amp_O2 only"
    if model["sequence_parallel"] and tensor > 1 and model["encoder_seq_length"] % tensor:
        yield "model.sequence_parallel: the sequence does not divide"
    if context > 1 and model["encoder_seq_length"] % (2 * context):
        yield "model.context_parallel_size: the sequence does not divide"
    if isinstance(trainer["devices"], int):
        world, parts = trainer["devices"] * trainer["num_nodes"], tensor * pipeline * context
        if world % parts or model["global_batch_size"] % (model["micro_batch_size"] * max(1, world // parts)):
            yield "model.global_batch_size: not a multiple of micro batch times data parallel size"


def _half_precision(tree: Mapping[str, Any]) -> Iterator[str]:
    precision, model = tree["trainer"]["precision"], tree["model"]
    if model["megatron_amp_O2"] and precision in (32, "32-true"):
        yield "model.megatron_amp_O2: weights of 32 bits"
    is_fp16 = precision in (16, "16-mixed")
    if model["megatron_amp_O2"] and is_fp16 and model["optim"]["name"] != "distributed_fused_adam":
        yield "model.megatron_amp_O2: fp16 training is not yet supported with O2"
    if model["fp8"] and not (model["fp8_e4m3"] or model["fp8_hybrid"]):
        yield "model.fp8: no format"


def _recompute(model: Mapping[str, Any]) -> Iterator[str]:
    granularity, method = model["activations_checkpoint_granularity"], model["activations_checkpoint_method"]
    if granularity not in (None, "selective", "full"):
        yield f"model.activations_checkpoint_granularity: {granularity}"
    if granularity == "full" and (method not in ("uniform", "block") or not model["activations_checkpoint_num_layers"]):
        yield "model.activations_checkpoint_method: full recomputation needs method and layers"
    if granularity == "selective" and model["activations_checkpoint_num_layers"] is not None:
        yield "model.activations_checkpoint_num_layers: must be null with selective"


def _schedule(tree: Mapping[str, Any]) -> Iterator[str]:
    optim, max_steps = tree["model"]["optim"], tree["trainer"]["max_steps"]
    sched = optim["sched"]
    if sched["name"] not in SCHEDULES:
        yield f"model.optim.sched.name: {sched['name']}"
        return
    unknown = set(sched) - {"name", "warmup_steps", *SCHEDULES[sched["name"]]}
    if unknown:
        yield f"model.optim.sched: an unexpected argument {unknown}"
    constant, warm_up = sched.get("constant_steps", 0), sched["warmup_steps"]
    if constant and optim["lr"] <= sched.get("min_lr", 0.0):
        yield "model.optim.sched.min_lr: assert max_lr > min_lr"
    if constant and warm_up < max_steps <= warm_up + constant:
        yield "model.optim.sched.constant_steps: no step is left to decay"


def _saving(tree: Mapping[str, Any]) -> Iterator[str]:
    trainer, manager, model = tree["trainer"], tree["exp_manager"], tree["model"]
    callback = manager["checkpoint_callback_params"]
    if manager.get("log_local_rank_0_only") and manager.get("log_global_rank_0_only"):
        yield "exp_manager.log_local_rank_0_only: with log_global_rank_0_only"
    if manager["explicit_log_dir"] is not None or not (manager["exp_dir"] and manager["name"] and manager["version"]):
        yield "exp_manager.version: ranks would disagree about the directory"
    if manager["create_wandb_logger"] and not {"name", "project"} & set(manager["wandb_logger_kwargs"] or {}):
        yield "exp_manager.wandb_logger_kwargs: name and project are required"
    if (manager.get("ema") or {}).get("enable") and model["mcore_gpt"]:
        yield "exp_manager.ema: cannot resume from a directory"
    if manager["create_checkpoint_callback"]:
        yield from _checkpoints(manager, callback, model)
    micro_batches = trainer["max_steps"] * model["global_batch_size"] // model["micro_batch_size"]
    if trainer["val_check_interval"] > micro_batches:
        yield "trainer.val_check_interval: more than the number of the training batches"
    if trainer["limit_val_batches"] and trainer["val_check_interval"] > trainer["max_steps"]:
        yield "trainer.val_check_interval: never"


def _checkpoints(manager: Mapping[str, Any], callback: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[str]:
    every_n_epochs = callback.get("every_n_epochs", 1)
    triggers = [callback.get("every_n_train_steps"), every_n_epochs, callback.get("train_time_interval")]
    if sum(1 for trigger in triggers if trigger) > 1:
        yield "exp_manager.checkpoint_callback_params: Lightning takes one of its triggers"
    if isinstance(callback.get("train_time_interval"), str):
        yield "exp_manager.checkpoint_callback_params.train_time_interval: a text has no total_seconds()"
    filename = callback["filename"]
    keys = re.findall(r"\{([^}:]*)", filename)
    known = ("step", "epoch", "consumed_samples", "val_loss", "reduced_train_loss")
    yield from (f"filename: no metric {key}" for key in keys if key not in known)
    # As the files of a run would be called.
    values = {"step": "50", "epoch": "0", "consumed_samples": "64.0", "val_loss": "8.01", "reduced_train_loss": "7.99"}
    name = re.sub(r"\{(\w+)[^}]*\}", lambda key: f"{key.group(1)}={values.get(key.group(1), '0')}", filename)
    path = f"{manager['exp_dir']}/{manager['name']}/{manager['version']}/checkpoints/{name}"
    if manager["resume_if_exists"]:
        consumed = re.findall(r"consumed_samples\=([0-9]+.[0-9]+)", path)
        if not consumed or consumed[0] != "64.0":
            yield "filename: data would begin anew, since consumed samples are not in it"
    if name.endswith(("last", "end")):
        yield "filename: taken for the last or final checkpoint"
    parts = model["tensor_model_parallel_size"] * model["pipeline_model_parallel_size"]
    if callback["model_parallel_size"] != parts:
        yield f"model_parallel_size: {callback['model_parallel_size']} is not {parts}"
    if callback["always_save_nemo"] and parts > 1:
        yield "always_save_nemo: not for models in parts"


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of each leaf; a list is one."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}" if path else key)
    else:
        yield path, tree
