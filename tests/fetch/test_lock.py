"""One at a time, whoever has died, on this machine or on another."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

from trainwright.fetch.lock import held
from trainwright.node import processes


def ignore(line: str) -> None:
    pass


def test_a_lock_is_held_by_one_and_free_again_afterwards(tmp_path: Path) -> None:
    lock, inside, order = tmp_path / "lock", threading.Event(), []

    def second() -> None:
        inside.wait()
        with held(lock, say=order.append):
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with held(lock, say=ignore):
        inside.set()
        while not order:  # until the second has said that it waits
            threading.Event().wait(0.01)
        assert order == [
            f"process {os.getpid()} on {processes.identity()['host']} is fetching this already; waiting for it"
        ]
        order.append("first")
    thread.join()
    assert order[1:] == ["first", "second"]
    assert list(tmp_path.iterdir()) == []


def test_the_lock_of_a_process_that_was_killed_is_taken_over_at_once(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, sys; from trainwright.fetch.lock import held\n"
        "with held(pathlib.Path(sys.argv[1]), say=print): os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "lock")], check=False)
    assert (tmp_path / "lock").exists()
    told: list[str] = []
    with held(tmp_path / "lock", say=told.append):
        assert json.loads((tmp_path / "lock").read_text()) == processes.identity()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_of_another_machine_is_taken_over_once_nobody_refreshes_it(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": 1}))
    told: list[str] = []
    with held(tmp_path / "lock", say=told.append, stale_after_s=0.1):
        pass
    assert told == ["process 1 on elsewhere is fetching this already; waiting for it"]
