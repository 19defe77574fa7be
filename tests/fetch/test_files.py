"""Single files arrive whole, once, from every kind of place."""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.buckets import BUCKET, bucket_of_kind
from tests.fakes import WebServer
from trainwright import storage
from trainwright.errors import RunFailedError, UserError
from trainwright.fetch.files import FileRequest, fetch_files
from trainwright.node import commit

CONTENT = b'{"input": "a", "output": "b"}\n' * 5000
SOON = (0.0, 0.0)


def wanted(source: str, target: Path) -> FileRequest:
    return FileRequest(source=source, target=target, source_key="data.train_source", target_key="data.train_path")


def fetch(source: str, target: Path) -> list[str]:
    told: list[str] = []
    fetch_files([wanted(source, target)], say=told.append, waits_s=SOON)
    return told


@pytest.mark.parametrize("place", ["path", "http", "s3"])
def test_a_file_is_fetched_and_committed_once(place: str, web: WebServer, tmp_path: Path) -> None:
    web.objects["/bucket/a/training.jsonl"] = CONTENT
    (tmp_path / "source.jsonl").write_bytes(CONTENT)
    sources = {
        "path": str(tmp_path / "source.jsonl"),
        "http": f"{web.url}/bucket/a/training.jsonl",
        "s3": "s3://bucket/a/training.jsonl",
    }
    target = tmp_path / "data" / "training.jsonl"
    assert "fetched from" in fetch(sources[place], target)[-1]
    assert target.read_bytes() == CONTENT
    assert sorted(path.name for path in target.parent.iterdir()) == ["training.jsonl", "training.jsonl.commit.json"]
    metadata = commit.read_commit(target)
    assert metadata is not None
    assert (metadata["source"], metadata["was_there"]) == (sources[place], False)
    web.objects.clear()
    (tmp_path / "source.jsonl").unlink()
    assert fetch(sources[place], target) == [f"data.train_path: {target} is there, from {sources[place]}"]


def test_a_file_is_fetched_from_cloud_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket_of_kind("emulator", tmp_path, monkeypatch):
        storage.file_system_class("gs")().pipe(f"{BUCKET}/data/x.jsonl", CONTENT)
        fetch(f"gs://{BUCKET}/data/x.jsonl", tmp_path / "x.jsonl")
        with pytest.raises(UserError, match=f"data.train_source: gs://{BUCKET}/y.jsonl does not exist"):
            fetch(f"gs://{BUCKET}/y.jsonl", tmp_path / "y.jsonl")
    assert (tmp_path / "x.jsonl").read_bytes() == CONTENT


def test_credentials_of_the_environment_are_used_where_anonymous_access_is_refused(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.objects["/secret/x.jsonl"] = CONTENT
    web.private.add("/secret/")
    with pytest.raises(UserError, match=r"it is not public: .* launcher.env_from=\[AWS_ACCESS_KEY_ID,"):
        fetch("s3://secret/x.jsonl", tmp_path / "x.jsonl")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "knows")
    fetch("s3://secret/x.jsonl", tmp_path / "x.jsonl")
    assert (tmp_path / "x.jsonl").read_bytes() == CONTENT


