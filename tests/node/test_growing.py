"""Files that grow are copied to where nothing can be appended, in parts that are written once when they are full."""

import os
import time
from pathlib import Path

import pytest
from upath import UPath

from trainwright.node.growing import SCRATCH, Mirror, parts, read_bytes, scratch_of

LOG = "run/logs/train-a1-rank0.log"


class Node:
    """A node's scratch directory and the run directory that it is copied to, in parts of 10 bytes."""

    def __init__(self, folder: Path) -> None:
        self.scratch, self.run_dir = folder / "scratch", folder / "run"
        self.mirror = Mirror(self.scratch, self.run_dir, period_s=0.0, part_bytes=10)

    def write(self, name: str, content: bytes) -> None:
        path = self.scratch / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as stream:
            stream.write(content)

    def copies(self) -> dict[str, bytes]:
        files = [path for path in self.run_dir.rglob("*") if path.is_file()]
        return {str(path.relative_to(self.run_dir)): path.read_bytes() for path in files}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize(
    ("size", "sizes"), [(0, [0]), (9, [9]), (10, [10]), (11, [10, 1]), (20, [10, 10]), (35, [10, 10, 10, 5])]
)
def test_a_file_is_cut_into_parts_that_add_up_to_it(node: Node, size: int, sizes: list[int]) -> None:
    content = bytes(range(size))
    node.write(LOG, content)
    node.mirror.copy()
    names = [LOG, *(f"{LOG}.part{number}" for number in range(1, len(sizes)))]
    assert {name: len(copy) for name, copy in node.copies().items()} == dict(zip(names, sizes, strict=True))
    assert parts(node.run_dir / LOG) == [node.run_dir / name for name in names]
    assert read_bytes(node.run_dir / LOG) == content


def test_only_what_has_grown_is_written_again(node: Node) -> None:
    node.write(LOG, b"0123456789abc")
    node.write("run/still.log", b"still")
    node.mirror.copy()
    for name in (LOG, "run/still.log"):  # a mark goes when they are written again
        (node.run_dir / name).write_bytes(b"mark")
    node.write(LOG, b"defghijklm")
    Mirror(node.scratch, node.run_dir, part_bytes=10).copy()  # of another process, which knows what was copied
    assert node.copies() == {
        LOG: b"mark",
        f"{LOG}.part1": b"abcdefghij",
        f"{LOG}.part2": b"klm",
        "run/still.log": b"mark",
    }


def test_an_event_file_stays_whole_since_tensorboard_reads_each_file_from_a_record_s_start(node: Node) -> None:
    name = "events.out.tfevents.1.host.2.3"
    node.write(name, b"0123456789")
    node.mirror.copy()
    node.write(name, b"abc")
    node.mirror.copy()
    assert node.copies() == {name: b"0123456789abc"}


def test_a_small_file_that_is_written_anew_is_copied_anew(node: Node) -> None:
    node.write("run/ranks/a.json", b'{"a": 1}')
    node.mirror.copy()
    (node.scratch / "run/ranks/a.json").write_bytes(b"{}")
    node.mirror.copy()
    assert node.copies() == {"run/ranks/a.json": b"{}"}


def test_drafts_hidden_files_and_links_stay_where_they_are(node: Node) -> None:
    for name in ("run/a.tmp", ".hidden", "run/log"):
        node.write(name, b"x")
    (node.scratch / "run/latest").symlink_to("log")
    node.mirror.copy()
    assert node.copies() == {"run/log": b"x"}


def test_what_cannot_be_copied_is_said_and_tried_again_and_holds_up_nothing_else(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    node.write("run/a.log", b"a")
    node.write("run/b.log", b"b")
    (node.run_dir / "run/a.log").mkdir(parents=True)
    node.mirror.finish()
    assert "could not copy" in capsys.readouterr().err
    assert node.copies() == {"run/b.log": b"b"}
    (node.run_dir / "run/a.log").rmdir()
    node.mirror.finish()
    assert node.copies() == {"run/a.log": b"a", "run/b.log": b"b"}


def test_a_beat_copies_in_the_background(node: Node) -> None:
    node.write(LOG, b"line\n")
    deadline = time.monotonic() + 60
    while LOG not in node.copies():
        node.mirror.beat()
        assert time.monotonic() < deadline
    node.write(LOG, b"more\n")
    node.mirror.finish()
    assert node.copies() == {LOG: b"line\nmore\n"}


def test_at_the_end_the_originals_go_once_all_of_them_have_come_over(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    node.write(LOG, b"0123456789abc")
    node.write("run/late.log", b"late")
    (node.run_dir / "run/late.log").mkdir(parents=True)
    node.mirror.close()
    assert f"what grew stays in {node.scratch}" in capsys.readouterr().err
    assert (node.scratch / LOG).read_bytes() == b"0123456789abc"
    (node.run_dir / "run/late.log").rmdir()
    node.mirror.close()
    assert not node.scratch.exists()
    assert node.copies() == {LOG: b"0123456789", f"{LOG}.part1": b"abc", "run/late.log": b"late"}


def test_originals_stay_where_a_copy_has_been_lost(node: Node) -> None:
    node.write(LOG, b"log")
    node.mirror.copy()
    (node.run_dir / LOG).unlink()
    node.mirror.close()
    assert (node.scratch / LOG).read_bytes() == b"log"


def test_parts_are_read_in_a_bucket_as_in_a_folder() -> None:
    log = UPath("memory://parts/run/logs/a.log")
    log.parent.mkdir(parents=True)
    log.write_bytes(b"one ")
    log.with_name("a.log.part1").write_bytes(b"two")
    assert read_bytes(log) == b"one two"
    assert parts(log.with_name("b.log")) == []
    with pytest.raises(FileNotFoundError):
        read_bytes(log.with_name("b.log"))


def test_a_process_is_told_by_its_environment_where_to_keep_what_grows() -> None:
    assert scratch_of({}) is None
    assert scratch_of({SCRATCH: ""}) is None
    assert scratch_of({SCRATCH: os.sep + "disk"}) == Path("/disk")
