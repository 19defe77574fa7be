"""Programs of the whole package, started out of the worker's file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from trainwright.node.run_paths import RunPaths
from trainwright.worker_zip import build_worker

FETCH = "trainwright.backends.nxdt.fetch"


def program(run_dir: Path, *options: str, words: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    worker = RunPaths(run_dir).worker
    worker.parent.mkdir(parents=True)
    build_worker(worker)
    argv = [sys.executable, *words, str(worker), "program", FETCH, str(run_dir), *options]
    return subprocess.run(argv, capture_output=True, text=True)


def test_an_interpreter_without_the_package_is_named_in_the_status(tmp_path: Path) -> None:
    ended = program(tmp_path, "--attempt", "3", words=("-I", "-S"))
    reason = RunPaths(tmp_path).rank_reason("fetch", 3, 0).read_text()
    assert (ended.returncode, ended.stderr) == (2, f"error: {reason}")
    assert f"launcher.python: {sys.executable} (Python 3." in reason
    assert "has no trainwright, which the stage fetch needs on the node" in reason


def test_one_with_the_package_becomes_the_program(tmp_path: Path) -> None:
    ended = program(tmp_path, "--help")
    assert (ended.returncode, ended.stdout.split("[")[0]) == (0, f"usage: python -m {FETCH} ")
