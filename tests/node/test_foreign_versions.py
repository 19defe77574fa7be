from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path

from trainwright.node.foreign_versions import installed_versions


def test_versions_are_those_of_the_frameworks_environment(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.10" / "site-packages"
    for name in ("torch_neuronx-2.7.0.2.10", "neuronx_cc-2.20.9961.0+0acef03a", "numpy-1.26.4"):
        (packages / f"{name}.dist-info").mkdir(parents=True)
    assert installed_versions(str(tmp_path / "bin" / "python3")) == {
        "python": "3.10",
        "neuronx_cc": "2.20.9961.0+0acef03a",
        "torch_neuronx": "2.7.0.2.10",
    }


def test_an_interpreter_without_a_folder_is_this_one() -> None:
    found = installed_versions("python3")
    assert found["python"] == platform.python_version()
    assert found["torch"] == version("torch")


def test_an_environment_that_is_not_there_has_no_versions(tmp_path: Path) -> None:
    assert installed_versions(str(tmp_path / "bin" / "python3")) == {}
