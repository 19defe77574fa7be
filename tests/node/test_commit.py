"""A directory counts only once its commit file is written, parses and fits the files."""

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainwright.node import commit


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "step=1"
    (directory / "shards").mkdir(parents=True)
    (directory / "model.bin").write_bytes(b"weights")
    (directory / "shards" / "0.bin").write_bytes(b"")
    return directory


def test_metadata_comes_back_with_nan_and_infinity(checkpoint: Path) -> None:
    commit.write_commit(checkpoint, {"step": 1, "val_loss": math.nan, "best": -math.inf, "lr": 1e-05})
    metadata = commit.read_commit(checkpoint)
    assert metadata is not None
    assert math.isnan(metadata.pop("val_loss"))
    assert metadata == {"step": 1, "best": -math.inf, "lr": 1e-05}
    assert commit.why_incomplete(checkpoint) is None
    assert commit.verify(checkpoint) == []


def test_without_a_commit_file_nothing_counts(checkpoint: Path) -> None:
    assert commit.read_commit(checkpoint) is None
    assert "no commit.json" in str(commit.why_incomplete(checkpoint))
    assert commit.read_commit(checkpoint / "nowhere") is None


def test_a_commit_file_cut_at_any_byte_counts_as_none(checkpoint: Path) -> None:
    commit.write_commit(checkpoint, {"step": 1})
    path = checkpoint / commit.COMMIT_FILE
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert commit.read_commit(checkpoint) is None, f"accepted after {length} of {len(whole)} bytes"
    assert "does not parse" in str(commit.why_incomplete(checkpoint))


@pytest.mark.parametrize(
    "content",
    [
        b"[]",
        b"{}",
        b"null",
        b'{"schema_version": 1}',
        b"\xff\xfe",
        b'{"schema_version": 2, "files": {}, "metadata": {}}',
    ],
)
def test_a_foreign_commit_file_counts_as_none(checkpoint: Path, content: bytes) -> None:
    (checkpoint / commit.COMMIT_FILE).write_bytes(content)
    assert commit.read_commit(checkpoint) is None


def test_a_missing_or_shortened_file_is_named(checkpoint: Path) -> None:
    commit.write_commit(checkpoint, {})
    (checkpoint / "model.bin").write_bytes(b"we")
    assert commit.why_incomplete(checkpoint) == "model.bin has 2 bytes, 7 were committed"
    (checkpoint / "model.bin").write_bytes(b"weights")
    (checkpoint / "shards" / "0.bin").unlink()
    assert commit.why_incomplete(checkpoint) == "shards/0.bin is missing"
    assert commit.read_commit(checkpoint) is None
    assert commit.verify(checkpoint) == ["shards/0.bin is missing"]


def test_verify_finds_a_changed_byte_that_the_size_hides(checkpoint: Path) -> None:
    commit.write_commit(checkpoint, {})
    (checkpoint / "model.bin").write_bytes(b"weighty")
    assert commit.read_commit(checkpoint) == {}
    (finding,) = commit.verify(checkpoint)
    assert finding.startswith("model.bin has checksum")


def test_a_committed_directory_is_not_committed_again(checkpoint: Path) -> None:
    commit.write_commit(checkpoint, {"step": 1})
    with pytest.raises(FileExistsError):
        commit.write_commit(checkpoint, {"step": 2})
    assert commit.read_commit(checkpoint) == {"step": 1}


def test_sweep_removes_the_uncommitted_and_keeps_the_damaged(checkpoint: Path) -> None:
    parent = checkpoint.parent
    killed, torn, damaged = (parent / name for name in ("killed", "torn", "damaged"))
    for directory in (killed, torn, damaged):
        directory.mkdir()
        (directory / "model.bin").write_bytes(b"weights")
    (torn / commit.COMMIT_FILE).write_text('{"schema_version": 1, "met')
    commit.write_commit(damaged, {})
    (damaged / "model.bin").write_bytes(b"")
    commit.write_commit(checkpoint, {})
    (parent / "events.log").write_text("a file is not a checkpoint")

    assert commit.sweep(parent) == [killed, torn]
    assert sorted(path.name for path in parent.iterdir()) == ["damaged", "events.log", "step=1"]


def test_sweep_spares_what_another_writer_just_changed(checkpoint: Path) -> None:
    assert commit.sweep(checkpoint.parent, unchanged_for_s=3600) == []
    two_hours_ago = time.time() - 7200
    for path in [checkpoint, *checkpoint.rglob("*")]:
        os.utime(path, (two_hours_ago, two_hours_ago))
    assert commit.sweep(checkpoint.parent, unchanged_for_s=3600) == [checkpoint]


def test_a_writer_killed_before_its_commit_leaves_nothing_that_counts(tmp_path: Path) -> None:
    script = "import os, sys; open(sys.argv[1] + '/model.bin', 'wb').write(b'w' * 100); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert (tmp_path / "model.bin").exists()
    assert commit.read_commit(tmp_path) is None


def test_the_module_stands_alone_without_site_packages(checkpoint: Path) -> None:
    commit.write_commit(checkpoint, {"step": 7})
    script = (
        "import pathlib, sys; sys.path.insert(0, sys.argv[1]); import commit;"
        "print(commit.read_commit(pathlib.Path(sys.argv[2])))"
    )
    command = [sys.executable, "-S", "-I", "-c", script, str(Path(commit.__file__).parent), str(checkpoint)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "{'step': 7}\n"


def test_a_single_file_is_committed_beside_itself(tmp_path: Path) -> None:
    file = tmp_path / "training.jsonl"
    file.write_text("{}\n")
    (tmp_path / "other").write_text("not of it")
    assert commit.read_commit(file) is None
    commit.write_commit(file, {"source": "s3"})
    assert (tmp_path / "training.jsonl.commit.json").exists()
    assert commit.read_commit(file) == {"source": "s3"}
    assert commit.verify(file) == []
    file.write_text("[]\n")
    assert commit.verify(file)[0].startswith("training.jsonl has checksum")
    file.write_text("{")
    assert commit.why_incomplete(file) == "training.jsonl has 1 bytes, 3 were committed"
    file.unlink()
    assert commit.read_commit(file) is None
