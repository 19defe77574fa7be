"""What the exp_manager section means whatever trains: where a run lives, which keys do nothing, what NeMo is given."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from trainwright.config import RunConfig
from trainwright.config_backend import BackendKind, NemoBackend
from trainwright.config_exp_manager import LIGHTNING_WRITER_KEYS

# What only NeMo itself does, with its default: loggers and callbacks, and how it names and writes checkpoint files.
_NEMO_EXTRAS: Mapping[str, object] = {
    "create_dllogger_logger": False,
    "create_clearml_logger": False,
    "create_neptune_logger": False,
    "create_ipl_epoch_stopper_callback": False,
    "create_straggler_detection_callback": False,
    "create_fault_tolerance_callback": False,
}
_NEMO_FILES: Mapping[str, object] = {
    "checkpoint_callback_params.save_weights_only": False,
    "checkpoint_callback_params.auto_insert_metric_name": True,
    "checkpoint_callback_params.every_n_epochs": 1,
    "checkpoint_callback_params.prefix": None,
    "checkpoint_callback_params.postfix": ".nemo",
    "checkpoint_callback_params.save_best_model": False,
    "checkpoint_callback_params.always_save_nemo": False,
    "checkpoint_callback_params.save_nemo_on_train_end": True,
}

# Keys without effect on a backend, with NeMo's default: only another value is worth a word.
_IDLE_ON_NATIVE: Mapping[str, object] = {
    "resume_past_end": False,
    "use_datetime_version": True,
    "log_local_rank_0_only": False,
    "log_global_rank_0_only": False,
    "disable_validation_on_resume": True,
    "seconds_to_sleep": 5.0,
    **_NEMO_EXTRAS,
    "mlflow_logger_kwargs.log_model": False,
    "checkpoint_callback_params.filepath": None,
    "checkpoint_callback_params.dirpath": None,
    "checkpoint_callback_params.save_last": True,
    "checkpoint_callback_params.verbose": True,
    **_NEMO_FILES,
    "checkpoint_callback_params.model_parallel_size": None,
    "checkpoint_callback_params.save_on_train_epoch_end": False,
    "checkpoint_callback_params.save_last_n_optim_states": -1,
    "early_stopping_callback_params.check_on_train_epoch_end": None,
    "early_stopping_callback_params.log_rank_zero_only": False,
    **{f"summary_writer_kwargs.{key}": None for key in LIGHTNING_WRITER_KEYS},
}

# NxDT has an exp_manager of its own, which does part of what NeMo's does. Source: NxDT 2.26, utils/exp_manager.py.
_IDLE_ON_NXDT: Mapping[str, object] = {
    "resume_past_end": False,
    "resume_ignore_damaged": False,
    "use_datetime_version": True,
    "create_early_stopping_callback": False,
    "create_preemption_callback": True,
    "max_time_per_run": None,
    "log_delta_step_timing": False,
    "log_tflops_per_sec_per_gpu": True,
    "seconds_to_sleep": 5.0,
    **_NEMO_EXTRAS,
    "checkpoint_callback_params.filepath": None,
    "checkpoint_callback_params.dirpath": None,
    **_NEMO_FILES,
    "checkpoint_callback_params.save_on_train_epoch_end": False,
    "checkpoint_callback_params.save_last_n_optim_states": -1,
}
_IDLE: Mapping[BackendKind, Mapping[str, object]] = {"native": _IDLE_ON_NATIVE, "nxdt": _IDLE_ON_NXDT}

# NeMo heeds its own keys, but its version is always given; what 1.23 does not know yet is not given to it.
_IDLE_ON_NEMO: Mapping[str, object] = {"use_datetime_version": True}
_IDLE_ON_NEMO_1: Mapping[str, object] = {
    "log_delta_step_timing": False,
    "create_ipl_epoch_stopper_callback": False,
    "create_straggler_detection_callback": False,
    "create_fault_tolerance_callback": False,
    "mlflow_logger_kwargs.run_name": None,
    "checkpoint_callback_params.async_save": False,
    "checkpoint_callback_params.save_last_n_optim_states": -1,
}

# What NeMo 1.23 does not know and would refuse.
_SINCE_NEMO_2 = (
    "checkpoint_callback_params.async_save",
    "checkpoint_callback_params.save_last_n_optim_states",
    "mlflow_logger_kwargs.run_name",
    "log_delta_step_timing",
    "log_tflops_per_sec_per_gpu",
    "create_ipl_epoch_stopper_callback",
    "ipl_epoch_stopper_callback_params",
    "create_straggler_detection_callback",
    "straggler_detection_params",
    "create_fault_tolerance_callback",
    "fault_tolerance",
)


def run_name(config: RunConfig) -> str:
    """Return the name that the run's folder and its checkpoints bear."""
    return config.exp_manager.name or config.name


