"""The YAML that NxDT reads for a run: plain values only, nothing that NxDT or Hydra would still have to work out."""

from typing import Any

from trainwright.backends.nxdt.constants import (
    AUTOMATIC_PRECISION,
    CHECKPOINT_CALLBACK,
    CONSTANTS,
    DOWNCASTING_TYPES,
    EXP_MANAGER,
    EXP_MANAGER_DEFAULTS,
    LOGGER_KWARGS,
    PRECISION_TYPES,
    SCHEDULES,
    STOCHASTIC_FLAG,
    STOCHASTIC_PRECISION,
)
from trainwright.backends.rendered_yaml import nested
from trainwright.config import RunConfig
from trainwright.config_backend import NxdtBackend
from trainwright.exp_manager import nemo_block, run_name
from trainwright.plan import Plan


def document(config: RunConfig, plan: Plan, *, run_id: str, is_fresh: bool) -> dict[str, Any]:
    """Return what NxDT reads. `is_fresh`: the run begins with pretrained weights, not with a checkpoint of its own."""
    leaves = {
        **_top(config),
        **_trainer(config),
        **_exp_manager(config, run_id, is_fresh),
        **_distributed_strategy(config),
        **_data(config),
        **_model(config, plan, is_fresh),
        **{f"precision.{key}": value for key, value in precision(config).items()},
        **_compiler(config),
        **{key: value for key, (value, _) in CONSTANTS.items()},
    }
    return nested(leaves)


def backend_of(config: RunConfig) -> NxdtBackend:
    """Return the backend's keys."""
    assert isinstance(config.backend, NxdtBackend)
    return config.backend


def precision(config: RunConfig) -> dict[str, Any]:
    """Return the section `precision`, but for its constants."""
    wanted = backend_of(config).precision
    if wanted == "mixed_precision_sr":
        return dict(STOCHASTIC_PRECISION)
    return {"type": wanted or PRECISION_TYPES[config.trainer.precision], **AUTOMATIC_PRECISION}


def compiler_flags(config: RunConfig) -> str:
    """Return the compiler's flags; NxDT adds those that its precision types need."""
    backend = backend_of(config)
    extra = STOCHASTIC_FLAG if backend.precision == "mixed_precision_sr" else ""
    return f"{backend.compiler_flags} {extra}".strip()


def checkpoint_template(config: RunConfig) -> str:
    """Return the template of a checkpoint's name in NeMo's spelling, where keys are names of metrics."""
    template = config.exp_manager.checkpoint_callback_params.name_template
    return template.replace("{name}", run_name(config)).replace("{train_loss", "{reduced_train_loss")


def needs_zero1_mark(config: RunConfig, plan: Plan) -> bool:
    """Return whether a checkpoint must be told that its optimizer state is sharded over data parallel ranks.

    NxDT asks for `wrap_with_zero`, a key that none of its own files sets; without it only the first rank's part is
    kept. Which of two places it looks at is not settled, so both have it; other keys there are tolerated.
    """
    return backend_of(config).zero1 and plan.data_parallel_size > 1


def _top(config: RunConfig) -> dict[str, Any]:
    return {"name": config.name, "model_source": CONSTANTS["model_source"][0], "seed": config.seed}


def _trainer(config: RunConfig) -> dict[str, Any]:
    trainer, hardware = config.trainer, config.hardware
    leaves = {
        "devices": hardware.devices,
        "num_nodes": hardware.num_nodes,
        "max_steps": trainer.max_steps,
        "log_every_n_steps": trainer.log_every_n_steps,
        "val_check_interval": trainer.val_check_interval,
        "limit_val_batches": trainer.limit_val_batches
        or 0.0,  # in Lightning a fraction is a share, a whole number batches
        "gradient_clip_val": trainer.gradient_clip_val,
    }
    if not trainer.enable_progress_bar:
        leaves["enable_progress_bar"] = False
    if hardware.lnc is not None:
        leaves["lnc"] = hardware.lnc
    return {f"trainer.{key}": value for key, value in leaves.items()}