def test_what_is_wrong_with_all_files_is_told_together(web: WebServer, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    requests = [wanted(f"{web.url}/not/there", tmp_path / "x"), wanted(str(tmp_path / "folder"), tmp_path / "y")]
    with pytest.raises(UserError) as caught:
        fetch_files(requests, say=print, waits_s=SOON)
    missing, folder = str(caught.value).splitlines()
    assert missing == f"data.train_source: {web.url}/not/there does not exist"
    assert folder.endswith("it is a directory; name one file")


@pytest.mark.parametrize("failure", [503, 429, "cut"])
def test_errors_that_pass_are_waited_out(failure: int | str, web: WebServer, tmp_path: Path) -> None:
    web.objects["/x.jsonl"] = CONTENT
    web.fail("/x.jsonl", failure)
    told = fetch(f"{web.url}/x.jsonl", tmp_path / "x.jsonl")
    assert "again in 0 s (1 of 2)" in told[0]
    assert (tmp_path / "x.jsonl").read_bytes() == CONTENT


def test_errors_that_do_not_pass_in_time_leave_nothing_that_counts(web: WebServer, tmp_path: Path) -> None:
    web.objects["/x.jsonl"] = CONTENT
    web.fail("/x.jsonl", 503, 503, 503)
    with pytest.raises(RunFailedError, match="given up after 3 tries: start the run again later"):
        fetch(f"{web.url}/x.jsonl", tmp_path / "x.jsonl")
    assert not (tmp_path / "x.jsonl").exists()
    assert not (tmp_path / "x.jsonl.lock").exists()


def test_a_fetch_that_was_killed_starts_again_clean(web: WebServer, tmp_path: Path) -> None:
    web.objects["/x.jsonl"] = CONTENT
    web.fail("/x.jsonl", "hang")
    program = (
        "import pathlib, sys; from trainwright.fetch.files import FileRequest, fetch_files\n"
        "source, target = sys.argv[1], pathlib.Path(sys.argv[2])\n"
        "fetch_files([FileRequest(source=source, target=target, source_key='s', target_key='t')], say=print)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, f"{web.url}/x.jsonl", str(tmp_path / "x.jsonl")])
    assert web.hangs.wait(60)
    process.kill()
    process.wait()
    assert not (tmp_path / "x.jsonl").exists()
    fetch(f"{web.url}/x.jsonl", tmp_path / "x.jsonl")
    assert (tmp_path / "x.jsonl").read_bytes() == CONTENT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.jsonl", "x.jsonl.commit.json"]


def test_two_runs_that_want_the_same_file_fetch_it_once(web: WebServer, tmp_path: Path) -> None:
    web.objects["/x.jsonl"] = CONTENT
    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(lambda _: fetch(f"{web.url}/x.jsonl", tmp_path / "x.jsonl"), range(2)))
    assert web.gets("/x.jsonl") == 1
    assert sorted(lines[-1].split(" ")[2] for lines in told) == ["fetched", "is"]


def test_a_file_of_the_user_is_used_if_it_has_the_size_of_the_source(web: WebServer, tmp_path: Path) -> None:
    web.objects["/x.jsonl"] = CONTENT
    target = tmp_path / "x.jsonl"
    target.write_bytes(CONTENT[:-1])
    with pytest.raises(UserError, match=f"with {len(CONTENT) - 1} bytes, but .* has {len(CONTENT)}; remove it"):
        fetch(f"{web.url}/x.jsonl", target)
    target.write_bytes(CONTENT)
    assert "was there already and has the size" in fetch(f"{web.url}/x.jsonl", target)[0]
    assert web.gets("/x.jsonl") == 0


def test_a_file_of_another_source_and_a_damaged_one_are_refused(web: WebServer, tmp_path: Path) -> None:
    web.objects.update({"/x.jsonl": CONTENT, "/y.jsonl": CONTENT})
    target = tmp_path / "x.jsonl"
    fetch(f"{web.url}/x.jsonl", target)
    with pytest.raises(UserError, match=r"was fetched from .*/x.jsonl, but data.train_source is .*/y.jsonl"):
        fetch(f"{web.url}/y.jsonl", target)
    target.write_bytes(CONTENT[:7])
    with pytest.raises(UserError, match=r"is damaged: x\.jsonl has 7 bytes, 150000 were committed; remove it"):
        fetch(f"{web.url}/x.jsonl", target)


def test_a_file_that_the_disk_has_no_room_for_is_refused_before_it_comes(tmp_path: Path) -> None:
    with open(tmp_path / "huge", "wb") as stream:
        stream.truncate(shutil.disk_usage(tmp_path).total + 1)  # a hole
    with pytest.raises(UserError, match=r"bytes are to be fetched into .*, \d+ are free on its disk"):
        fetch(str(tmp_path / "huge"), tmp_path / "copy")
    assert not (tmp_path / "copy.part").exists()
