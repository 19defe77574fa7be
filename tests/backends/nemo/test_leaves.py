"""Each value in NeMo's file: a key of the config changes it and no other, or it is a constant with its reason."""

from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.backends.nemo.nemo_schema import leaves
from trainwright.backends.nemo.constants import CONSTANTS, EXP_MANAGER_DEFAULTS
from trainwright.backends.nemo.document import document
from trainwright.config import RunConfig

Parsed = Callable[..., RunConfig]
BASE = ("hardware=t4", "site.vertex.bucket=b", "site.vertex.project=p")
SAVING = "exp_manager.checkpoint_callback_params"
ABSENT = object()

# Value in NeMo's file: overrides that change it, and what else follows from them.
LEAVES: dict[str, tuple[str | tuple[str, ...], set[str]]] = {
    "run.name": ("model.name=other", set()),
    "trainer.devices": (("launcher=local", "exp_manager.exp_dir=/gcs/b/nemo-experiments"), set()),
    "trainer.num_nodes": ("hardware.num_nodes=2", set()),
    "trainer.precision": ("trainer.precision=16-mixed", set()),
    "trainer.max_steps": ("trainer.max_steps=60", set()),
    "trainer.max_time": ("backend.max_time=3600", set()),
    "trainer.log_every_n_steps": ("trainer.log_every_n_steps=5", set()),
    "trainer.val_check_interval": ("trainer.val_check_interval=5", set()),
    "trainer.limit_val_batches": ("trainer.limit_val_batches=3", set()),
    "trainer.gradient_clip_val": ("trainer.gradient_clip_val=null", set()),
    "trainer.enable_progress_bar": ("trainer.enable_progress_bar=false", set()),
    "exp_manager.exp_dir": ("exp_manager.exp_dir=/gcs/b/other", set()),
    "exp_manager.name": ("exp_manager.name=other", {f"{SAVING}.filename"}),
    "exp_manager.version": ("exp_manager.explicit_log_dir=/gcs/b/nemo-experiments/megatron_gpt/r2", set()),
    "exp_manager.resume_if_exists": ("exp_manager.resume_if_exists=false", set()),
    "exp_manager.resume_ignore_no_checkpoint": ("exp_manager.resume_ignore_no_checkpoint=false", set()),
    "exp_manager.create_wandb_logger": (
        "exp_manager.create_wandb_logger=true",
        {"exp_manager.wandb_logger_kwargs.project", "exp_manager.wandb_logger_kwargs.name"},
    ),
    "exp_manager.wandb_logger_kwargs.project": ("exp_manager.wandb_logger_kwargs={project: p}", set()),
    "exp_manager.wandb_logger_kwargs.name": ("exp_manager.wandb_logger_kwargs={name: n}", set()),
    "exp_manager.create_checkpoint_callback": ("exp_manager.create_checkpoint_callback=false", set()),
    f"{SAVING}.monitor": (f"{SAVING}.monitor=train_loss", set()),
    f"{SAVING}.save_top_k": (f"{SAVING}.save_top_k=2", set()),
    f"{SAVING}.mode": (f"{SAVING}.mode=max", set()),
    f"{SAVING}.always_save_nemo": (f"{SAVING}.always_save_nemo=true", set()),
    f"{SAVING}.save_nemo_on_train_end": (f"{SAVING}.save_nemo_on_train_end=true", set()),
    f"{SAVING}.filename": (f"{SAVING}.filename='{{train_loss:.2f}}-{{step}}-{{consumed_samples}}'", set()),
    f"{SAVING}.model_parallel_size": (f"{SAVING}.model_parallel_size=2", set()),
    "exp_manager.log_step_timing": ("exp_manager.log_step_timing=false", set()),
    "exp_manager.step_timing_kwargs.sync_cuda": ("exp_manager.step_timing_kwargs.sync_cuda=false", set()),
    "exp_manager.step_timing_kwargs.buffer_size": ("exp_manager.step_timing_kwargs.buffer_size=1", set()),
    "model.micro_batch_size": ("data.micro_batch_size=2", set()),
    "model.global_batch_size": ("data.global_batch_size=512", set()),
    "model.tensor_model_parallel_size": (
        "parallelism.tensor_model_parallel_size=2",
        {f"{SAVING}.model_parallel_size"},
    ),
    "model.pipeline_model_parallel_size": (
        "parallelism.pipeline_model_parallel_size=2",
        {f"{SAVING}.model_parallel_size"},
    ),
    "model.virtual_pipeline_model_parallel_size": ("backend.virtual_pipeline_model_parallel_size=2", set()),
    "model.sequence_parallel": ("parallelism.sequence_parallel=true", set()),
    "model.overlap_p2p_comm": ("backend.overlap_p2p_comm=true", set()),
    "model.batch_p2p_comm": ("backend.batch_p2p_comm=false", set()),
    "model.ub_tp_comm_overlap": ("backend.ub_tp_comm_overlap=true", set()),
    "model.seed": ("seed=7", set()),
    "model.nsys_profile.enabled": ("backend.nsys_profile.enabled=true", set()),
    "model.nsys_profile.trace": ("backend.nsys_profile.trace=[cuda]", set()),
    "model.nsys_profile.start_step": ("backend.nsys_profile.start_step=1", set()),
    "model.nsys_profile.end_step": ("backend.nsys_profile.end_step=20", set()),
    "model.nsys_profile.ranks": ("backend.nsys_profile.ranks=[0,1]", set()),
    "model.nsys_profile.gen_shape": ("backend.nsys_profile.gen_shape=true", set()),
    "model.encoder_seq_length": ("data.seq_length=128", {"model.data.seq_length"}),
    "model.max_position_embeddings": ("model.max_position_embeddings=512", set()),
    "model.num_layers": ("model.num_layers=2", set()),
    "model.hidden_size": ("model.hidden_size=512", {"model.ffn_hidden_size"}),
    "model.ffn_hidden_size": ("model.ffn_hidden_size=512", set()),
    "model.num_attention_heads": ("model.num_attention_heads=8", set()),
    "model.num_query_groups": ("model.num_query_groups=2", set()),
    "model.init_method_std": ("model.init_method_std=0.02", set()),
    "model.hidden_dropout": ("model.hidden_dropout=0.1", set()),
    "model.attention_dropout": ("model.attention_dropout=0.1", set()),
    "model.layernorm_epsilon": ("model.layernorm_epsilon=1e-6", set()),
    "model.make_vocab_size_divisible_by": ("model.make_vocab_size_divisible_by=64", set()),
    "model.grad_div_ar_fusion": ("backend.grad_div_ar_fusion=false", set()),
    "model.gradient_accumulation_fusion": ("backend.gradient_accumulation_fusion=false", set()),
    "model.bias_activation_fusion": ("backend.bias_activation_fusion=false", set()),
    "model.bias_dropout_add_fusion": ("backend.bias_dropout_add_fusion=false", set()),
    "model.masked_softmax_fusion": ("backend.masked_softmax_fusion=false", set()),
    "model.tokenizer.library": (
        ("data.tokenizer.type=huggingface", "data.tokenizer.name=me/words"),
        {"model.tokenizer.type", "model.tokenizer.vocab_file", "model.tokenizer.merge_file"},
    ),
    "model.activations_checkpoint_granularity": ("trainer.recompute=selective", set()),
    "model.activations_checkpoint_method": (
        "trainer.recompute=full",
        {"model.activations_checkpoint_granularity", "model.activations_checkpoint_num_layers"},
    ),
    "model.num_micro_batches_with_partial_activation_checkpoints": (
        "backend.num_micro_batches_with_partial_activation_checkpoints=2",
        set(),
    ),
    "model.activations_checkpoint_layers_per_pipeline": ("backend.activations_checkpoint_layers_per_pipeline=1", set()),
    "model.megatron_amp_O2": ("backend.megatron_amp_O2=false", set()),
    "model.native_amp_init_scale": ("backend.native_amp_init_scale=65536", set()),
    "model.native_amp_growth_interval": ("backend.native_amp_growth_interval=100", set()),
    "model.hysteresis": ("backend.hysteresis=1", set()),
    "model.transformer_engine": ("backend.transformer_engine=false", set()),
    "model.fp8": ("backend.fp8=true", set()),
    "model.fp8_e4m3": ("backend.fp8_e4m3=true", set()),
    "model.fp8_hybrid": ("backend.fp8_hybrid=false", set()),
    "model.fp8_margin": ("backend.fp8_margin=1", set()),
    "model.fp8_interval": ("backend.fp8_interval=2", set()),
    "model.fp8_amax_history_len": ("backend.fp8_amax_history_len=16", set()),
    "model.fp8_amax_compute_algo": ("backend.fp8_amax_compute_algo=most_recent", set()),
    "model.fp8_wgrad": ("backend.fp8_wgrad=false", set()),
    "model.optim.name": (
        "backend.optim.name=fused_adam",
        {
            "model.optim.bucket_cap_mb",
            "model.optim.overlap_grad_sync",
            "model.optim.overlap_param_sync",
            "model.optim.contiguous_grad_buffer",
        },
    ),
    "model.optim.bucket_cap_mb": ("backend.optim.bucket_cap_mb=200", set()),
    "model.optim.overlap_grad_sync": ("backend.optim.overlap_grad_sync=false", set()),
    "model.optim.overlap_param_sync": ("backend.optim.overlap_param_sync=false", set()),
    "model.optim.lr": ("optim.lr=1e-4", set()),
    "model.optim.weight_decay": ("optim.weight_decay=0.01", set()),
    "model.optim.betas": ("optim.betas=[0.9,0.99]", set()),
    "model.optim.sched.name": ("optim.sched.name=LinearAnnealingWithWarmUp", set()),
    "model.optim.sched.warmup_steps": ("optim.sched.warmup_steps=20", set()),
    "model.optim.sched.constant_steps": ("backend.optim.constant_steps=5", set()),
    "model.optim.sched.min_lr": ("optim.sched.min_lr=0", set()),
    "model.data.data_prefix": ("backend.data_cache_dir=/mnt/disk", set()),
    "model.data.splits_string": ("data.splits_string='90,10,0'", set()),
    "model.data.num_workers": ("data.num_workers=4", set()),
    "model.data.dataloader_type": ("backend.dataloader_type=cyclic", set()),
    "model.data.reset_position_ids": ("backend.reset_position_ids=true", set()),
    "model.data.reset_attention_mask": ("backend.reset_attention_mask=true", set()),
    "model.data.eod_mask_loss": ("backend.eod_mask_loss=true", set()),
    "model.data.index_mapping_dir": ("data.index_mapping_dir=/gcs/b/other", set()),
}
# Only beside another value, by which they are dependents above.
DEPENDENT = {
    "model.data.seq_length",
    "model.tokenizer.type",
    "model.tokenizer.vocab_file",
    "model.tokenizer.merge_file",
    "model.tokenizer.model",  # null for both kinds of tokenizer
    "model.activations_checkpoint_num_layers",
}
# What stands in the file only where it is not NeMo's default.
WRITTEN_IF_CHANGED: dict[str, tuple[str | tuple[str, ...], set[str]]] = {
    "cluster_type": (
        ("launcher=slurm", "site.slurm.shared_dir=/fsx", "exp_manager.exp_dir=/gcs/b/nemo-experiments"),
        {"trainer.devices"},
    ),
    "model.context_parallel_size": ("parallelism.context_parallel_size=2", set()),
    "model.share_embeddings_and_output_weights": ("model.share_embeddings_and_output_weights=false", set()),
    "model.optim.eps": ("optim.eps=1e-6", set()),
    "model.optim.grad_sync_dtype": ("backend.optim.grad_sync_dtype=bf16", set()),
    "exp_manager.resume_past_end": ("exp_manager.resume_past_end=true", set()),
    "exp_manager.resume_from_checkpoint": ("exp_manager.resume_from_checkpoint=/gcs/b/x", set()),
    "exp_manager.create_tensorboard_logger": ("exp_manager.create_tensorboard_logger=false", set()),
    "exp_manager.summary_writer_kwargs.flush_secs": ("exp_manager.summary_writer_kwargs={flush_secs: 30}", set()),
    "exp_manager.max_time_per_run": ("exp_manager.max_time_per_run=3600", set()),
    "exp_manager.files_to_copy": ("exp_manager.files_to_copy=[/gcs/b/x.yaml]", set()),
    "exp_manager.seconds_to_sleep": ("exp_manager.seconds_to_sleep=1", set()),
    "exp_manager.create_preemption_callback": ("exp_manager.create_preemption_callback=false", set()),
    "exp_manager.disable_validation_on_resume": ("exp_manager.disable_validation_on_resume=false", set()),
    "exp_manager.step_timing_kwargs.reduction": ("exp_manager.step_timing_kwargs.reduction=max", set()),
    "exp_manager.ema.enable": ("exp_manager.ema.enable=true", set()),
    "exp_manager.ema.decay": ("exp_manager.ema.decay=0.9", set()),
    "exp_manager.create_early_stopping_callback": ("exp_manager.create_early_stopping_callback=true", set()),
    "exp_manager.early_stopping_callback_params.patience": (
        ("exp_manager.create_early_stopping_callback=true", "exp_manager.early_stopping_callback_params.patience=3"),
        {"exp_manager.create_early_stopping_callback"},
    ),
    "exp_manager.mlflow_logger_kwargs.tracking_uri": (
        ("exp_manager.create_mlflow_logger=true", "exp_manager.mlflow_logger_kwargs.tracking_uri=https://m"),
        {"exp_manager.create_mlflow_logger"},
    ),
    f"{SAVING}.save_last": (f"{SAVING}.save_last=false", set()),
    f"{SAVING}.every_n_train_steps": (f"{SAVING}.every_n_train_steps=5", {f"{SAVING}.every_n_epochs"}),
    f"{SAVING}.prefix": (f"{SAVING}.prefix=p", set()),
}


