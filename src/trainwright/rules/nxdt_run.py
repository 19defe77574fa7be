"""What NxDT's rules find in paths, checkpoints, caches and environment. The rules themselves: rules/nxdt.py."""

import re
from collections.abc import Iterator

from trainwright.config_backend import NxdtBackend
from trainwright.exp_manager import fixed_run_id, nemo_metric, run_name
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
        "exp_manager.resume_from_checkpoint": manager.resume_from_checkpoint or "",
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


def ranking(case: Case, backend: NxdtBackend) -> Found:
    """On a restart NeMo reads the number behind the monitor's name, where that first stands in a whole path."""
    config, manager = case.config, case.config.exp_manager
    params, prefix = manager.checkpoint_callback_params, "exp_manager.checkpoint_callback_params"
    metric = nemo_metric(params.monitor)
    if not manager.resume_if_exists or not manager.create_checkpoint_callback or params.save_top_k == -1:
        return
    places = {
        "exp_manager.exp_dir": manager.explicit_log_dir or manager.exp_dir,
        "exp_manager.name": run_name(config),
        "run_id": fixed_run_id(config) or config.name,
    }
    for key, text in places.items():
        if metric in text:
            yield (
                f"{key}={text} holds {metric!r}, the name of {prefix}.monitor, behind which NeMo wants a number on a "
                "restart: each would fail",
                f"choose {key} without it",
            )
    formats = dict(re.findall(r"\{(\w+):?([^}]*)\}", params.name_template))
    template = params.name_template.replace("{name}", "")
    written = re.sub(r"\{(\w+)[^}]*\}", lambda found: f"{nemo_metric(found[1])}=1", template) + ".ckpt"
    _, is_there, rest = written.partition(metric)
    number = re.split("[A-z]", rest[1:])[0][:-1]  # NeMo's own way: up to one character before the next letter
    if is_there and (number != "1" or not re.fullmatch(r"(\.\d+f)?", formats.get(params.monitor, ""))):
        yield (
            f"{prefix}.filename={params.name_template}: what follows the first {metric!r} is no plain number up to one "
            "character before the next letter, as NeMo reads it on a restart: each would fail",
            "use {name}--{step}-{consumed_samples}, or put the monitor first and one character behind it",
        )


def other_run(case: Case, backend: NxdtBackend) -> Found:
    path = case.config.exp_manager.resume_from_checkpoint
    if path is not None:
        yield (
            f"exp_manager.resume_from_checkpoint={path}: NxDT counts on from the step of another run's checkpoint, "
            "with a new optimizer, and the ten steps of the stage compile would be over before they made a graph",
            "go on with that run by run_id=ID, or begin with its weights: model.source=RUN_DIR/export/step=N",
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
        "hardware.network_env": config.hardware.network_env,
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
        "exp_manager.resume_from_checkpoint": config.exp_manager.resume_from_checkpoint or shared,
    }
    for key, path in places.items():
        if config.launcher.kind == "slurm" and "<site." not in path + shared and not is_below(path, shared):
            yield (
                f"{key}={path} is not below site.slurm.shared_dir={shared}, so nodes may not see it",
                f"choose {key} below it or correct site.slurm.shared_dir",
            )
