"""The exp_manager section of a config: NeMo's keys, those of 1.23 and of 2.7, and few of our own.

What each key means, and where our default is another than NeMo's, stands in conf/exp_manager/default.yaml; which ones
a backend leaves without effect, in `exp_manager`. Source: nemo/utils/exp_manager.py of both versions.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue, field_validator

from trainwright.config_types import NAME_PATTERN, Count, Duration, Name, Section

Mode = Literal["min", "max"]
# A template's keys are filled in when a checkpoint is written; anything else in braces is a mistake.
CHECKPOINT_NAME_KEYS = ("name", "step", "consumed_samples", "val_loss", "train_loss", "epoch")
# SummaryWriter's own, then those that only Lightning's logger knows, which NeMo uses.
WRITER_KEYS = ("max_queue", "flush_secs", "filename_suffix")
LIGHTNING_WRITER_KEYS = ("comment", "log_graph", "default_hp_metric", "prefix", "sub_dir")


class CheckpointCallbackParams(Section):
    monitor: Literal["val_loss", "train_loss", "step"]
    mode: Mode
    save_top_k: Annotated[int, Field(ge=-1)]
    save_last: bool
    every_n_train_steps: Count | None  # None: after each validation
    train_time_interval: Duration | None  # None: time does not matter
    filename: str | None  # None: the default of conf/
    async_save: bool
    filepath: str | None  # None: not given; NeMo's old spelling of dirpath and filename in one
    dirpath: str | None  # None: RUN_DIR/checkpoints
    verbose: bool
    save_weights_only: bool
    auto_insert_metric_name: bool
    every_n_epochs: Annotated[int, Field(ge=0)] | None  # None: epochs do not matter
    prefix: str | None  # None: the run's name
    postfix: str
    save_best_model: bool
    always_save_nemo: bool
    save_nemo_on_train_end: bool
    model_parallel_size: Count | None  # None: worked out from parallelism
    save_on_train_epoch_end: bool
    save_last_n_optim_states: Annotated[int, Field(ge=-1)]

    @field_validator("filename")
    @classmethod
    def _known_template_keys(cls, value: str | None) -> str | None:
        if value is None:
            return None
        unknown = [key for key in re.findall(r"\{([^}:]*)", value) if key not in CHECKPOINT_NAME_KEYS]
        if unknown:
            raise ValueError(f"{{{unknown[0]}}} is not known; use {', '.join(CHECKPOINT_NAME_KEYS)}")
        if "{step}" not in value or "/" in value:
            raise ValueError("a name must hold {step}, which keeps it unique, and no /")
        return value

    @property
    def name_template(self) -> str:
        """The template of a checkpoint's name."""
        return self.filename or "{name}--{val_loss:.2f}-{step}-{consumed_samples}"


class Ema(Section):
    enable: bool
    decay: Annotated[float, Field(ge=0, le=1)]
    every_n_steps: Count
    validate_original_weights: bool
    cpu_offload: bool


class EarlyStoppingParams(Section):
    monitor: Literal["val_loss", "train_loss"]
    mode: Mode
    min_delta: Annotated[float, Field(ge=0)]
    patience: Count
    strict: bool
    check_finite: bool
    stopping_threshold: float | None  # None: no value is good enough to stop
    divergence_threshold: float | None  # None: no value is bad enough to stop
    verbose: bool
    check_on_train_epoch_end: bool | None  # None: Lightning's choice
    log_rank_zero_only: bool


class StepTimingKwargs(Section):
    reduction: Literal["mean", "sum", "min", "max", "none"]
    sync_cuda: bool
    buffer_size: int


class MlflowLoggerKwargs(Section):
    experiment_name: str | None  # None: the run's name
    run_name: str | None  # None: the run id
    tracking_uri: str | None  # None: save_dir
    tags: dict[str, str] | None  # None: only our own
    save_dir: str
    prefix: str
    artifact_location: str | None  # None: the server's choice
    run_id: str | None  # None: the one that belongs to this run, made at its first attempt
    log_model: bool


class DlloggerLoggerKwargs(Section):
    verbose: bool
    stdout: bool
    json_file: str


class ClearmlLoggerKwargs(Section):
    project: str | None
    task: str | None
    connect_pytorch: bool | None
    model_name: str | None
    tags: tuple[str, ...] | None
    log_model: bool
    log_cfg: bool
    log_metrics: bool


class IplEpochStopperCallbackParams(Section):
    enable_stop: bool
    stop_every_n_epochs: Count