def rendered(config: RunConfig) -> dict[str, Any]:
    return dict(leaves(document(config, run_id="r1")))


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {key for key in {*before, *after} if before.get(key, ABSENT) != after.get(key, ABSENT)}


@pytest.fixture(scope="module")
def tree(parsed: Parsed) -> dict[str, Any]:
    return parsed(*BASE).to_dict()


@pytest.fixture(scope="module")
def base(tree: dict[str, Any]) -> dict[str, Any]:
    return rendered(RunConfig.from_dict(tree))


def overridden(tree: dict[str, Any], overrides: tuple[str, ...]) -> RunConfig:
    """Return the config with values overridden; composing it anew would take longer."""
    config = OmegaConf.create(tree)
    for override in overrides:
        key, _, value = override.partition("=")
        OmegaConf.update(config, key, OmegaConf.create(f"value: {value}").value, merge=False)
    return RunConfig.from_hydra(config)


def test_every_value_is_a_key_of_the_config_or_a_constant_with_its_reason(base: dict[str, Any]) -> None:
    assert set(base) == set(LEAVES) | DEPENDENT | set(CONSTANTS)
    assert not set(CONSTANTS) & (set(LEAVES) | DEPENDENT)
    assert all(len(reason) > 10 for _, reason in CONSTANTS.values())
    assert {key: base[key] for key in CONSTANTS} == {key: value for key, (value, _) in CONSTANTS.items()}


