"""The YAML that NeMo's script reads for a run: plain values only, nothing that NeMo or Hydra would still work out."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from trainwright.backends.nemo.constants import (
    CONSTANTS,
    EXP_MANAGER_DEFAULTS,
    EXP_MANAGER_SWITCHES,
    EXP_MANAGER_WRITTEN,
    FUSED_ADAM_EPS,
    PRECISIONS,
    SCHEDULES,
    TOKENIZERS,
)
from trainwright.backends.rendered_yaml import nested
from trainwright.config import RunConfig
from trainwright.config_backend import NemoBackend
from trainwright.exp_manager import lightning_clock, nemo_block, run_name
from trainwright.rules.nemo import has_half_weights

Leaves = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Copied:
    """A Megatron data set that each node copies to its own disk: prefixes without .bin and .idx."""

    source: str
    target: str


def document(config: RunConfig, *, run_id: str) -> dict[str, Any]:
    """Return what NeMo reads."""
    leaves = {
        **_top(config),
        **_trainer(config),
        **_exp_manager(config, run_id),
        **_sizes(config),
        **_layers(config),
        **_recompute(config),
        **_precision(config),
        **_optim(config),
        **_data(config),
        **{key: value for key, (value, _) in CONSTANTS.items() if _has(config, key)},
    }
    return nested(leaves)


def backend_of(config: RunConfig) -> NemoBackend:
    """Return the backend's keys."""
    assert isinstance(config.backend, NemoBackend)
    return config.backend


def copied_data(config: RunConfig) -> tuple[Copied, ...]:
    """Return what is copied to each node's own disk; empty where data is read in place. No two have one target."""
    folder = backend_of(config).data_cache_dir
    prefixes = [part for part in config.data.data_prefix or () if isinstance(part, str)]
    if folder is None:
        return ()
    named = Counter(PurePosixPath(prefix).name for prefix in dict.fromkeys(prefixes))
    copied = []
    for number, prefix in enumerate(dict.fromkeys(prefixes)):
        name = PurePosixPath(prefix).name
        copied.append(
            Copied(source=prefix, target=f"{folder}/{number}/{name}" if named[name] > 1 else f"{folder}/{name}")
        )
    return tuple(copied)


def checkpoint_template(config: RunConfig) -> str:
    """Return the template of a checkpoint's name in NeMo's spelling, where keys are names of metrics."""
    template = config.exp_manager.checkpoint_callback_params.name_template
    return template.replace("{name}", run_name(config)).replace("{train_loss", "{reduced_train_loss")


def _has(config: RunConfig, constant: str) -> bool:
    """Return whether NeMo takes a constant in this run: apex's plain optimizer knows nothing of sharding."""
    return constant != "model.optim.contiguous_grad_buffer" or _is_sharded(config)


def _is_sharded(config: RunConfig) -> bool:
    return backend_of(config).optim.name == "distributed_fused_adam"


def _top(config: RunConfig) -> Leaves:
    # Read by no one but people. NVIDIA's examples spell it so.
    leaves: Leaves = {"run.name": config.model.name.upper().replace("_", "-")}
    if config.launcher.kind == "slurm":  # else Lightning takes srun's one task per node for a rank of its own
        leaves["cluster_type"] = "BCP"
    return leaves


def _trainer(config: RunConfig) -> Leaves:
    trainer, hardware, backend = config.trainer, config.hardware, backend_of(config)
    leaves = {
        # A job of Vertex AI asks for just hardware.devices accelerators; other machines may have more.
        "devices": "auto" if config.launcher.kind == "vertex" else hardware.devices,
        "num_nodes": hardware.num_nodes,
        "precision": PRECISIONS[backend.nemo_version][trainer.precision],
        "max_steps": trainer.max_steps,
        "max_time": None if backend.max_time is None else lightning_clock(backend.max_time),
        "log_every_n_steps": trainer.log_every_n_steps,
        "val_check_interval": trainer.val_check_interval,
        # To NeMo a whole number is batches, and it looks for as many samples; a fraction of 0 asks for none.
        "limit_val_batches": trainer.limit_val_batches or 0.0,
        "gradient_clip_val": trainer.gradient_clip_val,
        "enable_progress_bar": trainer.enable_progress_bar,
    }
    return {f"trainer.{key}": value for key, value in leaves.items()}


def _exp_manager(config: RunConfig, run_id: str) -> Leaves:
    """Return the user's exp_manager, less what is NeMo's default anyway and what no switch turns on."""
    block = nemo_block(config, run_id=run_id, nemo=backend_of(config).nemo_version)
    given = block["wandb_logger_kwargs"] or {}
    if block["create_wandb_logger"]:  # NeMo makes no logger without a name or project
        block["wandb_logger_kwargs"] = {"project": run_name(config), "name": run_id, **given}
    else:
        block["wandb_logger_kwargs"] = {"project": None, "name": None, **given}
    params = block["checkpoint_callback_params"]
    params["filename"] = checkpoint_template(config)
    if params["every_n_train_steps"] is not None:  # Lightning takes one trigger only
        params["every_n_epochs"] = None
    return {
        f"exp_manager.{key}": value
        for key, value in _block_leaves(block)
        if key in EXP_MANAGER_WRITTEN or (_is_read(key, block) and value != EXP_MANAGER_DEFAULTS[key])
    }


def _is_read(key: str, block: Mapping[str, Any]) -> bool:
    switch = EXP_MANAGER_SWITCHES.get(key.partition(".")[0])
    return switch is None or bool(block[switch])


