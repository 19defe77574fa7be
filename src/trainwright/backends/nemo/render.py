"""What a run of NeMo needs: one stage, NeMo's own script under torchrun. Values in, values out."""

import json
import sys
from typing import Any

from trainwright.backends.foreign import results_constants
from trainwright.backends.nemo.document import backend_of, checkpoint_template, copied_data, document
from trainwright.backends.rendered_yaml import to_yaml
from trainwright.config import RunConfig
from trainwright.config_launcher import VertexLauncher
from trainwright.exp_manager import nemo_metric
from trainwright.image import image_of
from trainwright.job import JobSpec
from trainwright.node.run_paths import RunPaths
from trainwright.plan import Plan

SCHEMA_VERSION = 1
_CONFIG_NAME = "config"


def render(config: RunConfig, plan: Plan, *, run_id: str, run_dir: str, attempt: int) -> tuple[JobSpec, ...]:
    """Return the stages of the run: training only. Each node copies data and repairs checkpoints before its ranks."""
    launcher, paths = config.launcher, RunPaths(run_dir)
    python = launcher.python or sys.executable
    folder = paths.nemo(attempt)
    below = folder.relative_to(paths.own).as_posix()
    worker = str(paths.worker)  # nothing of ours needs to be installed beside NeMo
    train = JobSpec(
        run_id=run_id,
        run_dir=run_dir,
        stage="train",
        attempt=attempt,
        launch="torchrun",
        # Its copy for the attempt, which says what to resume from: node.nemo makes it on the node.
        command=(backend_of(config).script, f"--config-path={folder}", f"--config-name={_CONFIG_NAME}-a{{attempt}}"),
        python=python,
        env=_environment(config),
        num_nodes=config.hardware.num_nodes,
        devices=config.hardware.devices,
        image=image_of(config),
        time_limit_s=None if launcher.kind == "local" else launcher.time,
        grace_s=launcher.grace_s,
        files={
            f"{below}/{_CONFIG_NAME}.yaml": to_yaml(document(config, run_id=run_id), reader="NeMo", run_id=run_id),
            f"{below}/settings.json": json.dumps(_settings(config, plan, python), indent=1, ensure_ascii=False),
        },
        prepare=(python, "-I", "-S", worker, "nemo", run_dir, "--stage", "train", "--attempt", "{attempt}"),
        foreign=f"{below}/settings.json",
    )
    return (train,)


def _environment(config: RunConfig) -> dict[str, str]:
    sizes = config.parallelism
    own = {"HYDRA_FULL_ERROR": "1"}  # NeMo's own errors with their traceback
    if sizes.tensor_model_parallel_size > 1 or sizes.context_parallel_size > 1:
        own["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # one queue, so that communication starts before what it overlaps with
    return {**own, **config.hardware.rank_env, **config.launcher.env}


def _settings(config: RunConfig, plan: Plan, python: str) -> dict[str, Any]:
    """Return what nodes must know beside NeMo's YAML."""
    launcher, backend = config.launcher, backend_of(config)
    params = config.exp_manager.checkpoint_callback_params
    return {
        "schema_version": SCHEMA_VERSION,
        "nemo": backend.nemo_version,
        "python": python,
        "data": [
            {"from": one.source, "to": one.target, "url": _bucket_url(config, one.source), "copy": backend.data_copy}
            for one in copied_data(config)
        ],
        "debug": isinstance(launcher, VertexLauncher) and launcher.debug,
        "monitor": nemo_metric(params.monitor),
        "checkpoint_name": checkpoint_template(config).partition("{")[0],
        "global_batch_size": config.data.global_batch_size,
        "max_steps": config.trainer.max_steps,
        "index_mapping_dir": config.data.index_mapping_dir,
        "model_parallel": [
            config.parallelism.tensor_model_parallel_size,
            config.parallelism.pipeline_model_parallel_size,
        ],
        "early_ends": _early_ends(config),
        "results": results_constants(config, plan),
    }


def _early_ends(config: RunConfig) -> dict[str, float | None]:
    """Return why NeMo may end with exit code 0 before trainer.max_steps, as results name it: limits in seconds."""
    manager = config.exp_manager
    limits = {"max_time_per_run": manager.max_time_per_run, "max_time": backend_of(config).max_time}
    ends: dict[str, float | None] = {name: limit for name, limit in limits.items() if limit is not None}
    if len(ends) > 1:
        del ends["max_time"]  # NeMo puts it aside
    if manager.create_early_stopping_callback:
        ends["early_stopping"] = None
    return ends


def _bucket_url(config: RunConfig, path: str) -> str | None:
    """Return the URL of what nodes see at `path` below the mount of buckets; None: it is in no bucket."""
    launcher = config.launcher
    if not isinstance(launcher, VertexLauncher) or not path.startswith(f"{launcher.bucket_mount.rstrip('/')}/"):
        return None
    url = launcher.bucket_url if launcher.bucket_url.endswith("://") else f"{launcher.bucket_url.rstrip('/')}/"
    return url + path.removeprefix(launcher.bucket_mount).lstrip("/")
