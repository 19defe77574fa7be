from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainwright.node.log_follower import LogFollower, last_lines


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b"one\ntwo\n", ["one", "two"]),
        (b"half a line", ["half a line"]),
        (b"bad \xff\xfe\n", ["bad \ufffd\ufffd"]),
        (b"10%\r50%\r100%\ndone\r\n", ["100%", "done"]),
        (b"".join(b"%d\n" % number for number in range(1000)), [str(number) for number in range(980, 1000)]),
        (b"x" * 9000, ["x" * 4096]),
    ],
)
def test_the_end_of_a_log_is_quoted_in_bounds(tmp_path: Path, content: bytes, expected: list[str]) -> None:
    (tmp_path / "log").write_bytes(content)
    assert last_lines(tmp_path / "log") == expected


def test_a_missing_log_has_no_lines(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "log") == []


def test_only_what_is_appended_is_copied(tmp_path: Path) -> None:
    log, copy = tmp_path / "log", tmp_path / "copy"
    log.write_bytes(b"of an earlier start\n")
    with open(copy, "wb") as target:
        follower = LogFollower(log, target.fileno())
        with open(log, "ab") as file:
            file.write(b"new \xff")
        follower.finish()
    assert copy.read_bytes() == b"new \xff"


def test_a_reader_that_takes_nothing_does_not_hold_us(tmp_path: Path) -> None:
    log = tmp_path / "log"
    follower = LogFollower(log, (pipe := os.pipe())[1])
    log.write_bytes(b"x" * 1_000_000)
    while follower.copy():
        pass
    assert 0 < len(os.read(pipe[0], 1_000_000)) < 1_000_000
    follower.copy()
    os.close(pipe[0])
    follower.finish()  # the reader is gone: that ends the copying only
    os.close(pipe[1])
