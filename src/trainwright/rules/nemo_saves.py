"""Rules of NeMo about what a run saves and how it goes on: names and paths of checkpoints, when they are written."""

import re
from collections.abc import Iterator

from trainwright.config_backend import NemoBackend
from trainwright.exp_manager import fixed_run_id, nemo_metric, run_name
from trainwright.rules.case import Case, is_below

Found = Iterator[tuple[str, str]]

_SAVING = "exp_manager.checkpoint_callback_params"
_RANK_FOLDERS = ("mp_rank_", "tp_rank_", "fsdp_shard_")


def filename(case: Case, backend: NemoBackend) -> Found:
    params = case.config.exp_manager.checkpoint_callback_params
    template = params.name_template.replace("{name}", run_name(case.config))
    formats = dict(re.findall(r"\{([^}:]*):?([^}]*)\}", template))
    key = f"{_SAVING}.filename"
    if not re.fullmatch(r"(\.[1-9]\d*f)?", formats.get("consumed_samples", "absent")):
        yield (
            f"{key}={template}: a resume reads consumed_samples in the name, as digits with a point, or begins "
            "the data anew",
            "put {consumed_samples} into it, as it is",
        )
    if template.endswith(("last", "end")):
        yield f"{key}={template}: what ends so is taken for a newest or final checkpoint", "end it otherwise"
    if not params.auto_insert_metric_name:
        yield f"{_SAVING}.auto_insert_metric_name=false: a resume looks for consumed_samples= in names", "use true"


def _places(case: Case) -> dict[str, str]:
    """Return what makes up the path of a run's checkpoints, by key."""
    config, manager = case.config, case.config.exp_manager
    return {
        "exp_manager.exp_dir": manager.explicit_log_dir or manager.exp_dir,
        "exp_manager.name": run_name(config),
        "run_id": fixed_run_id(config) or config.name,
    }


def path(case: Case, backend: NemoBackend) -> Found:
    """NeMo looks for consumed_samples= and for folders of ranks anywhere in a checkpoint's path."""
    for key, text in _places(case).items():
        for cut in (*_RANK_FOLDERS, "consumed_samples="):
            if cut in text:
                yield f"{key}: {text!r} holds {cut!r}, by which NeMo takes paths apart", f"choose {key} without it"


def own_resume(case: Case, backend: NemoBackend) -> Found:
    """The worker tells NeMo what to resume from; NeMo alone ranks checkpoints by what it reads in their paths."""
    manager = case.config.exp_manager
    params, metric = manager.checkpoint_callback_params, nemo_metric(manager.checkpoint_callback_params.monitor)
    alone = "NeMo started on this directory without trainwright fails to resume: "
    if not manager.resume_if_exists or params.save_top_k == -1:
        return
    if params.save_top_k == 0:
        yield f"{alone}{_SAVING}.save_top_k=0", "use save_top_k=1, or allow=[nemo-own-resume]"
    for key, text in _places(case).items():
        if metric in text:
            yield f"{alone}it reads the value of {metric} in {key}={text}", f"choose {key} without it"
    formats = dict(re.findall(r"\{([^}:]*):?([^}]*)\}", params.name_template))
    if not re.fullmatch(r"(\.\d+f)?", formats.get(params.monitor, "absent")):
        yield (
            f"{alone}{_SAVING}.filename={params.name_template} has no {params.monitor}, or not as digits",
            f"put {{{params.monitor}{'' if metric == 'step' else ':.2f'}}} into it",
        )
        return
    template = params.name_template.replace("{name}", "")
    names = re.sub(r"\{(\w+)[^}]*\}", lambda key: f"{nemo_metric(key.group(1))}=0", template)
    if metric in names.partition(f"{metric}=0")[0]:
        yield (
            f"{alone}{_SAVING}.filename={params.name_template}, where it reads what follows the first {metric!r}",
            f"put {{{params.monitor}}} first",
        )


