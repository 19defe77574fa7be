"""Copies of data sets to a node's own disk, and what is printed of a cluster's variables."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.fakes import gcloud_on_path
from tests.node import living
from trainwright.node import data_copy, masking
from trainwright.node.data_copy import DataCopyError, DataSet, copy_all

DEADLINE_S = 60  # for conditions that must come true; a machine under load is slow, not wrong
wait_for = partial(living.wait_for, deadline_s=DEADLINE_S)
COPY = """
import json, sys
from trainwright.node.data_copy import DataSet, copy_all
copy_all([DataSet.of(json.loads(sys.argv[1]))], lambda line: print(line, flush=True))
"""


def data_set(folder: Path, name: str = "wiki", content: bytes = b"tokens" * 1000) -> DataSet:
    source = folder / "gcs" / "bucket" / "data" / name
    source.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{source}.bin").write_bytes(content)
    Path(f"{source}.idx").write_bytes(content[:100])
    return DataSet(str(source), str(folder / "ssd" / name), f"gs://bucket/data/{name}")


def copied(one: DataSet) -> list[bytes]:
    return [Path(one.target + suffix).read_bytes() for suffix in data_copy.SUFFIXES]


def source_of(one: DataSet) -> list[bytes]:
    return [Path(one.source + suffix).read_bytes() for suffix in data_copy.SUFFIXES]


def copy(*data_sets: DataSet) -> list[str]:
    """Copy and return what was said."""
    said: list[str] = []
    copy_all(data_sets, said.append)
    return said


def test_data_is_copied_once_and_found_by_the_next_start(tmp_path: Path) -> None:
    sets = [data_set(tmp_path), data_set(tmp_path, "code", b"other" * 77)]
    (tmp_path / "gcs" / "bucket" / "data" / "another.bin").write_bytes(b"not asked for")
    said = copy(*sets)
    assert [copied(one) for one in sets] == [source_of(one) for one in sets]
    assert any("(100%)" in line and "MiB/s" in line for line in said)
    assert sorted(path.name for path in (tmp_path / "ssd").iterdir() if path.suffix != ".lock") == [
        "code.bin", "code.copied.json", "code.idx", "wiki.bin", "wiki.copied.json", "wiki.idx",
    ]  # fmt: skip
    before = [path.stat() for path in sorted((tmp_path / "ssd").iterdir()) if path.suffix != ".lock"]
    assert copy(*sets) == [f"data: {one.target} is there already" for one in sets]
    assert [path.stat() for path in sorted((tmp_path / "ssd").iterdir()) if path.suffix != ".lock"] == before


def test_files_of_several_pieces_are_whole(tmp_path: Path) -> None:
    piece = data_copy._PIECE_BYTES
    one = data_set(tmp_path)
    with open(f"{one.source}.bin", "wb") as file:  # sparse: of two pieces, the last one short
        file.truncate(piece + 5)
        for offset in (0, piece - 1, piece, piece + 4):
            file.seek(offset)
            file.write(b"x")
    copy(one)
    with open(f"{one.target}.bin", "rb") as file:
        assert file.seek(0, os.SEEK_END) == piece + 5
        for offset in (0, piece - 1, piece, piece + 4):
            file.seek(offset)
            assert file.read(1) == b"x"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda one: Path(f"{one.source}.bin").write_bytes(b"longer now" * 1000), "has 10000 bytes now, it had 6000"),
        (lambda one: os.utime(f"{one.source}.idx", (1, 1)), "the source's .idx has been written anew"),
        (lambda one: Path(f"{one.target}.bin").write_bytes(b"cut"), "wiki.bin is not what was copied"),
        (lambda one: one.marker.unlink(), "there is no whole copy"),
        (lambda one: one.marker.write_text('{"fro'), "wiki.copied.json was cut short"),
        (lambda one: one.marker.write_text('{"from": "/gcs/other", "files": {}}'), "is a copy of /gcs/other"),
    ],
)
def test_what_does_not_hold_any_more_is_copied_anew(
    change: Callable[[DataSet], object], why: str, tmp_path: Path
) -> None:
    one = data_set(tmp_path)
    copy(one)
    change(one)
    assert why in copy(one)[0]
    assert copied(one) == source_of(one)
    assert copy(one) == [f"data: {one.target} is there already"]


def test_what_is_missing_or_does_not_fit_is_told_before_anything_is_copied(tmp_path: Path) -> None:
    one, lost, empty, huge = (data_set(tmp_path, name) for name in ("wiki", "lost", "empty", "huge"))
    Path(f"{lost.source}.idx").unlink()
    with pytest.raises(DataCopyError, match=r"lost\.idx not there"):
        copy(one, lost)
    Path(f"{empty.source}.idx").write_bytes(b"")
    with pytest.raises(DataCopyError, match=r"empty\.idx empty"):
        copy(one, empty)
    os.truncate(f"{huge.source}.bin", 1 << 42)
    with pytest.raises(DataCopyError, match=r"the data needs 4096\.00 GiB; set a larger launcher\.boot_disk_size_gb"):
        copy(one, huge)
    assert not one.marker.exists()


def test_gcloud_copies_the_files_of_the_prefix_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = gcloud_on_path(tmp_path / "bin", monkeypatch, buckets=tmp_path / "gcs")
    one = replace(data_set(tmp_path, "wiki.a"), by_rsync=True)
    for other in ("wiki-a", "wiki.a.b", "code"):
        data_set(tmp_path, other)
    copy(one)
    assert copied(one) == source_of(one)
    (call,) = calls()
    assert call.startswith(f"gcloud storage rsync gs://bucket/data {one.draft} --exclude=")
    assert not list((tmp_path / "ssd").glob("code*"))


def test_a_gcloud_that_fails_or_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = replace(data_set(tmp_path), by_rsync=True)
    gcloud_on_path(tmp_path / "bin", monkeypatch, failing={"storage rsync": 3})
    with pytest.raises(DataCopyError, match="ended with exit code 3"):
        copy(one)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert "data: no gcloud on this machine" in copy(one)[1]
    assert copied(one) == source_of(one)


def test_two_processes_copy_once_and_a_killed_one_leaves_nothing_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = gcloud_on_path(tmp_path / "bin", monkeypatch, buckets=tmp_path / "gcs")
    one = data_set(tmp_path)
    hold = tmp_path / "gcs" / "hold"
    hold.touch()
    entry = json.dumps({"from": one.source, "to": one.target, "url": one.url, "copy": "rsync"})
    processes: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        with open(tmp_path / f"out-{len(processes)}", "wb") as out:
            process = subprocess.Popen([sys.executable, "-c", COPY, entry], stdout=out, stderr=out)
        processes.append(process)
        return process

    try:
        killed = start()
        wait_for(lambda: (one.draft / "wiki.bin").exists())
        waiting = start()
        wait_for(lambda: f"waiting for process {killed.pid}, which copies" in (tmp_path / "out-1").read_text())
        killed.send_signal(signal.SIGKILL)
        wait_for(lambda: len(calls()) == 2)
        assert not one.marker.exists()
        hold.unlink()
        assert waiting.wait(DEADLINE_S) == 0
        assert start().wait(DEADLINE_S) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert copied(one) == source_of(one)
    assert not one.draft.exists()
    assert (tmp_path / "out-2").read_text() == f"data: {one.target} is there already\n"
    assert len(calls()) == 2


SECRETS = {
    "AIP_API_KEY": "9f8e7d",
    "NCCL_AUTH": "tell-none",
    "CLOUD_ML_TOKEN": "tok-1",
    "MASTER_PASSWORD": "hunter2",
    "TRAINWRIGHT_MINE": "of-env-from",
    "NCCL_CONF_URL": "https://user:pass-word@host/x?a=b",
    "AIP_HEADER": "Authorization: Bearer abcdef.123456",
    "CLOUD_ML_ARGS": "--lr 0.1 --api-key sesame --hf-token=abcde --verbose",
    "TF_CONFIG": json.dumps({
        "cluster": {"chief": ["h0:2222"]},
        "job": json.dumps({"job_args": ["--token", "in-json", "--secret=in-list"], "password": "nested"}),
        "mine": "of-env-from",
        "hub": "hf_abcdefghijklmnopq",
    }),
    "HF_TOKEN": "not of the cluster",
}  # fmt: skip


def test_what_is_printed_of_a_cluster_holds_no_secret() -> None:
    told = masking.cluster_variables(
        {
            **SECRETS,
            "SLURM_JWT": "of-slurm",
            "NCCL_SEEN": "x eyJhbGci.eyJzdWIi.c2ln y",
            "NCCL_DEBUG": "VERSION",
            "MASTER_ADDR": "h0",
            "HOME": "/root",
        },
        hidden=["TRAINWRIGHT_MINE"],
    )
    text = "\n".join(told)
    for secret in (
        "9f8e7d", "tell-none", "tok-1", "hunter2", "of-env-from", "pass-word", "abcdef", "sesame", "abcde", "in-json",
        "in-list", "nested", "hf_abc", "not of the cluster", "/root", "of-slurm", "eyJ", "c2ln",
    ):  # fmt: skip
        assert secret not in text, secret
    assert "NCCL_DEBUG=VERSION" in told
    assert "MASTER_ADDR=h0" in told
    assert "NCCL_CONF_URL=https://***@host/x?a=b" in told
    assert "--lr 0.1 --api-key *** --hf-token=*** --verbose" in text
    assert '"chief": ["h0:2222"]' in text
