"""Let the node's own monitor write down once a minute what its devices do, beside the run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

from . import processes
from .run_paths import RunPaths

PERIOD_S = 60

_GPU_FIELDS = "timestamp,index,name,utilization.gpu,memory.used,memory.total,temperature.gpu,power.draw"
# Source: AWS Neuron documentation, Neuron Monitor user guide, JSON configuration.
_NEURON_CONFIG = {
    "period": f"{PERIOD_S}s",
    "neuron_runtimes": [{"tag_filter": ".*", "metrics": [{"type": "neuroncore_counters"}, {"type": "memory_used"}]}],
    "system_metrics": [{"type": "memory_info"}, {"type": "neuron_hw_counters"}],
}


def start(paths: RunPaths, stage: str, attempt: int, node: int) -> None:
    """Start the first monitor that this node has, if any. It ends with the worker, as all that the worker started.

    The monitor repeats by itself and writes to its file alone: one that hangs with a sick driver holds up nothing.
    """
    if shutil.which("nvidia-smi"):
        _run(
            ["nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,nounits", f"--loop={PERIOD_S}"],
            paths,
            paths.device_samples(stage, attempt, node, "csv"),
        )
    elif shutil.which("neuron-monitor"):
        paths.devices.mkdir(parents=True, exist_ok=True)
        config = paths.devices / f"neuron-monitor-node{node}.json"
        config.write_text(json.dumps(_NEURON_CONFIG, indent=1), encoding="utf-8")
        _run(["neuron-monitor", "-c", str(config)], paths, paths.device_samples(stage, attempt, node, "jsonl"))


def _run(command: list[str], paths: RunPaths, target: "os.PathLike[str]") -> None:
    parent = os.getpid()
    paths.devices.mkdir(parents=True, exist_ok=True)
    with open(target, "ab", buffering=0) as file:
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: processes.die_with_parent(parent),
        )
