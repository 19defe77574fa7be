"""What a run of NxDT needs: fetch, convert, compile, train, export and verify, each a job. Values in, values out."""

import functools
import hashlib
import json
import sys
from typing import Any

from trainwright.backends.foreign import results_constants
from trainwright.backends.nxdt.document import (
    backend_of,
    checkpoint_template,
    compiler_flags,
    document,
    precision,
)
from trainwright.backends.rendered_yaml import to_yaml
from trainwright.config import RunConfig
from trainwright.job import JobSpec
from trainwright.node.run_paths import RunPaths
from trainwright.plan import Plan
from trainwright.rules.nxdt_run import BEATS_YAML

SCHEMA_VERSION = 1
_ORCHESTRATOR = "examples/training_orchestrator.py"


def render(config: RunConfig, plan: Plan, *, run_id: str, run_dir: str, attempt: int) -> tuple[JobSpec, ...]:
    """Return the stages of the run. Those around the training need no accelerator and run once, on one node."""
    launcher, hardware = config.launcher, config.hardware
    python = launcher.python or sys.executable
    files = _files(config, plan, run_id, run_dir, attempt)
    paths = RunPaths(run_dir)
    below = paths.nxdt(attempt).relative_to(paths.own).as_posix()
    worker = str(paths.worker)  # also NxDT's driver: nothing of ours needs to be installed beside NxDT
    job = functools.partial(
        JobSpec,
        run_id=run_id,
        run_dir=run_dir,
        attempt=attempt,
        launch="plain",
        python=python,
        env={**hardware.rank_env, **launcher.env},
        image=None,
        time_limit_s=None if launcher.kind == "local" else launcher.time,
        grace_s=launcher.grace_s,
    )

    def program(stage: str, *outputs: str) -> JobSpec:
        module = f"trainwright.backends.nxdt.{stage}"
        command = (python, worker, "program", module, run_dir, "--attempt", "{attempt}")
        return job(stage=stage, command=command, num_nodes=1, devices=0, files={}, outputs=outputs)

    def nxdt(stage: str, foreign: str | None = None) -> JobSpec:
        command = (python, "-I", "-S", worker, "nxdt", run_dir, "--stage", stage, "--attempt", "{attempt}")
        nodes, devices = hardware.num_nodes, hardware.devices
        return job(stage=stage, command=command, num_nodes=nodes, devices=devices, files=files, foreign=foreign)

    return (
        program("fetch"),
        program("convert", backend_of(config).pretrained_dir),
        nxdt("compile"),
        nxdt("train", foreign=f"{below}/settings.json"),
        program("export"),
        program("verify"),
    )


def cache_key_of(config: RunConfig, plan: Plan) -> dict[str, Any]:
    """Return what the compiled graphs of a run depend on, but for the versions of compiler and packages on the nodes.

    Not among it: paths, data, learning rate, steps and what is logged how often.
    """
    model, backend, hardware, sizes = config.model, backend_of(config), config.hardware, config.parallelism
    not_in_graphs = {"name", "trains_on", "source", "revision", "chat_template", "make_vocab_size_divisible_by"}
    shape = model.model_dump(exclude=not_in_graphs)
    keys = {
        "virtual_pipeline_model_parallel_size", "zero1", "fuse_qkv", "transpose_nki_inputs", "fusions", "packing",
        "activations_checkpoint_recompute", "log_parameter_norm", "log_gradient_norm", "bucket_size_collectives",
        "neuron_experimental_compress_rg",
    }  # fmt: skip
    environment = {**hardware.rank_env, **config.launcher.env}
    return {
        "machine": {"generation": hardware.neuron_generation, "lnc": hardware.lnc},
        "world": {"num_nodes": hardware.num_nodes, "devices": hardware.devices},
        "degrees": sizes.model_dump(exclude={"strategy"}),
        "model": shape,
        "batch": {
            "micro_batch_size": config.data.micro_batch_size,
            "accumulate_grad_batches": plan.accumulate_grad_batches,
            "seq_length": config.data.seq_length,
        },
        "precision": precision(config),
        "compiler_flags": compiler_flags(config),
        "backend": backend.model_dump(mode="json", include=keys),
        "optim": config.optim.model_dump(mode="json", include={"name", "betas", "eps", "weight_decay"}),
        "gradient_clip_val": config.trainer.gradient_clip_val,
        "recompute": config.trainer.recompute,
        "validates": config.trainer.limit_val_batches > 0,
        "env": {name: value for name, value in environment.items() if name.startswith(("XLA_", "NEURON_"))},
    }


def _files(config: RunConfig, plan: Plan, run_id: str, run_dir: str, attempt: int) -> dict[str, str]:
    paths = RunPaths(run_dir)
    folder = paths.nxdt(attempt).relative_to(paths.own).as_posix()
    texts = {"settings.json": json.dumps(_settings(config, plan), indent=1, ensure_ascii=False)}
    for name, is_fresh in (("fresh.yaml", True), ("resume.yaml", False)):
        tree = document(config, plan, run_id=run_id, is_fresh=is_fresh)
        texts[name] = to_yaml(tree, reader="NxDT", run_id=run_id)
    return {f"{folder}/{name}": text for name, text in texts.items()}


def _settings(config: RunConfig, plan: Plan) -> dict[str, Any]:
    """Return what the driver on the nodes must know beside NxDT's YAML."""
    backend, key_of = backend_of(config), cache_key_of(config, plan)
    return {
        "schema_version": SCHEMA_VERSION,
        "python": backend.python,
        "orchestrator": f"{backend.nxdt_dir}/{_ORCHESTRATOR}",
        "devices": config.hardware.devices,
        "num_nodes": config.hardware.num_nodes,
        "cache_url": backend.compiler_cache_url,
        "cache_key": hashlib.sha256(json.dumps(key_of, sort_keys=True).encode()).hexdigest(),
        "cache_key_of": key_of,
        "max_open_files": backend.max_open_files,
        "unset_env": list(BEATS_YAML),
        "reserved_port": backend.reserved_port,
        "global_batch_size": config.data.global_batch_size,
        "max_steps": config.trainer.max_steps,
        "checkpoint_name": checkpoint_template(config).partition("{")[0],
        "results": results_constants(config, plan),
    }
