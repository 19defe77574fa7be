"""Stand-ins for what lies outside of this project; one for each."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest


def sbatch_on_path(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, refusals: Sequence[str], is_taken: bool
) -> Callable[[], int]:
    """Put an sbatch first on PATH that answers its first calls with `refusals` and then is the real one.

    With `is_taken` the controller takes the refused job all the same. Returns a function that counts the calls.
    """
    real = shutil.which("sbatch")
    folder.mkdir()
    calls = folder / "calls"
    calls.write_text("")
    cases = "\n".join(f"  {number}) echo 'sbatch: error: {text}' >&2;;" for number, text in enumerate(refusals, 1))
    script = folder / "sbatch"
    script.write_text(
        f"""#!/bin/bash
echo call >> '{calls}'
number=$(wc -l < '{calls}')
if [ "$number" -gt {len(refusals)} ]; then exec {real} "$@"; fi
{f'{real} "$@" > /dev/null' if is_taken else ":"}
case "$number" in
{cases}
esac
exit 1
"""
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return lambda: len(calls.read_text().splitlines())


def device_monitor(folder: Path, name: str) -> str:
    """Make a program `name` that says its arguments and goes on as monitors do; return a PATH on which it is first."""
    folder.mkdir()
    program = folder / name
    program.write_text('#!/bin/bash\necho "$@"\nexec sleep infinity\n')
    program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"
