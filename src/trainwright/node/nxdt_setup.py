"""What NxDT's launcher is given on one node: its settings, argv, environment and packages.

Sources: neuronx-distributed-training, examples/train.sh and train_setup.sh.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Mapping

from . import decision
from .drive import DriverError
from .neuron_cache import URL_VARIABLE
from .run_paths import RunPaths

SETTINGS_SCHEMA_VERSION = 1

_PACKAGES = ("neuronx-cc", "torch-neuronx", "neuronx-distributed", "neuronx-distributed-training", "libneuronxla")
_ASK_TIMEOUT_S = 120


def read_settings(paths: RunPaths, attempt: int) -> tuple[Path, Mapping[str, Any]]:
    """Return the folder of NxDT's files and the settings in it: of the submitted attempt that this one repeats.

    Raises DriverError when there are none.
    """
    return decision.read_settings(paths.nxdt, attempt, SETTINGS_SCHEMA_VERSION)


def command(
    settings: Mapping[str, Any],
    *,
    compiles: bool,
    folder: Path,
    config: str,
    node: int,
    num_nodes: int,
    master_addr: str,
    master_port: int,
) -> list[str]:
    """Return the argv that train.sh would start, with our YAML and none of its keys overridden.

    Hydra would make `outputs/DATE/TIME` in the checkout for each start, which others may share or only read.
    """
    programs = Path(settings["python"]).parent
    options = {
        "--nproc_per_node": settings["devices"],
        "--nnodes": num_nodes,
        "--node_rank": node,
        "--master_addr": master_addr,
        "--master_port": master_port,
    }
    torchrun = [str(programs / "torchrun"), *(str(word) for pair in options.items() for word in pair)]
    prefix = [str(programs / "neuron_parallel_compile")] if compiles else []
    quoted = str(folder / "hydra").replace("\\", "\\\\").replace("'", "\\'")  # in Hydra's grammar
    hydra = [f"hydra.run.dir='{quoted}'", "hydra.output_subdir=null"]
    return [*prefix, *torchrun, settings["orchestrator"], *hydra, f"--config-path={folder}", f"--config-name={config}"]


def environment(
    inherited: Mapping[str, str], settings: Mapping[str, Any], *, kept: Mapping[str, str], compiles: bool
) -> tuple[dict[str, str], list[str]]:
    """Return the environment of NxDT, and what is to be said of it.

    NxDT's orchestrator only fills variables that are unset, so one of the submitting shell beats the YAML; what the
    run's own config sets, `kept`, is meant to. Values are not printed: some are secrets.
    """
    # The orchestrator sets the cache for the ranks; neuron_parallel_compile, above them, must know it too.
    own = {URL_VARIABLE: settings["cache_url"], "COMPILE": "1" if compiles else "0"}
    env, notes = dict(inherited), []
    for name in settings["unset_env"]:
        if name not in env or env[name] == own.get(name):
            continue
        if name in kept and name not in own:
            notes.append(f"{name} is set by launcher.env or hardware.env and beats NxDT's YAML")
            continue
        del env[name]
        notes.append(f"unset {name}, which came from the shell and would have beaten NxDT's YAML")
    programs = str(Path(settings["python"]).parent)
    env["PATH"] = f"{programs}{os.pathsep}{env['PATH']}" if env.get("PATH") else programs
    return {**env, **own}, notes


def package_versions(python: str) -> dict[str, str | None]:
    """Return the versions of the packages that shape a compiled graph; None for one that is not installed.

    Raises DriverError when the interpreter does not answer.
    """
    code = (
        "import importlib.metadata as m, json, sys\n"
        "found = {d.metadata['Name'].lower().replace('_', '-'): d.version for d in m.distributions()}\n"
        "print(json.dumps({name: found.get(name) for name in sys.argv[1:]}))"
    )
    try:
        asked = subprocess.run(
            [python, "-c", code, *_PACKAGES], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=_ASK_TIMEOUT_S
        )
        versions: dict[str, str | None] = json.loads(asked.stdout.decode("utf-8").splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        raise DriverError(f"backend.python={python} does not tell its packages: {error}") from None
    return versions