def saves(case: Case, backend: NemoBackend) -> Found:
    params = case.config.exp_manager.checkpoint_callback_params
    if not case.config.exp_manager.create_checkpoint_callback:
        return
    for key, value in (("dirpath", params.dirpath), ("filepath", params.filepath)):
        if value is not None:
            yield f"{_SAVING}.{key}={value}: resume and janitor look into the run's directory", f"use {key}=null"
    if params.train_time_interval is not None:
        yield (
            f"{_SAVING}.train_time_interval: NeMo hands Lightning a text where it wants a time, and the run fails at "
            "the second save",
            "use null, and every_n_train_steps",
        )
    if params.async_save and backend.nemo_version == "2.7" and case.config.exp_manager.ema.enable:
        yield f"{_SAVING}.async_save=true with exp_manager.ema.enable=true, which NeMo refuses", "use one of them"
    parts = case.config.parallelism.model_dump(exclude={"strategy", "sequence_parallel", "kv_replicator"})
    if params.always_save_nemo and max(parts.values()) > 1:
        yield f"{_SAVING}.always_save_nemo=true is not for models in parts: {parts}", "use always_save_nemo=false"


def rarely_saves(case: Case, backend: NemoBackend) -> Found:
    config = case.config
    params = config.exp_manager.checkpoint_callback_params
    if not config.exp_manager.create_checkpoint_callback:
        yield "exp_manager.create_checkpoint_callback=false: a run that is cut short begins again", "use true"
    elif config.trainer.limit_val_batches == 0 and params.every_n_train_steps is None:
        yield (
            "trainer.limit_val_batches=0: NeMo saves after validations, so only at the end, at step "
            f"{config.trainer.max_steps}",
            f"use {_SAVING}.every_n_train_steps, with monitor=step and mode=max",
        )
    elif params.monitor == "val_loss" and params.every_n_train_steps is not None:
        between = config.trainer.val_check_interval
        if params.every_n_train_steps % between:
            yield (
                f"{_SAVING}.every_n_train_steps={params.every_n_train_steps} is no multiple of "
                f"trainer.val_check_interval={between}: checkpoints bear the val_loss of an earlier step, or none",
                f"use a multiple of {between}, or monitor=step and mode=max",
            )
    if not params.save_last and config.exp_manager.create_checkpoint_callback:
        yield (
            f"{_SAVING}.save_last=false: a resume goes back to the newest of the best checkpoints, however old",
            "use true",
        )
    if params.monitor == "step" and params.mode == "min":
        yield f"{_SAVING}.monitor=step with mode=min keeps the oldest", f"use {_SAVING}.mode=max"


def max_time(case: Case, backend: NemoBackend) -> Found:
    if backend.max_time is not None and case.config.exp_manager.max_time_per_run is not None:
        yield (
            f"backend.max_time={backend.max_time} s is put aside by "
            f"exp_manager.max_time_per_run={case.config.exp_manager.max_time_per_run} s",
            "leave one out",
        )


def ema(case: Case, backend: NemoBackend) -> Found:
    if case.config.exp_manager.ema.enable:
        yield (
            "exp_manager.ema.enable=true: NeMo looks for an -EMA file beside checkpoints that are directories, and "
            "cannot resume",
            "use false",
        )


def files_to_copy(case: Case, backend: NemoBackend) -> Found:
    launcher, shared = case.config.launcher, case.config.site.slurm.shared_dir
    folder = {"vertex": getattr(launcher, "bucket_mount", None), "slurm": shared}.get(launcher.kind)
    for path in case.config.exp_manager.files_to_copy or ():
        if folder is not None and "<site." not in folder and not is_below(path, folder):
            yield (
                f"exp_manager.files_to_copy: {path} is not below {folder}, and NeMo copies on a node, where it fails "
                "while the others wait",
                "put it there, or leave it out: the run's record holds the config",
            )
