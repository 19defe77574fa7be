"""Every leaf of NxDT's YAML follows from a key of the config, or stands in a table of constants with its reason."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.backends.nxdt.nxdt_schema import leaves
from tests.backends.nxdt.test_render import ABSENT, TANUKI, rendered
from trainwright.backends.nxdt.constants import CONSTANTS
from trainwright.config import RunConfig

Parsed = Callable[..., RunConfig]
_CALLBACK = "exp_manager.checkpoint_callback_params"
_STRATEGY = "distributed_strategy"
_SHARDS = "exp_manager.resume_from_checkpoint"  # its default names the degrees
_ZERO1 = {"wrap_with_zero", "model.wrap_with_zero"}  # several replicas

# Override, and all the leaves that it changes.
OVERRIDES: list[tuple[str, set[str]]] = [
    ("name=hf_tanuki", {"name", "exp_manager.name", f"{_CALLBACK}.filename"}),
    ("seed=1", {"seed"}),
    ("site.slurm.shared_dir=/lustre", {
        "exp_manager.exp_dir", _SHARDS, "data.train_dir", "data.val_dir", "data.tokenizer.type", "model.model_config",
        "compiler_cache_url",
    }),
    ("hardware.devices=64", {"trainer.devices", *_ZERO1}),
    ("hardware.num_nodes=2", {"trainer.num_nodes", *_ZERO1}),
    ("hardware.lnc=1", {"trainer.lnc"}),
    ("trainer.max_steps=200", {"trainer.max_steps", "model.optim.sched.max_steps"}),
    ("trainer.log_every_n_steps=1", {"trainer.log_every_n_steps"}),
    ("trainer.val_check_interval=50", {"trainer.val_check_interval"}),
    ("trainer.limit_val_batches=2", {"trainer.limit_val_batches"}),
    ("trainer.gradient_clip_val=null", {"trainer.gradient_clip_val"}),
    ("trainer.enable_progress_bar=false", {"trainer.enable_progress_bar"}),
    ("trainer.precision=bf16-true", {"precision.type", "model.optim.name"}),
    ("trainer.recompute=full", {"model.activations_checkpoint_granularity"}),
    ("backend.precision=mixed_precision_sr", {
        "precision.type", "precision.master_weights", "precision.fp32_grad_acc", "precision.xla_downcast_bf16",
        "precision.neuron_rt_stochastic_rounding_en", "compiler_flags",
    }),
    ("parallelism.tensor_model_parallel_size=16", {
        f"{_STRATEGY}.tensor_model_parallel_size", f"{_CALLBACK}.model_parallel_size", _SHARDS, *_ZERO1,
    }),
    ("parallelism.pipeline_model_parallel_size=2", {
        f"{_STRATEGY}.pipeline_model_parallel_size", f"{_CALLBACK}.model_parallel_size", _SHARDS,
    }),
    ("parallelism.kv_replicator=2", {f"{_STRATEGY}.kv_replicator", _SHARDS}),
    ("parallelism.sequence_parallel=false", {f"{_STRATEGY}.sequence_parallel"}),
    ("data.micro_batch_size=2", {"data.micro_batch_size", "model.micro_batch_size"}),
    ("data.global_batch_size=16", {"data.global_batch_size", "model.global_batch_size"}),
    ("data.seq_length=2048", {"data.seq_length", "model.encoder_seq_length"}),
    ("data.train_path=/fsx/a.jsonl", {"data.train_dir"}),
    ("data.val_path=/fsx/b.jsonl", {"data.val_dir"}),
    ("data.tokenizer.name=/fsx/tokenizer", {"data.tokenizer.type"}),
    ("data.tokenizer.name=someone/else", {"data.tokenizer.type"}),
    ("model.source=someone/else", set()),  # fetched to the same place, its tokenizer too
    ("model.source=/fsx/fetched/by/hand/", set()),
    ("model.source=null", set()),
    ("model.num_layers=16", {"model.num_layers"}),
    ("model.hidden_size=2048", {"model.hidden_size"}),
    ("optim.lr=1e-5", {"model.optim.lr"}),
    ("optim.betas=[0.9,0.95]", {"model.optim.betas"}),
    ("optim.eps=1e-8", {"model.optim.eps"}),
    ("optim.weight_decay=0.1", {"model.optim.weight_decay"}),
    ("optim.sched.warmup_steps=5", {"model.optim.sched.warmup_steps"}),
    ("optim.sched.name=CosineAnnealing", {"model.optim.sched.name", "model.optim.sched.min_lr"}),
    ("exp_manager.exp_dir=/fsx/other", {"exp_manager.exp_dir"}),
    ("exp_manager.name=other", {"exp_manager.name", f"{_CALLBACK}.filename"}),
    ("exp_manager.explicit_log_dir=/fsx/a/b/c", {
        "exp_manager.exp_dir", "exp_manager.name", "exp_manager.version",
    }),
    ("exp_manager.resume_from_checkpoint=/fsx/x.ckpt", {_SHARDS}),
    ("exp_manager.resume_if_exists=false", {"exp_manager.resume_if_exists"}),
    ("exp_manager.resume_ignore_no_checkpoint=false", {"exp_manager.resume_ignore_no_checkpoint"}),
    ("exp_manager.create_tensorboard_logger=false", {"exp_manager.create_tensorboard_logger"}),
    ("exp_manager.create_checkpoint_callback=false", {"exp_manager.create_checkpoint_callback"}),
    ("exp_manager.log_local_rank_0_only=false", {"exp_manager.log_local_rank_0_only"}),
    ("exp_manager.log_step_timing=false", {"exp_manager.log_step_timing"}),
    ("exp_manager.disable_validation_on_resume=false", {"exp_manager.disable_validation_on_resume"}),
    ("exp_manager.files_to_copy=[/fsx/a]", {"exp_manager.files_to_copy"}),
    (f"{_CALLBACK}.monitor=train_loss", {f"{_CALLBACK}.monitor"}),
    (f"{_CALLBACK}.mode=min", {f"{_CALLBACK}.mode"}),
    (f"{_CALLBACK}.save_top_k=3", {f"{_CALLBACK}.save_top_k"}),
    (f"{_CALLBACK}.save_last=true", {f"{_CALLBACK}.save_last"}),
    (f"{_CALLBACK}.every_n_train_steps=10", {f"{_CALLBACK}.every_n_train_steps"}),
    (f"{_CALLBACK}.filename='x-{{step}}'", {f"{_CALLBACK}.filename"}),
    (f"{_CALLBACK}.model_parallel_size=8", {f"{_CALLBACK}.model_parallel_size"}),
    (f"{_CALLBACK}.verbose=false", {f"{_CALLBACK}.verbose"}),
    (f"{_CALLBACK}.async_save=true", {"exp_manager.async_checkpointing"}),
    ("backend.use_master_weights_in_ckpt=true", {f"{_CALLBACK}.use_master_weights_in_ckpt"}),
    ("backend.log_parameter_norm=false", {"exp_manager.log_parameter_norm"}),
    ("backend.log_gradient_norm=false", {"exp_manager.log_gradient_norm"}),
    ("backend.model_dir=/fsx/m", {"data.tokenizer.type", "model.model_config"}),
    ("backend.pretrained_dir=/fsx/p", {_SHARDS}),
    ("backend.virtual_pipeline_model_parallel_size=2", {f"{_STRATEGY}.virtual_pipeline_model_parallel_size"}),
    ("backend.zero1=false", {f"{_STRATEGY}.zero1"}),
    ("backend.dev_choose_samples=100", {"data.dev_choose_samples"}),
    ("backend.packing=false", {"model_alignment_strategy.sft.packing"}),
    ("backend.fuse_qkv=false", {"model.fuse_qkv", _SHARDS}),
    ("backend.transpose_nki_inputs=true", {"model.transpose_nki_inputs"}),
    ("backend.fusions.softmax=false", {"model.fusions.softmax"}),
    ("backend.fusions.flash_attention=false", {"model.fusions.flash_attention"}),
    ("backend.activations_checkpoint_recompute=[LlamaMLP]", {"model.activations_checkpoint_recompute"}),
    ("backend.compiler_flags=-O2", {"compiler_flags"}),
    ("backend.compiler_cache_url=s3://bucket/cache", {"compiler_cache_url"}),
    ("backend.async_exec_max_inflight_requests=7", {"aync_exec_max_inflight_requests"}),
    ("backend.bucket_size_collectives=512", {"bucket_size_collectives"}),
    ("backend.neuron_rt_exec_timeout=600", {"neuron_rt_exec_timeout"}),
    ("backend.neuron_experimental_compress_rg=true", {"neuron_experimental_compress_rg"}),
]  # fmt: skip
# Started with the pretrained weights or with a checkpoint of its own: no key, the driver decides.
BY_THE_DRIVER = {"model.weight_init_only"}


@pytest.fixture(scope="module")
def before(parsed: Parsed) -> dict[str, Any]:
    """Return the leaves of tanuki_8b on trn1."""
    return dict(leaves(rendered(parsed(*TANUKI))))


@pytest.mark.parametrize(("override", "changed"), OVERRIDES, ids=[override for override, _ in OVERRIDES])
def test_an_override_changes_its_leaves_and_no_other(
    override: str, changed: set[str], parsed: Parsed, before: dict[str, Any]
) -> None:
    after = dict(leaves(rendered(parsed(*TANUKI, override))))
    assert {key for key in {*before, *after} if before.get(key, ABSENT) != after.get(key, ABSENT)} == changed


def test_every_leaf_is_changed_by_an_override_or_is_a_constant_with_a_reason(before: dict[str, Any]) -> None:
    changed = set().union(*(leaves for _, leaves in OVERRIDES)) | BY_THE_DRIVER
    assert set(before) - changed == set(CONSTANTS)
    assert {key: before[key] for key in CONSTANTS} == {key: value for key, (value, _) in CONSTANTS.items()}
    assert all(len(reason) > 10 for _, reason in CONSTANTS.values())
