from __future__ import annotations

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainwright.node import events
from trainwright.node.run_paths import RunPaths


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


def names(paths: RunPaths) -> list[str]:
    return sorted(os.listdir(paths.events))


def test_an_event_is_one_numbered_file_with_all_it_was_given(paths: RunPaths) -> None:
    events.append(paths, events.PLANNED, who="submit", stage=None, attempt=1, stages=["train"])
    file = events.append(paths, events.RUNNING, who="a1-node0", stage="train", attempt=1, num_nodes=2)
    assert names(paths) == ["0001-submit-PLANNED.json", "0002-a1-node0-RUNNING.json"]
    content = json.loads(file.read_text())
    assert content.pop("time").endswith("Z")
    assert content == {
        "schema_version": 1,
        "state": "RUNNING",
        "who": "a1-node0",
        "stage": "train",
        "attempt": 1,
        "num_nodes": 2,
    }


def test_what_is_read_is_what_was_written(paths: RunPaths) -> None:
    events.append(paths, events.FAILED, who="a2-node3", stage="train", attempt=2, exit_code=7)
    (event,) = events.read_events(paths).events
    assert (event.number, event.state, event.node, event.attempt) == (1, events.FAILED, 3, 2)
    assert event.extra == {"exit_code": 7}


def test_a_run_without_events_reads_as_empty(paths: RunPaths) -> None:
    assert events.read_events(paths) == events.History((), ())


def test_files_that_hold_no_whole_event_are_named_and_skipped(paths: RunPaths) -> None:
    events.append(paths, events.QUEUED, who="submit", stage="train", attempt=1)
    broken = {
        "0002-submit-RUNNING.json": '{"schema_version": 1, "sta',
        "0003-submit-RUNNING.json": "[]",
        "0004-submit-RUNNING.json": '{"schema_version": 1}',
        "0005-submit-RUNNING.json": '{"schema_version": 99, "state": "RUNNING"}',
    }
    for name, content in broken.items():
        (paths.events / name).write_text(content)
    (paths.events / ".draft.tmp").write_text("{")
    (paths.events / "notes.txt").write_text("not an event")
    history = events.read_events(paths)
    assert [event.state for event in history.events] == [events.QUEUED]
    assert list(history.unreadable) == sorted(broken)


def test_many_writers_lose_nothing_and_readers_never_see_half_an_event(paths: RunPaths) -> None:
    def write(index: int) -> None:
        who = f"a1-node{index % 2}"
        events.append(paths, events.RUNNING, who=who, stage="train", attempt=1, padding="x" * 20000)
        assert events.read_events(paths).unreadable == ()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(64)))
    assert len(events.read_events(paths).events) == 64
    assert not [name for name in names(paths) if name.endswith(".tmp")]


def test_where_hard_links_do_not_exist_events_are_still_written_once(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    for _ in range(3):
        events.append(paths, events.RUNNING, who="submit", stage="train", attempt=1)
    assert names(paths) == [f"000{number}-submit-RUNNING.json" for number in (1, 2, 3)]


def test_whoever_comes_second_on_a_bucket_mount_takes_the_next_number(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two mounts make a file of one name: the second learns it when it flushes, and must not remove the first's."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "no hard links here")

    flush, flushed = os.fsync, []

    def flush_second(descriptor: int) -> None:
        flushed.append(descriptor)
        if len(flushed) == 2:  # the draft was the first
            raise OSError(errno.ESTALE, "another mount's file was there first")
        flush(descriptor)

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "fsync", flush_second)
    events.append(paths, events.RUNNING, who="submit", stage="train", attempt=1)
    assert names(paths) == ["0001-submit-RUNNING.json", "0002-submit-RUNNING.json"]


def test_numbers_go_on_past_four_digits(paths: RunPaths) -> None:
    paths.events.mkdir(parents=True)
    (paths.events / "9999-submit-QUEUED.json").write_text("{}")
    assert events.append(paths, events.RUNNING, who="submit", stage="train", attempt=1).name.startswith("10000-")
