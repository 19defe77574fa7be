"""The built wheel, in an environment of its own, does what a checkout does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def trainwright(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the command of a clean environment that holds the wheel and what it requires, no extra."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    pip = [folder / "venv" / "bin" / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel]
    subprocess.run(pip, check=True, capture_output=True)
    return folder / "venv" / "bin" / "trainwright"


def run(command: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run([command, *arguments], cwd=cwd, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--help",), "rules"),
        (("rules",), "batch-divides"),
        (("train", "--help"), "model"),
        (("train", "--cfg", "job"), "name: gpt_small"),
        (("train", "--cfg", "job", "experiment=tanuki_8b_sft"), "name: hf_tanuki"),
        (("train", "model=tanuki_8b", "hardware=trn1", "dry_run=true"), "7,512,264,704 parameters"),
        (("train", "dry_run=true"), "13,733,632 parameters"),
        (("image", "render", "hardware=h100", "site.vertex.project=p"), "/container-image-repo/trainwright-native:"),
    ],
)
def test_an_installed_wheel_composes_and_records(
    arguments: tuple[str, ...], told: str, trainwright: Path, tmp_path: Path
) -> None:
    result = run(trainwright, *arguments, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert told in result.stdout


def test_without_the_native_extra_a_real_run_names_it(trainwright: Path, tmp_path: Path) -> None:
    result = run(trainwright, "train", cwd=tmp_path)
    assert result.returncode == 3
    assert "pip install 'trainwright[native]'" in result.stderr
    assert not list(tmp_path.iterdir())


def test_without_the_native_extra_tensorboard_names_it(trainwright: Path, tmp_path: Path) -> None:
    (tmp_path / "one" / "run" / "events").mkdir(parents=True)
    result = run(trainwright, "tensorboard", f"{tmp_path}/one", cwd=tmp_path)
    assert result.returncode == 2
    assert "tensorboard is not installed: pip install 'trainwright[native]'" in result.stderr


def test_an_image_from_a_wheel_is_the_one_from_its_checkout(trainwright: Path, tmp_path: Path) -> None:
    overrides = ("image", "render", "--json", "~local", "hardware=h100", "site.vertex.project=p")
    from_wheel = run(trainwright, *overrides, cwd=tmp_path)
    from_checkout = run(Path(sys.executable).with_name("trainwright"), *overrides, cwd=tmp_path)
    assert json.loads(from_wheel.stdout)["image"] == json.loads(from_checkout.stdout)["image"]