def _block_leaves(block: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (key, value); what the user may fill with any keys is one value."""
    for key, value in block.items():
        if isinstance(value, dict) and key not in {*EXP_MANAGER_WRITTEN, *EXP_MANAGER_DEFAULTS}:
            yield from ((f"{key}.{leaf}", below) for leaf, below in value.items())
        else:
            yield key, value


def _sizes(config: RunConfig) -> Leaves:
    data, sizes, backend = config.data, config.parallelism, backend_of(config)
    leaves = {
        "micro_batch_size": data.micro_batch_size,
        "global_batch_size": data.global_batch_size,
        "tensor_model_parallel_size": sizes.tensor_model_parallel_size,
        "pipeline_model_parallel_size": sizes.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": backend.virtual_pipeline_model_parallel_size,
        "sequence_parallel": sizes.sequence_parallel,
        "overlap_p2p_comm": backend.overlap_p2p_comm,
        "batch_p2p_comm": backend.batch_p2p_comm,
        "ub_tp_comm_overlap": backend.ub_tp_comm_overlap,
        "seed": config.seed,
        "nsys_profile": backend.nsys_profile.model_dump(mode="json"),
    }
    if sizes.context_parallel_size > 1:
        leaves["context_parallel_size"] = sizes.context_parallel_size
    return {f"model.{key}": value for key, value in leaves.items()}


def _layers(config: RunConfig) -> Leaves:
    model, backend, tokenizer = config.model, backend_of(config), config.data.tokenizer
    leaves = {
        "encoder_seq_length": config.data.seq_length,  # also the length of tensors between pipeline stages
        "max_position_embeddings": model.max_position_embeddings,
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_query_groups,
        "init_method_std": model.init_method_std,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "layernorm_epsilon": model.layernorm_epsilon,
        "make_vocab_size_divisible_by": model.make_vocab_size_divisible_by,
        "grad_div_ar_fusion": backend.grad_div_ar_fusion,
        "gradient_accumulation_fusion": backend.gradient_accumulation_fusion,
        "bias_activation_fusion": backend.bias_activation_fusion,
        "bias_dropout_add_fusion": backend.bias_dropout_add_fusion,
        "masked_softmax_fusion": backend.masked_softmax_fusion,
        **{f"tokenizer.{key}": value for key, value in TOKENIZERS.get(tokenizer.type, {}).items()},
    }
    if tokenizer.type == "huggingface":
        leaves["tokenizer.type"] = tokenizer.name
    if not model.share_embeddings_and_output_weights:
        leaves["share_embeddings_and_output_weights"] = False
    return {f"model.{key}": value for key, value in leaves.items()}


def _recompute(config: RunConfig) -> Leaves:
    backend, recompute = backend_of(config), config.trainer.recompute
    is_full = recompute == "full"
    leaves = {
        "granularity": None if recompute == "none" else recompute,
        "method": backend.activations_checkpoint_method if is_full else None,  # refused beside `selective`
        "num_layers": backend.activations_checkpoint_num_layers if is_full else None,
        "layers_per_pipeline": backend.activations_checkpoint_layers_per_pipeline,
    }
    partial = "num_micro_batches_with_partial_activation_checkpoints"
    return {
        **{f"model.activations_checkpoint_{key}": value for key, value in leaves.items()},
        f"model.{partial}": getattr(backend, partial),
    }


def _precision(config: RunConfig) -> Leaves:
    keys = {
        "megatron_amp_O2", "native_amp_init_scale", "native_amp_growth_interval", "hysteresis", "transformer_engine",
        "fp8", "fp8_e4m3", "fp8_hybrid", "fp8_margin", "fp8_interval", "fp8_amax_history_len", "fp8_amax_compute_algo",
        "fp8_wgrad",
    }  # fmt: skip
    leaves = backend_of(config).model_dump(mode="json", include=keys)
    leaves["megatron_amp_O2"] = has_half_weights(config, backend_of(config))
    return {f"model.{key}": value for key, value in leaves.items()}


def _optim(config: RunConfig) -> Leaves:
    optim, own = config.optim, backend_of(config).optim
    name, takes_min_lr = SCHEDULES[optim.sched.name]
    leaves: Leaves = {"name": own.name}
    if _is_sharded(config):
        leaves.update(own.model_dump(include={"bucket_cap_mb", "overlap_grad_sync", "overlap_param_sync"}))
        if own.grad_sync_dtype is not None:
            leaves["grad_sync_dtype"] = own.grad_sync_dtype
    leaves.update(lr=optim.lr, weight_decay=optim.weight_decay, betas=list(optim.betas))
    if optim.eps != FUSED_ADAM_EPS:
        leaves["eps"] = optim.eps
    leaves["sched.name"] = name
    leaves["sched.warmup_steps"] = optim.sched.warmup_steps
    if own.constant_steps:
        leaves["sched.constant_steps"] = own.constant_steps
    if takes_min_lr:
        leaves["sched.min_lr"] = optim.sched.min_lr
    return {f"model.optim.{key}": value for key, value in leaves.items()}


def _data(config: RunConfig) -> Leaves:
    data, backend = config.data, backend_of(config)
    moved = {one.source: one.target for one in copied_data(config)}
    leaves = {
        "data_prefix": [moved.get(part, part) if isinstance(part, str) else part for part in data.data_prefix or ()],
        "splits_string": data.splits_string,
        "seq_length": data.seq_length,
        "num_workers": data.num_workers,
        "dataloader_type": backend.dataloader_type,
        "reset_position_ids": backend.reset_position_ids,
        "reset_attention_mask": backend.reset_attention_mask,
        "eod_mask_loss": backend.eod_mask_loss,
        "index_mapping_dir": data.index_mapping_dir,
    }
    return {f"model.data.{key}": value for key, value in leaves.items()}
