"""What Vertex AI is given for one stage: a CustomJobSpec, as a plain tree and as the YAML that gcloud reads.

Values in, values out; nothing of Google's is imported. Names are those of the API, in the JSON spelling.
Source: google.cloud.aiplatform.v1, custom_job.proto and machine_resources.proto.
"""

import copy
import hashlib
import re
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from trainwright.config import Hardware, RunConfig
from trainwright.config_launcher import VertexLauncher
from trainwright.job import JobSpec
from trainwright.node.run_paths import RunPaths

Tree = dict[str, Any]

OWN_LABELS = (
    "trainwright_run",
    "trainwright_stage",
    "trainwright_attempt",
)  # underscores: "-" may not stand in filters
_LABEL_LENGTH, _NAME_LENGTH = 63, 128
_RESERVATION_NAME = "compute.googleapis.com/reservation-name"
# Which of our keys a field of the API is made from; all others are made by us.
_KEYS = {
    "machineType": "launcher.machine",
    "acceleratorType": "hardware.accelerator_type",
    "acceleratorCount": "hardware.devices",
    "replicaCount": "hardware.num_nodes",
    "bootDiskType": "launcher.boot_disk_type",
    "bootDiskSizeGb": "launcher.boot_disk_size_gb",
    "imageUri": "launcher.image",
    "env": "launcher.env",
    "timeout": "launcher.time",
    "strategy": "launcher.strategy",
    "maxWaitDuration": "launcher.max_wait_s",
    "serviceAccount": "launcher.service_account",
    "network": "launcher.network",
    "persistentResourceId": "launcher.persistent_resource",
    "tensorboard": "launcher.tensorboard",
    "reservationAffinity": "launcher.reservation",
}


def render(job: JobSpec, config: RunConfig) -> str:
    """Return the file for `gcloud ai custom-jobs create --config`; secrets stand in it by name only."""
    lines = [
        f"Run {job.run_id}, stage {job.stage}, attempt {job.attempt}. Written by trainwright, submitted as it stands."
    ]
    lines += [f"<{name}> stands for the value of that variable, filled in at the submit." for name in job.env_from]
    body = yaml.safe_dump(spec(job, config), sort_keys=False, allow_unicode=True, width=1000)
    return "".join(f"# {line}\n" for line in lines) + body


def spec(job: JobSpec, config: RunConfig) -> Tree:
    """Return the CustomJobSpec of a stage: a chief, and as many workers of the same description as are left."""
    launcher = config.launcher
    assert isinstance(launcher, VertexLauncher)
    counts = [1, job.job_nodes - 1] if job.job_nodes > 1 else [1]
    pool = {
        "machineSpec": _machine(launcher, config.hardware),
        "diskSpec": _present({"bootDiskType": launcher.boot_disk_type, "bootDiskSizeGb": launcher.boot_disk_size_gb}),
        "replicaCount": None,
        "containerSpec": _container(job, launcher),
    }
    has_output = launcher.tensorboard is not None  # it watches the folder `logs` there
    return _present(
        {
            # Copies: YAML would write the same object once and refer to it.
            "workerPoolSpecs": [{**copy.deepcopy(pool), "replicaCount": count} for count in counts],
            "scheduling": _scheduling(job, launcher),
            "serviceAccount": launcher.service_account,
            "network": launcher.network,
            "baseOutputDirectory": {"outputUriPrefix": bucket_url(job.run_dir, launcher)} if has_output else None,
            "tensorboard": launcher.tensorboard,
            "persistentResourceId": launcher.persistent_resource,
            "enableWebAccess": launcher.enable_web_access or None,
        }
    )


def custom_job(job: JobSpec, job_spec: Tree, launcher: VertexLauncher) -> Tree:
    """Return the CustomJob around a spec: what gcloud takes as options."""
    key = launcher.encryption_key
    return _present(
        {
            "displayName": display_name(job),
            "jobSpec": job_spec,
            "labels": {**launcher.labels, **own_labels(job)},
            "encryptionSpec": {"kmsKeyName": key} if key is not None else None,
        }
    )


def gcloud_copy(job: JobSpec, launcher: VertexLauncher, own: Path) -> str:
    """Return the command that brings a record, which lies in `own`, to where the nodes of its job look for it."""
    place = bucket_url(str(RunPaths(job.run_dir).own), launcher)
    return shlex.join(["gcloud", "storage", "rsync", "--recursive", str(own), place])


