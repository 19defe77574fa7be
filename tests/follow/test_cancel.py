"""cancel: the whole run or sweep, on this machine, once and for all."""

import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.conftest import Result
from tests.follow.conftest import OK, WAITS, Runs, await_log, wait_for
from trainwright import registry
from trainwright.node import events, processes
from trainwright.node.run_paths import RunPaths

Command = Callable[..., Result]
MAIN = "from trainwright.cli import main; main()"


def test_a_sweep_is_cancelled_whole_running_and_waiting(runs: Runs, trainwright: Command) -> None:
    records = [runs.make((WAITS, OK), run_id=f"of-{number}") for number in range(3)]
    sweep = registry.create_sweep(records)
    submitter = runs.start(*records)
    await_log(records[0], "ready")
    done = json.loads(trainwright("cancel", sweep.name, "--yes", "--json").out)
    assert [run["is_cancelled_now"] for run in done["runs"]] == [True] * 3
    submitter.join(60)
    assert submitter.exitcode == 0, "the submitting command ends too"
    assert [registry.refresh(record.run_dir).state for record in records] == ["CANCELLED"] * 3
    assert not RunPaths(records[1].run_dir).rank_log("s0", 1, 0).exists()
    rank = json.loads(RunPaths(records[0].run_dir).rank_record("s0", 1, 0).read_text())["pid"]
    wait_for(lambda: not processes.is_alive(rank), "no rank is left")
    assert "cancelled by" in str(registry.refresh(records[0].run_dir).reason)


def test_cancelling_twice_changes_nothing(runs: Runs, trainwright: Command) -> None:
    record = runs.make((OK,), run_id="one")
    first, second = (json.loads(trainwright("cancel", "one", "--json").out)["runs"][0] for _ in range(2))
    assert (first["state_before"], first["state"], first["is_cancelled_now"]) == ("PLANNED", "CANCELLED", True)
    assert (second["state_before"], second["state"], second["is_cancelled_now"]) == ("CANCELLED", "CANCELLED", False)
    assert len(events.find(RunPaths(record.run_dir), ["submit"], ["CANCELLED"])) == 1


def test_a_run_that_is_over_stays_as_it_is(runs: Runs, trainwright: Command) -> None:
    runs.follow(runs.make((OK,), run_id="one"))
    assert trainwright("cancel", "one").out == "one  was over: SUCCEEDED\n"
    assert trainwright("status", "one").out.splitlines()[1] == "state        SUCCEEDED"


def test_a_run_on_another_machine_is_not_cancelled_from_here(runs: Runs, trainwright: Command) -> None:
    record = runs.make((OK,), run_id="far")
    paths = RunPaths(record.run_dir)
    process = {"host": "elsewhere", "pid": 1, "started": 1}
    events.append(paths, "SUBMITTED", who="submit", stage="s0", attempt=1, job_id=f"{record.run_dir}/s0")
    events.append(paths, "RUNNING", who="a1-node0", stage="s0", attempt=1, num_nodes=1, process=process)
    refused = trainwright("cancel", "far")
    assert (refused.code, "runs on elsewhere; cancel it there" in refused.err) == (2, True)
    assert registry.refresh(record.run_dir).state == "RUNNING"


def test_a_later_process_with_the_workers_id_is_left_alone(runs: Runs, trainwright: Command) -> None:
    record = runs.make((OK,), run_id="old")
    paths = RunPaths(record.run_dir)
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as innocent:
        process = {"host": socket.gethostname(), "pid": innocent.pid, "started": 1}
        events.append(paths, "SUBMITTED", who="submit", stage="s0", attempt=1, job_id=f"{record.run_dir}/s0")
        events.append(paths, "RUNNING", who="a1-node0", stage="s0", attempt=1, num_nodes=1, process=process)
        assert trainwright("cancel", "old").code == 0
        assert innocent.poll() is None
        innocent.send_signal(signal.SIGKILL)


def test_a_worker_that_starts_while_its_run_is_cancelled_does_not_go_on(runs: Runs, trainwright: Command) -> None:
    record = runs.make((OK,), run_id="one")
    trainwright("cancel", "one")
    worker = [sys.executable, RunPaths(record.run_dir).worker, record.run_dir, "--stage", "s0", "--attempt", "1"]
    ended = subprocess.run(worker, capture_output=True, text=True)
    assert (ended.returncode, "cancelled before it started" in ended.stderr) == (1, True)
    assert not RunPaths(record.run_dir).rank_log("s0", 1, 0).exists()
    assert registry.refresh(record.run_dir).state == "CANCELLED"


@pytest.mark.parametrize(("answer", "state"), [("n", "PLANNED"), ("y", "CANCELLED")])
def test_a_terminal_is_asked_first(answer: str, state: str, runs: Runs) -> None:
    record = runs.make((OK,), run_id="one")
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", MAIN, "cancel", "--exp-dir", str(runs.exp_dir), "one"]
    os.write(ours, f"{answer}\n".encode())
    asked = subprocess.run(command, stdin=theirs, capture_output=True, text=True)
    os.close(ours)
    os.close(theirs)
    assert "cancel 1 of 1 runs (one PLANNED)? [y/N]" in asked.stderr
    assert registry.refresh(record.run_dir).state == state
