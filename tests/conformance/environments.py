"""Python environments that hold other systems' own code, built once per requirement file and kept between runs."""

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ENVS = Path(__file__).parents[1] / "envs"


def python_of(name: str) -> Path:
    """Return the interpreter of the environment that `tests/envs/NAME.txt` describes; skip where there is none.

    Environments lie below TRAINWRIGHT_ENVS (~/.cache/trainwright-envs), by a hash of their file. One that is not there
    is built only if TRAINWRIGHT_CONFORMANCE=1: it takes one to two minutes and 2 to 3 GB (2026-11-29).
    """
    requirements = ENVS / f"{name}.txt"
    version = "{}.{}".format(*sys.version_info)
    key = hashlib.sha256(f"{version}\n{requirements.read_text()}".encode()).hexdigest()[:12]
    home = Path(os.environ.get("TRAINWRIGHT_ENVS", "~/.cache/trainwright-envs")).expanduser()
    environment = home / f"{name}-{key}"
    if not _is_built(environment) and os.environ.get("TRAINWRIGHT_CONFORMANCE") != "1":
        pytest.skip(f"{environment} is not built; TRAINWRIGHT_CONFORMANCE=1 builds it, in minutes")
    home.mkdir(parents=True, exist_ok=True)
    with (home / f"{environment.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_built(environment):
            _build(environment, requirements)
    return environment / "bin" / "python"


def _is_built(environment: Path) -> bool:
    return (environment / "complete").is_file()


def _build(environment: Path, requirements: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
    install = [environment / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check"]
    # torch first: packages that build from source look for it.
    torch = next(line for line in requirements.read_text().splitlines() if line.startswith("torch=="))
    subprocess.run([*install, torch], check=True)
    subprocess.run([*install, "-r", requirements], check=True)
    (environment / "complete").touch()