def gcloud(job: JobSpec, launcher: VertexLauncher, file: Path) -> str:
    """Return the command that submits the recorded `file` as we would, secrets apart."""
    labels = {**launcher.labels, **own_labels(job)}
    options = {
        "project": launcher.project,
        "region": launcher.location,
        "display-name": display_name(job),
        "labels": ",".join(f"{key}={value}" for key, value in labels.items()),
        "kms-key": launcher.encryption_key,
        "config": str(file),
    }
    words = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return shlex.join(["gcloud", "ai", "custom-jobs", "create", *words])


def display_name(job: JobSpec) -> str:
    """Return the name that the console shows; not what a job is found by."""
    return f"{job.run_id}-{job.stage}"[:_NAME_LENGTH]


def own_labels(job: JobSpec) -> dict[str, str]:
    """Return the labels by which a job is found again."""
    values = (job.run_id, job.stage, str(job.attempt))
    return dict(zip(OWN_LABELS, map(label, values), strict=True))


def label(text: str) -> str:
    """Return a label's value that no other text has: at most 63 lower-case letters, digits, `_` and `-`."""
    plain = re.sub(r"[^a-z0-9_-]", "-", text.lower())
    if plain == text and len(text) <= _LABEL_LENGTH:
        return text
    tail = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{plain[: _LABEL_LENGTH - 9]}-{tail}"


def with_secrets(tree: Tree, names: Collection[str], environ: Mapping[str, str]) -> Tree:
    """Return `tree` with the values of the variables `names`, for the API alone."""
    revealed = copy.deepcopy(tree)
    for pool in revealed["workerPoolSpecs"]:
        for variable in pool["containerSpec"].get("env", ()):
            if variable["name"] in names:
                variable["value"] = _literal(environ[variable["name"]])
    return revealed


def key_of(field: str) -> str:
    """Return which of our keys a field of the API follows, the field's own name if none."""
    return next((key for name, key in _KEYS.items() if re.search(rf"\b{name}\b", field)), field)


def bucket_url(path: str, launcher: VertexLauncher) -> str:
    """Return where a path below launcher.bucket_mount lies, as Google's services name it."""
    url = launcher.bucket_url if launcher.bucket_url.endswith("://") else f"{launcher.bucket_url.rstrip('/')}/"
    return url + path.removeprefix(launcher.bucket_mount).lstrip("/")


def _machine(launcher: VertexLauncher, hardware: Hardware) -> Tree:
    is_gpu = hardware.accelerator == "gpu"
    return _present(
        {
            "machineType": launcher.machine or "<launcher.machine>",
            "acceleratorType": hardware.accelerator_type if is_gpu else None,
            "acceleratorCount": hardware.devices if is_gpu else None,
            "reservationAffinity": _reservation(launcher.reservation),
        }
    )


def _reservation(name: str | None) -> Tree | None:
    if name is None:
        return None
    if name == "any":
        return {"reservationAffinityType": "ANY_RESERVATION"}
    return {"reservationAffinityType": "SPECIFIC_RESERVATION", "key": _RESERVATION_NAME, "values": [name]}


def _container(job: JobSpec, launcher: VertexLauncher) -> Tree:
    worker = str(RunPaths(job.run_dir).worker)
    stage = ["--stage", job.stage, "--attempt", str(job.attempt)]
    env = {name: _literal(value) for name, value in job.env.items()}
    if launcher.debug:
        env["TRAINWRIGHT_DEBUG"] = "1"
    env.update({name: f"<{name}>" for name in job.env_from})
    return _present(
        {
            "imageUri": launcher.image or job.image or "<launcher.image>",
            "command": [job.python, worker, job.run_dir, *stage],
            "env": [{"name": name, "value": env[name]} for name in sorted(env)] or None,
        }
    )


def _scheduling(job: JobSpec, launcher: VertexLauncher) -> Tree:
    restarts = launcher.restart_on_worker_restart and not launcher.disable_retries
    return _present(
        {
            "timeout": None if job.time_limit_s is None else f"{job.time_limit_s}s",
            "restartJobOnWorkerRestart": restarts or None,
            "strategy": launcher.strategy,
            "maxWaitDuration": None if launcher.max_wait_s is None else f"{launcher.max_wait_s}s",
            "disableRetries": launcher.disable_retries or None,
        }
    )


def _literal(value: str) -> str:
    """Return `value` so that Vertex AI, which expands $(NAME), leaves it as it is."""
    return value.replace("$(", "$$(")


def _present(tree: Tree) -> Tree:
    return {key: value for key, value in tree.items() if value is not None}
