"""One of several builders publishes; a failed one leaves nothing."""

import errno
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainwright.dataset.store import find_or_build, save_array
from trainwright.errors import UserError
from trainwright.node.commit import read_commit


def write_one(directory: Path) -> Mapping[str, Any]:
    (directory / "data").write_bytes(b"content" * 1000)
    return {"made": True}


def build_in(entry: Path) -> Path:
    return find_or_build(entry, write_one, key="data.cache_dir")


def test_what_is_built_once_is_found_again(tmp_path: Path) -> None:
    directory = build_in(tmp_path / "entry")
    assert read_commit(directory) == {"made": True}
    assert build_in(tmp_path / "entry") == directory


def test_processes_that_build_at_once_all_get_whole_data(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys; from trainwright.dataset.store import find_or_build;"
        "write = lambda directory: (directory / 'data').write_bytes(b'content' * 1000) and {};"
        "print(find_or_build(pathlib.Path(sys.argv[1]), write, key='data.cache_dir'))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "entry")]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    directories = [Path(builder.communicate()[0].strip()) for builder in builders]
    assert {(directory / "data").stat().st_size for directory in directories} == {7000}
    assert all(read_commit(path) is not None for path in (tmp_path / "entry").iterdir())


def test_a_builder_that_finds_itself_beaten_takes_the_winners_data(tmp_path: Path) -> None:
    def slow(directory: Path) -> Mapping[str, Any]:
        winners.append(build_in(tmp_path / "entry"))
        return write_one(directory)

    winners: list[Path] = []
    assert find_or_build(tmp_path / "entry", slow, key="data.cache_dir") == winners[0]
    assert list((tmp_path / "entry").iterdir()) == winners


def test_a_killed_builder_is_built_over(tmp_path: Path) -> None:
    script = (
        "import os, sys; os.makedirs(sys.argv[1]);"
        "open(sys.argv[1] + '/data', 'w').write('con'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "entry" / "killed")], check=False)
    assert build_in(tmp_path / "entry").name != "killed"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    def fail(directory: Path) -> Mapping[str, Any]:
        write_one(directory)
        raise error

    with pytest.raises(error):
        find_or_build(tmp_path / "entry", fail, key="data.cache_dir")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_is_the_users_to_mend(tmp_path: Path) -> None:
    def fail(directory: Path) -> Mapping[str, Any]:
        save_array(Path("/dev/full"), np.zeros(10_000))
        return {}

    with pytest.raises(UserError, match=r"data\.cache_dir: cannot write .*No space left on device") as caught:
        find_or_build(tmp_path / "entry", fail, key="data.cache_dir")
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_a_saved_array_is_loaded_by_numpy(tmp_path: Path) -> None:
    values = np.arange(12, dtype=np.int32).reshape(6, 2)
    save_array(tmp_path / "x.npy", values)
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy"), values)