def _exp_manager(config: RunConfig, run_id: str, is_fresh: bool) -> dict[str, Any]:
    """Return the user's exp_manager as far as NxDT heeds it. Version is our run id, so that it resumes."""
    manager, backend = config.exp_manager, backend_of(config)
    block = nemo_block(config, run_id=run_id, nemo="2.7")
    kept = {key: block[key] for key in ("exp_dir", "name", "version", *EXP_MANAGER)}
    kept |= {key: block[key] for key, default in EXP_MANAGER_DEFAULTS.items() if block[key] != default}
    kept |= {key: block[key] for key, switch in LOGGER_KWARGS.items() if block[switch] and block[key] is not None}
    kept |= {
        "log_parameter_norm": backend.log_parameter_norm,
        "log_gradient_norm": backend.log_gradient_norm,
        "async_checkpointing": manager.checkpoint_callback_params.async_save,
        "resume_from_checkpoint": (manager.resume_from_checkpoint or backend.pretrained_dir) if is_fresh else None,
    }
    given, params = block["checkpoint_callback_params"], manager.checkpoint_callback_params
    callback = {key: given[key] for key in CHECKPOINT_CALLBACK}
    callback["filename"] = checkpoint_template(config)
    # null means after each validation, where NxDT would save nothing.
    callback["every_n_train_steps"] = params.every_n_train_steps or config.trainer.val_check_interval
    callback["use_master_weights_in_ckpt"] = backend.use_master_weights_in_ckpt
    if not params.verbose:
        callback["verbose"] = False
    return {
        **{f"exp_manager.{key}": value for key, value in kept.items()},
        **{f"exp_manager.checkpoint_callback_params.{key}": value for key, value in callback.items()},
    }


def _distributed_strategy(config: RunConfig) -> dict[str, Any]:
    sizes, backend = config.parallelism, backend_of(config)
    leaves = {
        "tensor_model_parallel_size": sizes.tensor_model_parallel_size,
        "pipeline_model_parallel_size": sizes.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": backend.virtual_pipeline_model_parallel_size,
        "zero1": backend.zero1,
        "sequence_parallel": sizes.sequence_parallel,
        "kv_replicator": sizes.kv_replicator,
    }
    return {f"distributed_strategy.{key}": value for key, value in leaves.items()}


def _data(config: RunConfig) -> dict[str, Any]:
    data, backend = config.data, backend_of(config)
    # The model's own tokenizer was fetched with it; nodes may reach no hub.
    is_fetched = data.tokenizer.name in (None, config.model.source)
    leaves = {
        "micro_batch_size": data.micro_batch_size,
        "global_batch_size": data.global_batch_size,
        "train_dir": data.train_path,
        "val_dir": data.val_path,
        "dev_choose_samples": backend.dev_choose_samples,
        "seq_length": data.seq_length,
        "tokenizer.type": backend.model_dir if is_fetched else data.tokenizer.name,
    }
    return {
        **{f"data.{key}": value for key, value in leaves.items()},
        "model_alignment_strategy.sft.packing": backend.packing,
    }


def _model(config: RunConfig, plan: Plan, is_fresh: bool) -> dict[str, Any]:
    """Return the section `model`.

    rope_theta and max_position_embeddings are left to the fetched config.json, which NxDT's keys would override.
    """
    model, backend, optim, sched = config.model, backend_of(config), config.optim, config.optim.sched
    is_downcast = precision(config)["type"] in DOWNCASTING_TYPES
    leaves: dict[str, Any] = {
        "micro_batch_size": config.data.micro_batch_size,  # not read; data's is
        "global_batch_size": config.data.global_batch_size,
        "model_config": f"{backend.model_dir}/config.json",
        "encoder_seq_length": config.data.seq_length,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "fuse_qkv": backend.fuse_qkv,
        "transpose_nki_inputs": backend.transpose_nki_inputs,
        "weight_init_only": is_fresh,
        "activations_checkpoint_granularity": None if config.trainer.recompute == "none" else config.trainer.recompute,
        "activations_checkpoint_recompute": list(backend.activations_checkpoint_recompute),
        "fusions.softmax": backend.fusions.softmax,
        "fusions.flash_attention": backend.fusions.flash_attention,
        "optim.name": "adamw_fp32OptState" if is_downcast else "adamw",
        "optim.lr": optim.lr,
        "optim.weight_decay": optim.weight_decay,
        "optim.betas": list(optim.betas),
        "optim.eps": optim.eps,  # given, since the default changed between versions of neuronx-distributed
        "optim.sched.name": SCHEDULES[sched.name],
        "optim.sched.warmup_steps": sched.warmup_steps,
        "optim.sched.max_steps": config.trainer.max_steps,
    }
    if sched.name == "CosineAnnealing":
        leaves["optim.sched.min_lr"] = sched.min_lr
    rendered = {f"model.{key}": value for key, value in leaves.items()}
    if needs_zero1_mark(config, plan):
        rendered |= {"model.wrap_with_zero": True, "wrap_with_zero": True}
    return rendered


def _compiler(config: RunConfig) -> dict[str, Any]:
    backend = backend_of(config)
    return {
        "compiler_flags": compiler_flags(config),
        "compiler_cache_url": backend.compiler_cache_url,
        "aync_exec_max_inflight_requests": backend.async_exec_max_inflight_requests,  # spelled so in NxDT
        "bucket_size_collectives": backend.bucket_size_collectives,
        "neuron_rt_exec_timeout": backend.neuron_rt_exec_timeout,
        "neuron_experimental_compress_rg": backend.neuron_experimental_compress_rg,
    }
