"""`trainwright convert` as a user types it: options, exit codes, reports."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Result
from trainwright.checkpoint.progress import shown
from trainwright.cli import main

GOLDEN = Path(__file__).parent / "golden" / "nxd" / "gqa_tp4_kv2_pp2_unfused"
HF = str(GOLDEN / "hf")
TO_NXD = ["hf-to-nxd", "--input", HF, "--tp", "4", "--pp", "2", "--kv-replicator", "2", "--no-fuse-qkv"]


@pytest.fixture
def convert(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    def run(*arguments: str) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["convert", *arguments])
        return Result(int(ended.value.code or 0), *capsys.readouterr())

    return run


def test_there_back_and_verified(convert: Callable[..., Result], tmp_path: Path) -> None:
    nxd, back = str(tmp_path / "nxd"), str(tmp_path / "back")
    there = convert(*TO_NXD, "--output", nxd, "--layout", "xser", "--json")
    assert there.code == 0
    assert json.loads(there.out)["degrees"] == {
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 2,
        "kv_replicator": 2,
        "fuse_qkv": False,
    }
    assert convert("nxd-to-hf", "--input", nxd, "--output", back, "--base", HF, "--max-shard-size", "50KB").code == 0
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 2
    assert convert("verify", back, "--against", HF).code == 0
    verified = convert("verify", nxd, "--against", HF, "--json")
    assert (verified.code, json.loads(verified.out)["problems"]) == (0, [])


def test_an_export_has_the_bases_types_in_the_bases_files_if_asked_to(
    convert: Callable[..., Result], tmp_path: Path
) -> None:
    nxd, back = str(tmp_path / "nxd"), tmp_path / "back"
    convert(*TO_NXD, "--output", nxd, "--dtype", "fp32")
    as_base = ("--dtype", "base", "--max-shard-size", "base")
    assert convert("nxd-to-hf", "--input", nxd, "--output", str(back), "--base", HF, *as_base).code == 0
    sizes = [
        {path.name: path.stat().st_size for path in Path(folder).glob("*.safetensors")} for folder in (HF, str(back))
    ]
    assert sizes[0].keys() == sizes[1].keys()
    assert len(sizes[0]) == 2
    assert convert("verify", str(back), "--against", HF).code == 0


def test_running_it_again_says_that_nothing_was_to_do(convert: Callable[..., Result], tmp_path: Path) -> None:
    convert(*TO_NXD, "--output", str(tmp_path / "nxd"))
    again = convert(*TO_NXD, "--output", str(tmp_path / "nxd"))
    assert again.code == 0
    assert "is complete already" in again.out


def test_refusals_are_lines_on_standard_error_and_exit_code_2(convert: Callable[..., Result], tmp_path: Path) -> None:
    refused = convert(*TO_NXD, "--output", str(tmp_path / "x-v1"), "--pp", "9")
    assert refused.code == 2
    assert [line.split(":")[:2] for line in refused.err.splitlines()] == [
        ["error", " --pp"],
        ["error", " --output " + str(tmp_path / "x-v1")],
    ]


def test_a_failed_verification_is_exit_code_1(convert: Callable[..., Result], tmp_path: Path) -> None:
    convert(*TO_NXD, "--output", str(tmp_path / "nxd"))
    shard = next((tmp_path / "nxd" / "model").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1])
    failed = convert("verify", str(tmp_path / "nxd"))
    assert failed.code == 1
    assert failed.err.startswith(f"error: model/{shard.name} has ")


@pytest.mark.parametrize("size", ["5 apples", "0GB", ""])
def test_a_size_that_is_none_is_refused(convert: Callable[..., Result], tmp_path: Path, size: str) -> None:
    refused = convert("nxd-to-hf", "--input", HF, "--output", HF, "--base", HF, "--max-shard-size", size)
    assert refused.code == 2
    assert "write 5GB (10^9 bytes) or 5GiB (2^30)" in refused.err


def test_progress_without_a_terminal_is_a_few_lines_with_bytes_and_rate(capsys: pytest.CaptureFixture[str]) -> None:
    with shown("hf-to-nxd") as report:
        for done in range(1, 1001):
            report(done * 2**24, 1000 * 2**24)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 20
    assert lines[-1].startswith("hf-to-nxd: 15.62 of 15.62 GiB, ")
    assert lines[-1].endswith("MiB/s")


def test_progress_on_a_terminal_is_a_bar_with_bytes_and_rate(tmp_path: Path) -> None:
    program = "import sys; from trainwright.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", program, "convert", *TO_NXD, "--output", str(tmp_path / "nxd")]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "NO_COLOR": "1"}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, stderr=theirs, stdout=subprocess.DEVNULL, env=environment)
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # how the end of a terminal shows
        while piece := os.read(ours, 4096):
            seen += piece
    os.close(ours)
    assert process.wait() == 0
    assert re.search(rb"hf-to-nxd .* 215.5/215.5 KiB .*B/s", seen)