def fixed_run_id(config: RunConfig) -> str | None:
    """Return the run id that the user chose; None for a new one."""
    manager = config.exp_manager
    if manager.explicit_log_dir is not None:
        return Path(manager.explicit_log_dir).name
    return config.run_id or manager.version


def run_dir(config: RunConfig, run_id: str) -> Path:
    """Return where a run lives: exp_dir/name/run_id, or exactly where the user says."""
    manager = config.exp_manager
    if manager.explicit_log_dir is not None:
        return Path(manager.explicit_log_dir)
    return Path(manager.exp_dir) / run_name(config) / run_id


def idle_keys(config: RunConfig) -> tuple[str, ...]:
    """Return `key=value` for what is set to more than NeMo's default but changes nothing."""
    defaults = _idle_on(config)
    manager = config.exp_manager.model_dump()
    found = {key: _value_at(manager, key) for key in defaults}
    return tuple(
        f"exp_manager.{key}={_spelled(value)}"
        for key, value in found.items()
        if value is not None and value != defaults[key]
    )


def _idle_on(config: RunConfig) -> Mapping[str, object]:
    if isinstance(config.backend, NemoBackend):
        return {**_IDLE_ON_NEMO, **(_IDLE_ON_NEMO_1 if config.backend.nemo_version == "1.23" else {})}
    return _IDLE[config.backend.kind]


def nemo_block(config: RunConfig, *, run_id: str, nemo: Literal["1.23", "2.7"]) -> dict[str, Any]:
    """Return the exp_manager block that a NeMo of that version reads for this run.

    NeMo's folder is ours, so name and version are always given; without a version its ranks disagree about it.
    """
    place = run_dir(config, run_id)
    block = config.exp_manager.model_dump(mode="json", exclude={"dry_run_dir", "resume_ignore_damaged"})
    block.update(exp_dir=str(place.parent.parent), name=place.parent.name, version=place.name, explicit_log_dir=None)
    block["max_time_per_run"] = lightning_clock(block["max_time_per_run"])
    params = block["checkpoint_callback_params"]
    params["train_time_interval"] = lightning_clock(params["train_time_interval"])
    # NeMo would look up {name} among the metrics.
    params["filename"] = config.exp_manager.checkpoint_callback_params.name_template.replace("{name}", run_name(config))
    params["model_parallel_size"] = params["model_parallel_size"] or _checkpoint_parts(config)
    for monitoring in (params, block["early_stopping_callback_params"]):
        monitoring["monitor"] = nemo_metric(monitoring["monitor"])
    if nemo == "1.23":
        for key in _SINCE_NEMO_2:
            *sections, leaf = key.split(".")
            del (block[sections[0]] if sections else block)[leaf]
    return block


def nemo_metric(name: str) -> str:
    """Return what NeMo and NxDT log under our name of a metric."""
    return {"train_loss": "reduced_train_loss"}.get(name, name)


def _checkpoint_parts(config: RunConfig) -> int:
    """Return the ranks that save parts of a model; context parallel ranks hold the same ones."""
    return config.parallelism.tensor_model_parallel_size * config.parallelism.pipeline_model_parallel_size


def _value_at(tree: Mapping[str, Any], key: str) -> Any:
    section, _, leaf = key.rpartition(".")
    return (tree[section] or {}).get(leaf) if section else tree[leaf]


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def lightning_clock(seconds: int | None) -> str | None:
    """Return Lightning's DD:HH:MM:SS."""
    if seconds is None:
        return None
    time = timedelta(seconds=seconds)
    hours, rest = divmod(time.seconds, 3600)
    return f"{time.days:02}:{hours:02}:{rest // 60:02}:{rest % 60:02}"