class StragglerDetectionParams(Section):
    report_time_interval: float
    calc_relative_gpu_perf: bool
    calc_individual_gpu_perf: bool
    num_gpu_perf_scores_to_log: int
    gpu_relative_perf_threshold: float
    gpu_individual_perf_threshold: float
    stop_if_detected: bool


class FaultTolerance(Section):
    workload_check_interval: float
    initial_rank_heartbeat_timeout: float | None
    rank_heartbeat_timeout: float | None
    calculate_timeouts: bool
    safety_factor: float
    rank_termination_signal: str | int
    log_level: str
    max_rank_restarts: int
    max_subsequent_job_failures: int
    additional_ft_launcher_args: str
    simulated_fault: JsonValue


class ExpManager(Section):
    exp_dir: Annotated[str, Field(min_length=1)]
    dry_run_dir: Annotated[str, Field(min_length=1)]
    name: Name | None  # None: the run's name
    version: Name | None  # None: the run id
    explicit_log_dir: str | None  # None: exp_dir/name/version
    resume_if_exists: bool
    resume_ignore_no_checkpoint: bool
    resume_ignore_damaged: bool
    resume_past_end: bool
    resume_from_checkpoint: str | None  # None: no other run's checkpoint to begin with
    create_tensorboard_logger: bool
    summary_writer_kwargs: dict[str, JsonValue] | None  # None: SummaryWriter's defaults
    create_wandb_logger: bool
    wandb_logger_kwargs: dict[str, JsonValue] | None  # None: defaults
    create_mlflow_logger: bool
    mlflow_logger_kwargs: MlflowLoggerKwargs
    create_checkpoint_callback: bool
    checkpoint_callback_params: CheckpointCallbackParams
    create_early_stopping_callback: bool
    early_stopping_callback_params: EarlyStoppingParams
    create_preemption_callback: bool
    max_time_per_run: Duration | None  # None: no limit
    ema: Ema
    log_step_timing: bool
    log_delta_step_timing: bool
    step_timing_kwargs: StepTimingKwargs
    log_tflops_per_sec_per_gpu: bool
    files_to_copy: tuple[str, ...] | None  # None: no file
    use_datetime_version: bool
    log_local_rank_0_only: bool
    log_global_rank_0_only: bool
    disable_validation_on_resume: bool
    seconds_to_sleep: float
    create_dllogger_logger: bool
    dllogger_logger_kwargs: DlloggerLoggerKwargs
    create_clearml_logger: bool
    clearml_logger_kwargs: ClearmlLoggerKwargs
    create_neptune_logger: bool
    neptune_logger_kwargs: dict[str, JsonValue] | None  # None: none given
    create_ipl_epoch_stopper_callback: bool
    ipl_epoch_stopper_callback_params: IplEpochStopperCallbackParams
    create_straggler_detection_callback: bool
    straggler_detection_params: StragglerDetectionParams
    create_fault_tolerance_callback: bool
    fault_tolerance: FaultTolerance

    @field_validator("summary_writer_kwargs")
    @classmethod
    def _known_writer_keys(cls, value: dict[str, JsonValue] | None) -> dict[str, JsonValue] | None:
        known = (*WRITER_KEYS, *LIGHTNING_WRITER_KEYS)
        unknown = [key for key in value or () if key not in known]
        if unknown:  # log_dir among them: event files lie in the run's directory
            raise ValueError(f"{unknown[0]} may not be given; use {', '.join(known)}")
        return value

    @field_validator("explicit_log_dir")
    @classmethod
    def _ends_in_a_name(cls, value: str | None) -> str | None:
        if value is not None and not re.match(NAME_PATTERN, Path(value).name):
            raise ValueError(f"its last part becomes the run id and must match {NAME_PATTERN}")
        return value

    def disagreements(self) -> Iterator[str]:
        names = [Path(path).name for path in self.files_to_copy or ()]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            yield f"exp_manager.files_to_copy: {twice[0]} is named twice, but all go into one directory; rename one"
        if self.explicit_log_dir is not None and self.version is not None:
            yield (
                f"exp_manager.version: {self.version} with exp_manager.explicit_log_dir={self.explicit_log_dir}; "
                "give one of the two"
            )
        if self.log_local_rank_0_only and self.log_global_rank_0_only:
            yield "exp_manager.log_local_rank_0_only, exp_manager.log_global_rank_0_only: both true; set one to false"
