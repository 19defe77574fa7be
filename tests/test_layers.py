"""Imports go down the layers only, heavy ones stay in their leaf, and what must start fast starts light."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "trainwright"

# From the bottom up; a module imports its own layer and those below.
LAYERS = (
    ("errors", "places", "node"),
    (
        "config_problems",
        "config_types",
        "config_backend",
        "config_launcher",
        "config_exp_manager",
        "config",
        "job",
        "dataset",
        "gcloud",
        "storage",
        "worker_zip",
        "code_state",
    ),
    (
        "plan",
        "scheduler",
        "stages",
        "exp_manager",
        "checkpoint",
        "fetch",
        "image",
        "cloud_setup",
        "tensorboard_service",
    ),
    ("rules",),
    ("preflight", "backends", "registry"),
    ("report",),
    ("dispatch",),
    ("follow",),
    (
        "app",
        "cli",
        "cli_cloud",
        "cli_command",
        "cli_convert",
        "cli_data",
        "cli_data_build",
        "cli_data_options",
        "cli_data_pair",
        "cli_data_sft",
        "cli_image",
        "cli_neuron_cache",
        "cli_runs",
        "cli_tensorboard",
    ),
)
HEAVY = {"torch", "lightning", "transformers", "tensorboard", "google"}
MODULES = sorted(SOURCE.rglob("*.py"))


def layer_of(module: str) -> int:
    (found,) = (i for i, layer in enumerate(LAYERS) if module.split(".")[0] in layer)
    return found


def imports(path: Path, *, at_top: bool = False) -> Iterator[str]:
    """Yield what a file imports, full names; `at_top` leaves out what functions import."""
    tree = ast.parse(path.read_text())
    for node in tree.body if at_top else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def name_of(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")


def test_every_module_has_a_layer() -> None:
    assert {name_of(path).split(".")[0] for path in MODULES} - {"__init__"} == {
        part for layer in LAYERS for part in layer
    }


@pytest.mark.parametrize("path", [path for path in MODULES if path != SOURCE / "__init__.py"], ids=name_of)
def test_a_module_imports_its_own_layer_and_below(path: Path) -> None:
    ours = {name.split(".")[1] for name in imports(path) if name.startswith("trainwright.")}
    ours &= {part for layer in LAYERS for part in layer}
    above = {name for name in ours if layer_of(name) > layer_of(name_of(path))}
    assert not above
    assert not any(name.startswith("hydra_plugins") for name in imports(path))


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_torch_and_the_like_stay_in_the_native_backend(path: Path) -> None:
    in_native = name_of(path).startswith("backends.native") and name_of(path) != "backends.native.render"
    heavy = {name.split(".")[0] for name in imports(path, at_top=name_of(path).startswith("checkpoint"))} & HEAVY
    assert in_native or not heavy


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("trainwright.dispatch", ["torch", "lightning", "transformers", "google.auth", "grpc", "numpy"]),
        ("trainwright.cli", ["torch", "hydra", "pydantic", "omegaconf"]),
        ("hydra_plugins.trainwright_launcher.search_path", ["torch", "pydantic"]),
        ("hydra_plugins.trainwright_launcher.launcher", ["torch", "pydantic"]),
        ("hydra_plugins.trainwright_launcher._vertex", ["torch", "grpc", "google.auth", "google.cloud.aiplatform_v1"]),
        ("hydra_plugins.trainwright_launcher.sweeper", ["torch", "pydantic"]),
    ],
)
def test_importing_loads_nothing_heavy(module: str, absent: list[str]) -> None:
    code = f"import sys, {module}; print([name for name in {absent} if name in sys.modules])"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert asked.stdout.strip() == "[]"


def test_a_foreign_hydra_application_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("time: 12:00:00\n")
    (tmp_path / "foreign.py").write_text(
        "import hydra\n"
        "@hydra.main(config_path='.', config_name='config', version_base='1.3')\n"
        "def main(cfg): print(cfg.time, hydra.core.hydra_config.HydraConfig.get().runtime.config_sources)\n"
        "main()\n"
    )
    command = [sys.executable, "foreign.py", f"hydra.run.dir={tmp_path}/out"]
    asked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert asked.stdout.startswith("43200 ")  # stock YAML
    assert "trainwright" not in asked.stdout
