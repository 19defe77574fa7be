"""What NxDT is told and no key of a config changes, each with its reason; and what it takes when it is told nothing.

Sources: neuronx-distributed-training 2.26 (commit 9169aa03), neuronx-distributed 2.29 (fbac349b), NeMo 2.1.0.
"""

from collections.abc import Mapping

# Key in NxDT's YAML: (value, why it is fixed).
CONSTANTS: Mapping[str, tuple[object, str]] = {
    "model_source": ("hf", "fetch and convert know Hugging Face models only"),
    "trainer.max_epochs": (-1, "trainer.max_steps ends a run"),
    "trainer.check_val_every_n_epoch": (None, "else Lightning counts val_check_interval anew in each epoch"),
    "trainer.num_sanity_val_steps": (0, "a validation before the first step would only compile another graph"),
    "trainer.limit_test_batches": (0.0, "there is no test stage"),
    "exp_manager.explicit_log_dir": (None, "must be there; exp_dir, name and version say where a run lives"),
    "exp_manager.enable_recovery_time_instrumentation": (False, "declared, never read"),
    "exp_manager.save_xser": (True, "the layout that export reads; without it saving takes many times as long"),
    "exp_manager.load_xser": (True, "the loader finds it out itself"),
    "exp_manager.save_bf16": (True, "declared, never read"),
    "exp_manager.ckpt_ptl_version": (
        "1.8.6",
        "of a checkpoint that names no version: only the converted one, no state",
    ),
    "model.qkv_linear": (True, "convert writes the names of this module, with and without grouped queries"),
    "model.use_cpu_initialization": (True, "not read for Hugging Face models"),
    "model.do_layer_norm_weight_decay": (True, "inverted in NxDT: true keeps norms out, as conf/optim/adamw.yaml says"),
    "model.optim.capturable": (False, "a switch for CUDA graphs"),
    "precision.xla_use_bf16": ("0", "no precision that we render for type manual wants all values in bf16"),
}

# trainer.precision: precision.type. Trainium has no fp16 to train in; the rule nxdt-precision refuses it.
PRECISION_TYPES: Mapping[str, str] = {
    "32-true": "fp32",
    "bf16-mixed": "mixed_precision",
    "16-mixed": "mixed_precision",
    "bf16-true": "bf16SR",
}
# Read for type manual only; the orchestrator writes the texts to the environment, so they must be texts.
AUTOMATIC_PRECISION: Mapping[str, object] = {
    "master_weights": False,
    "fp32_grad_acc": False,
    "xla_downcast_bf16": "0",
    "neuron_rt_stochastic_rounding_en": "0",
}
# mixed_precisionSR, as NxDT's documentation calls it: the orchestrator refuses that name, and under the one that it
# takes, mixed_precision_SR, there are neither master weights nor fp32 accumulation. This is what it was meant to be.
STOCHASTIC_PRECISION: Mapping[str, object] = {
    "type": "manual",
    "master_weights": True,
    "fp32_grad_acc": True,
    "xla_downcast_bf16": "1",
    "neuron_rt_stochastic_rounding_en": "1",
}
STOCHASTIC_FLAG = "--enable-mixed-precision-accumulation"  # which type manual does not add by itself
# Types under which XLA makes bf16 of fp32. Only there does the optimizer keep its state in fp32 by itself, and versions
# of it before 2.29 do not start elsewhere.
DOWNCASTING_TYPES = ("mixed_precision", "manual")

# optim.sched.name: what NeMo calls it. LinearAnnealingWithWarmUp is NxDT's own and takes no min_lr.
SCHEDULES: Mapping[str, str] = {
    "CosineAnnealing": "CosineAnnealing",
    "LinearAnnealingWithWarmUp": "LinearAnnealingWithWarmUp",
    "constant": "WarmupPolicy",
}

# Keys of exp_manager that NxDT acts on: those that are always written, those with NxDT's default, written where it
# differs, and what a logger is given if it is on. It refuses keys that it does not know and acts on none of the rest.
EXP_MANAGER = (
    "log_local_rank_0_only",
    "create_tensorboard_logger",
    "resume_if_exists",
    "resume_ignore_no_checkpoint",
    "create_checkpoint_callback",
)
EXP_MANAGER_DEFAULTS: Mapping[str, object] = {
    "log_global_rank_0_only": False,
    "create_wandb_logger": False,
    "create_mlflow_logger": False,
    "summary_writer_kwargs": None,
    "log_step_timing": True,
    "step_timing_kwargs": {"reduction": "mean", "sync_cuda": False, "buffer_size": 1},
    "disable_validation_on_resume": True,
    "files_to_copy": None,
}
LOGGER_KWARGS: Mapping[str, str] = {
    "wandb_logger_kwargs": "create_wandb_logger",
    "mlflow_logger_kwargs": "create_mlflow_logger",
}
CHECKPOINT_CALLBACK = ("monitor", "mode", "save_top_k", "save_last", "model_parallel_size")
