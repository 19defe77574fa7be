"""What NxDT's rules find in paths, checkpoints, caches and environment. The rules themselves: rules/nxdt.py."""

import re
from collections.abc import Iterator

from trainwright.config import NxdtBackend
from trainwright.exp_manager import fixed_run_id, run_name
from trainwright.rules.case import Case, is_below

# Variables that would beat the YAML, since NxDT's orchestrator fills only those that are unset and appends to the
# flags, or that change what it does. A shell that submits with --export=ALL may carry any of them.
BEATS_YAML = (
    "NEURON_FUSE_SOFTMAX",
    "NEURON_EXPERIMENTAL_COMPRESS_RG",
    "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS",
    "BUCKET_CAP_MB",
    "NEURON_COMPILE_CACHE_URL",
    "NEURON_CC_FLAGS",
    "NEURON_RT_EXEC_TIMEOUT",
    "XLA_USE_BF16",
    "XLA_DOWNCAST_BF16",
    "NEURON_RT_STOCHASTIC_ROUNDING_EN",
    "NEURON_EXTRACT_GRAPHS_ONLY",
    "NEURON_IGNORE_TRAINING_SCRIPT_ERROR_AND_COMPILE",
    "NEMO_EXPM_VERSION",
    "NEMO_TESTING",
    "COMPILE",
    "TRAIN_ITERS",
)
_NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm")

Found = Iterator[tuple[str, str]]


def paths(case: Case, backend: NxdtBackend) -> Found:
    config = case.config
    manager = config.exp_manager
    filename = manager.checkpoint_callback_params.name_template.replace("{name}", run_name(config))
    places = {
        "exp_manager.exp_dir": manager.explicit_log_dir or manager.exp_dir,
        "exp_manager.name": run_name(config),
        "run_id": fixed_run_id(config) or config.name,
        "exp_manager.checkpoint_callback_params.filename": re.sub(r"\{(\w+)[^}]*\}", r"\1=0", filename),
        "backend.pretrained_dir": backend.pretrained_dir,
    }
    for key, text in places.items():
        for cut in ("-v", "tp_rank", "mp_rank"):
            if cut in text:
                yield (
                    f"{key}: {text!r} holds {cut!r}, where NxDT cuts the paths of checkpoints",
                    f"choose {key} without it"
                    + (", such as {name}--{step}-{consumed_samples}" if "{" in filename else ""),
                )


def saves(case: Case, backend: NxdtBackend) -> Found:
    config, manager = case.config, case.config.exp_manager
    params, every = manager.checkpoint_callback_params, _steps_between_saves(case)
    prefix = "exp_manager.checkpoint_callback_params"
    if not manager.create_checkpoint_callback:
        yield "exp_manager.create_checkpoint_callback=false leaves nothing to export", "use true"
    elif not params.save_last and (params.save_top_k == 0 or every > config.trainer.max_steps):
        yield (
            f"{prefix}: save_last=false with save_top_k={params.save_top_k} and every_n_train_steps={every} saves "
            f"nothing in trainer.max_steps={config.trainer.max_steps}",
            f"use {prefix}.save_last=true, or more often and save_top_k=1",
        )
    if params.train_time_interval is not None:
        yield f"{prefix}.train_time_interval beside every_n_train_steps, of which Lightning takes one", "use null"
    if params.monitor == "val_loss" and config.trainer.limit_val_batches == 0:
        yield f"{prefix}.monitor=val_loss, but trainer.limit_val_batches=0", f"use {prefix}.monitor=step and mode=max"
    if params.monitor == "step" and params.mode == "min":
        yield f"{prefix}.monitor=step with mode=min keeps the oldest", f"use {prefix}.mode=max"


def last_steps(case: Case, backend: NxdtBackend) -> Found:
    params = case.config.exp_manager.checkpoint_callback_params
    every, max_steps = _steps_between_saves(case), case.config.trainer.max_steps
    if not params.save_last and every < max_steps and max_steps % every:
        yield (
            f"trainer.max_steps={max_steps} is no multiple of {every} steps between saves, so the last "
            f"{max_steps % every} steps are lost",
            "use a multiple, or exp_manager.checkpoint_callback_params.save_last=true",
        )


def _steps_between_saves(case: Case) -> int:
    params = case.config.exp_manager.checkpoint_callback_params
    return params.every_n_train_steps or case.config.trainer.val_check_interval


def background_saves(case: Case, backend: NxdtBackend) -> Found:
    if case.config.exp_manager.checkpoint_callback_params.async_save:
        yield (
            "exp_manager.checkpoint_callback_params.async_save=true: NxDT copies all ranks' tensors to the host's "
            "memory, and the newest checkpoint counts as incomplete until the next save",
            "use false",
        )


def validation(case: Case, backend: NxdtBackend) -> Found:
    config = case.config
    if config.trainer.limit_val_batches > 0 and config.trainer.val_check_interval <= config.trainer.max_steps:
        yield (
            f"trainer.limit_val_batches={config.trainer.limit_val_batches}: the graphs of validation are not compiled "
            "ahead, so training stops for it",
            "use trainer.limit_val_batches=0",
        )


def zero1(case: Case, backend: NxdtBackend) -> Found:
    replicas = case.plan.data_parallel_size
    if backend.zero1 and replicas > 1:
        yield (
            f"data parallel size {replicas} with backend.zero1: NxDT saves all ranks' optimizer state only if its "
            "wrap_with_zero is heeded, which could not be tried",
            "look for optim/dp_rank_01_* in the first checkpoint",
        )


def compiler_cache(case: Case, backend: NxdtBackend) -> Found:
    config, url = case.config, backend.compiler_cache_url
    shared = config.site.slurm.shared_dir
    if "<site." in url + shared:
        return
    if "://" in url:
        is_seen = url.startswith("s3://")
    else:
        is_seen = is_below(url, shared) or (
            config.hardware.num_nodes == 1 and not any(is_below(url, place) for place in _NODE_LOCAL)
        )
    if not is_seen:
        yield (
            f"backend.compiler_cache_url={url} may not be the same on all nodes, and graphs would be compiled again",
            f"use an s3:// URL or a path below {shared}; allow=[nxdt-cache] if nodes do share it",
        )


def environment(case: Case, backend: NxdtBackend) -> Found:
    config = case.config
    given = {
        "hardware.env": config.hardware.env,
        "launcher.env": config.launcher.env,
        "launcher.env_from": config.launcher.env_from,
    }
    for key, names in given.items():
        for name in (name for name in names if name in BEATS_YAML):
            yield f"{key}: {name} beats what the run's config says", "leave it to the config's own key"


def ema(case: Case, backend: NxdtBackend) -> Found:
    if case.config.exp_manager.ema.enable:
        yield "exp_manager.ema.enable=true: NxDT reads keys that its NeMo does not have, and fails", "use false"


def shared_dir(case: Case, backend: NxdtBackend) -> Found:
    config, shared = case.config, case.config.site.slurm.shared_dir
    places = {
        "backend.model_dir": backend.model_dir,
        "backend.pretrained_dir": backend.pretrained_dir,
        "data.train_path": config.data.train_path or shared,
        "data.val_path": config.data.val_path or shared,
    }
    for key, path in places.items():
        if config.launcher.kind == "slurm" and "<site." not in path + shared and not is_below(path, shared):
            yield (
                f"{key}={path} is not below site.slurm.shared_dir={shared}, so nodes may not see it",
                f"choose {key} below it or correct site.slurm.shared_dir",
            )