@pytest.mark.parametrize("leaf", [*LEAVES, *WRITTEN_IF_CHANGED])
def test_an_override_changes_one_value_and_what_depends_on_it(
    leaf: str, base: dict[str, Any], tree: dict[str, Any], parsed: Parsed
) -> None:
    told, dependents = {**LEAVES, **WRITTEN_IF_CHANGED}[leaf]
    overrides = (told,) if isinstance(told, str) else told
    must_compose = overrides[0].startswith("launcher=") or leaf == "model.hidden_size"
    config = parsed(*BASE, *overrides) if must_compose else overridden(tree, overrides)
    assert changed(base, rendered(config)) == {leaf, *dependents}


def test_what_is_nemos_default_is_not_written(base: dict[str, Any]) -> None:
    assert not [key for key in base if key.removeprefix("exp_manager.") in EXP_MANAGER_DEFAULTS]


def test_full_recomputation_is_told_which_layers(tree: dict[str, Any]) -> None:
    how = ("trainer.recompute=full", "backend.activations_checkpoint_method=block")
    found = rendered(overridden(tree, (*how, "backend.activations_checkpoint_num_layers=3")))
    assert found["model.activations_checkpoint_method"] == "block"
    assert found["model.activations_checkpoint_num_layers"] == 3


def test_every_key_of_the_backend_is_of_use(tree: dict[str, Any]) -> None:
    told = [told for told, _ in {**LEAVES, **WRITTEN_IF_CHANGED}.values()]
    used = {text.partition("=")[0] for one in told for text in ([one] if isinstance(one, str) else one)}
    elsewhere = {"kind", "nemo_version", "script", "base_image", "image", "data_copy"}
    elsewhere |= {"activations_checkpoint_method", "activations_checkpoint_num_layers"}
    keys = {key for key, _ in leaves(tree["backend"])}
    assert {f"backend.{key}" for key in keys - elsewhere} == {key for key in used if key.startswith("backend.")}
