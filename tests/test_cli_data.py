"""`trainwright data inspect` as a user types it: files, runs, exit codes, reports."""

import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Result
from tests.dataset.words import save_words, write_lengths
from trainwright.cli import main


@pytest.fixture
def inspect(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """Return `trainwright data inspect` as a function, run in `tmp_path`, which holds a tokenizer and two files."""
    monkeypatch.chdir(tmp_path)
    save_words(tmp_path / "words")
    write_lengths(tmp_path / "fine.jsonl", [4, 4, 5])
    write_lengths(tmp_path / "long.jsonl", [4, 12, 5])

    def run(*arguments: str) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["data", "inspect", *arguments])
        return Result(int(ended.value.code or 0), *capsys.readouterr())

    return run


def test_a_file_in_which_nothing_is_lost_is_exit_code_0_with_warnings(inspect: Callable[..., Result]) -> None:
    found = inspect("fine.jsonl", "--tokenizer", "words", "--seq-length", "10", "--global-batch-size", "2")
    assert (found.code, found.err) == (0, "")
    assert found.out.splitlines() == [
        "fine.jsonl: 3 records; tokenizer words, 100 entries; NxDT, with packing, 10 tokens a sample",
        "tokens  min  p50  p90  p99  max  mean  sum",
        "input   1    1    1    1    1    1.0   3",
        "output  1    1    2    2    2    1.3   4",
        "record  4    4    5    5    5    4.3   13",
        "samples                2",
        "steps an epoch         1 of 2 samples",
        "left out an epoch      0 samples that fill no batch",
        "records in samples     3, 1.5 a sample",
        "prompt tokens          6 of 20 (30.0%)",
        "separators             3 of 20 (15.0%)",
        "padding tokens         4 of 20 (20.0%)",
        *(line for line in found.out.splitlines() if line.startswith("warning [")),
    ]
    assert "warning [prompt-trained] 6 tokens of 20" in found.out


def test_lost_records_are_exit_code_1(inspect: Callable[..., Result]) -> None:
    found = inspect("fine.jsonl", "long.jsonl", "--tokenizer", "words", "--seq-length", "10", "--json")
    assert found.code == 1
    fine, long = json.loads(found.out)["files"]
    assert [row["id"] for row in fine["findings"] if row["severity"] == "error"] == []
    assert [row["id"] for row in long["findings"] if row["severity"] == "error"] == ["dropped"]
    assert (long["nxdt"]["dropped_records"], long["nxdt"]["dropped_tokens"]) == (1, 12)


def test_without_packing_they_would_fail_a_step(inspect: Callable[..., Result]) -> None:
    found = inspect("long.jsonl", "--tokenizer", "words", "--seq-length", "10", "--no-packing")
    assert found.code == 1
    assert "NxDT, without packing" in found.out
    assert "error [too-long] 1 record (line 2)" in found.out


def test_samples_are_shown_as_text_and_as_columns(inspect: Callable[..., Result]) -> None:
    arguments = ("fine.jsonl", "--tokenizer", "words", "--seq-length", "10", "--samples", "1")
    text = inspect(*arguments)
    assert "sample 1: line 1, 2; 10 tokens, 2 of them with label -100" in text.out
    assert text.out.splitlines()[-1] == "<s> w0 w0 </s> </s> <s> w1 w1 </s> </s>"
    (sample,) = json.loads(inspect(*arguments, "--json").out)["files"][0]["first_samples"]
    assert sample["records"] == [1, 2]
    assert sample["labels"] == [1, 3, 3, 2, -100, 1, 4, 4, 2, -100]


def test_faults_of_files_are_exit_code_2_and_other_files_are_told_of(
    inspect: Callable[..., Result], tmp_path: Path
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"input": "w1"}\n')
    found = inspect("bad.jsonl", "fine.jsonl", "absent.jsonl", "x.csv", "--tokenizer", "words", "--seq-length", "9")
    assert found.code == 2
    assert found.out.startswith("fine.jsonl: 3 records")
    assert found.err.splitlines() == [
        "error: x.csv: cannot be inspected; give a .jsonl or .json file, or a path to which .bin and .idx can be added",
        "error: FILE bad.jsonl: bad.jsonl has a fault; correct or remove what is named",
        "  line 1: field 'output' is missing",
        "error: FILE absent.jsonl: absent.jsonl cannot be read: No such file or directory",
    ]


def test_what_is_missing_is_named_at_once(inspect: Callable[..., Result]) -> None:
    found = inspect("fine.jsonl", "long.jsonl")
    assert found.code == 2
    assert [line.split(":")[1] for line in found.err.splitlines()] == [" --tokenizer", " --seq-length"]


def test_a_run_brings_files_tokenizer_and_recipe(inspect: Callable[..., Result], tmp_path: Path) -> None:
    run = (
        "model=tanuki_8b",
        "hardware=trn1",
        "data.train_path=fine.jsonl",
        "data.val_path=long.jsonl",
        "data.tokenizer.name=words",
        "data.seq_length=10",
        "model.vocab_size=96",
        "data.global_batch_size=1",
        "~local",
    )
    found = inspect(*run, "--json")
    assert found.code == 1
    files = json.loads(found.out)["files"]
    assert [file["path"] for file in files] == ["fine.jsonl", "long.jsonl"]
    assert files[0]["recipe"] == {
        "seq_length": 10,
        "backend": "nxdt",
        "packing": True,
        "num_records": None,
        "global_batch_size": 1,
        "data_parallel_size": 1,
        "max_steps": 100,
        "vocab_size": 96,
    }
    assert files[0]["nxdt"]["epochs"] == 50.0
    native = inspect("model=llama_tiny", "data=tanuki_sft", *run[4:], "long.jsonl", "--seq-length", "5")
    assert native.code == 0
    assert "long.jsonl: 3 records; tokenizer words, 100 entries; native, 5 tokens a sample" in native.out
    assert "samples                4" in native.out
    fetched = inspect(*run[:4], f"backend.model_dir={save_words(tmp_path / 'fetched', num_words=7)}", "~local")
    assert "tokenizer fetched, 10 entries" in fetched.out


def test_a_run_that_cannot_be_composed_or_names_no_file_is_refused(inspect: Callable[..., Result]) -> None:
    assert "no_such" in inspect("model=no_such").err
    assert inspect("model=gpt_small", "~local").err == (
        "error: data=shakespeare names no data.train_path and no data.data_prefix; give FILE or PREFIX\n"
    )
    unset = inspect("model=tanuki_8b", "hardware=trn1", "~local")
    assert unset.code == 2
    assert unset.err.startswith("error: data.train_path=<site.slurm.shared_dir>/data/training.jsonl needs a fact of")


def test_progress_on_a_terminal_is_a_bar(inspect: Callable[..., Result], tmp_path: Path) -> None:
    program = "import sys; from trainwright.cli import main; main(sys.argv[1:])"
    given = ["data", "inspect", "fine.jsonl", "--tokenizer", "words", "--seq-length", "10"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "NO_COLOR": "1"}
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", program, *given], cwd=tmp_path, stderr=theirs, stdout=subprocess.DEVNULL, env=environment
    )
    os.close(theirs)
    seen = b""
    with contextlib.suppress(OSError):  # how the end of a terminal shows
        while piece := os.read(ours, 4096):
            seen += piece
    os.close(ours)
    assert process.wait() == 0
    assert b"fine.jsonl" in seen
    assert b"bytes" in seen
