"""ps, status, logs, compare and results, on runs of this machine."""

import json
import os
import pty
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Result
from tests.follow.conftest import BOOM, OK, WAITS, Runs, await_log
from trainwright import registry
from trainwright.follow import find, overview
from trainwright.node import events
from trainwright.node.run_paths import RunPaths
from trainwright.registry import RunRecord

Command = Callable[..., Result]
MAIN = "from trainwright.cli import main; main()"
MEASURES = """
import json, pathlib, sys
own = pathlib.Path(sys.argv[1], "run")
points = [{"step": n, "train_loss": 5 - n, "val_loss": 4.5 if n == 2 else None} for n in (1, 2, 3)]
(own / "metrics-a1.jsonl").write_text("".join(json.dumps(p) + "\\n" for p in points) + '{"step": 4, "tr')
"""


def test_ps_shows_state_progress_and_metrics_of_all_runs(runs: Runs, trainwright: Command) -> None:
    runs.follow(runs.make((MEASURES,), "trainer.max_steps=9", run_id="measured"), runs.make((BOOM,), run_id="failing"))
    shown = trainwright("ps")
    header, first, second = (line.split() for line in shown.out.splitlines())
    assert header == ["run", "state", "step", "train_loss", "val_loss", "age"]
    assert first[:5] == ["measured", "SUCCEEDED", "3/9", "2.0000", "4.5000"]
    assert second[:2] == ["failing", "FAILED"]
    assert trainwright("ps", "--state", "failed").out.splitlines()[1].startswith("failing")
    assert len(trainwright("ps", "--last", "1").out.splitlines()) == 2


def test_json_has_a_version_and_stable_keys(runs: Runs, trainwright: Command) -> None:
    runs.follow(runs.make((OK, BOOM), run_id="one"))
    listed = json.loads(trainwright("ps", "--json").out)
    one = json.loads(trainwright("status", "one", "--json").out)
    assert (listed["schema_version"], one["schema_version"]) == (1, 1)
    assert listed["runs"] == [one["run"]]
    assert one["run"].keys() == {
        "run_id", "run_dir", "state", "reason", "exit_code", "first_failing_rank", "last_lines", "attempt", "launcher",
        "overrides", "step", "max_steps", "train_loss", "val_loss", "created", "started", "ended", "stages",
    }  # fmt: skip
    assert [(stage["stage"], stage["state"]) for stage in one["run"]["stages"]] == [
        ("s0", "SUCCEEDED"),
        ("s1", "FAILED"),
    ]
    assert one["run"]["last_lines"] == ["boom"]


def test_status_tells_why_a_run_failed(runs: Runs, trainwright: Command) -> None:
    runs.follow(runs.make((BOOM,), run_id="one"))
    told = trainwright("status", "one")
    assert told.code == 0
    assert "state        FAILED" in told.out
    assert "reason       rank 0 ended with exit code 7" in told.out
    assert "  | boom" in told.out


def test_status_tells_what_nodes_lack_once_for_all_of_them(runs: Runs, trainwright: Command) -> None:
    record = runs.make((OK, OK), run_id="one")
    runs.follow(record)
    assert "finding" not in trainwright("status", "one").out
    ports, files = ({"what": f"few {name}", "remedy": f"raise {name}"} for name in ("ports", "files"))
    paths = RunPaths(record.run_dir)
    paths.nxdt(1).mkdir()
    for stage, found in (("s0", [ports, files]), ("s1", [files])):
        paths.nxdt_findings(stage, 1, 0).write_text(json.dumps({"schema_version": 1, "findings": found}))
    told = trainwright("status", "one").out
    assert "finding      few ports (s0 on node 0); raise ports\n" in told
    assert "finding      few files (s0 on node 0, s1 on node 0); raise files\n" in told
    (_, of_files) = json.loads(trainwright("status", "one", "--json").out)["node_findings"]
    assert of_files == {**files, "nodes": {"s0": [0], "s1": [0]}}


@pytest.fixture
def three(runs: Runs) -> list[RunRecord]:
    return [runs.make((OK,), run_id=name) for name in ("alpha-1", "alpha-2", "beta")]


@pytest.mark.parametrize(
    ("word", "found"),
    [("alpha-1", "alpha-1"), ("b", "beta"), ("-1", "beta"), ("-3", "alpha-1"), ("exp/gpt_small/alpha-2", "alpha-2")],
)
def test_a_run_is_named_by_id_prefix_age_or_path(
    word: str, found: str, three: list[RunRecord], trainwright: Command
) -> None:
    assert json.loads(trainwright("status", "--json", word).out)["run"]["run_id"] == found


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("alpha", "alpha: 2 runs and sweeps have ids that begin so; give more of one"),
        ("gamma", "gamma: no run or sweep below"),
        ("-4", "-4: there are 3 runs below"),
        ("exp/gpt_small", "exp/gpt_small: neither a run's directory nor a sweep's"),
    ],
)
def test_a_word_that_names_no_single_run_is_refused(
    word: str, message: str, three: list[RunRecord], trainwright: Command
) -> None:
    refused = trainwright("status", word)
    assert refused.code == 2
    assert message in refused.err
    assert word != "alpha" or all(str(run.run_dir) in refused.err for run in three[:2])


def test_an_exp_dir_that_does_not_exist_is_refused(trainwright: Command) -> None:
    refused = trainwright("ps", "--exp-dir", "gone")
    assert (refused.code, "--exp-dir: gone is no directory" in refused.err) == (2, True)


def test_runs_are_looked_for_where_the_config_puts_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert tmp_path / "outputs" in find.exp_dirs([])


def test_a_run_whose_processes_are_gone_is_unknown_until_its_own_word_decides(runs: Runs, trainwright: Command) -> None:
    record = runs.make((OK,), run_id="left")
    paths = RunPaths(record.run_dir)
    dead = {"host": socket.gethostname(), "pid": os.getpid(), "started": 1}
    _claim(record, dead)
    events.append(paths, "RUNNING", who="a1-node0", stage="s0", attempt=1, num_nodes=1, process=dead)
    told = json.loads(trainwright("status", "left", "--json").out)["run"]
    assert (told["state"], "no process works on it" in told["reason"]) == ("UNKNOWN", True)
    assert registry.refresh(record.run_dir).state == "RUNNING", "a look must write nothing that may change again"
    events.append(paths, "SUCCEEDED", who="a1-node0", stage="s0", attempt=1, num_nodes=1)
    assert json.loads(trainwright("status", "left", "--json").out)["run"]["state"] == "SUCCEEDED"


def test_a_run_on_another_machine_is_believed(runs: Runs, trainwright: Command) -> None:
    record = runs.make((OK,), run_id="far")
    far = {"host": "elsewhere", "pid": 1, "started": 1}
    _claim(record, far)
    events.append(RunPaths(record.run_dir), "RUNNING", who="a1-node0", stage="s0", attempt=1, num_nodes=1, process=far)
    assert json.loads(trainwright("status", "far", "--json").out)["run"]["state"] == "RUNNING"


def _claim(record: RunRecord, process: dict[str, object]) -> None:
    """Let the record say that another process submitted the run."""
    path = RunPaths(record.run_dir).record(1)
    lines = path.read_text().splitlines()
    start = lines.index("process:")
    lines[start + 1 : start + 4] = [f"  {key}: {value}" for key, value in process.items()]
    path.write_text("\n".join(lines))


def test_logs_prints_what_the_rank_printed(runs: Runs, trainwright: Command) -> None:
    runs.follow(runs.make(("print('first')", "print('second')"), run_id="one"))
    assert trainwright("logs", "one").out == "second\n"
    assert trainwright("logs", "one", "--stage", "s0").out == "first\n"
    assert json.loads(trainwright("logs", "one", "--json").out)["lines"] == ["second"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rank", "3"], "--rank 3: stage s0 has logs of ranks 0"),
        (["--stage", "s9"], "--stage s9: no stage of this run; use s0"),
        (["--attempt", "2"], "--attempt 2: this run has 1"),
    ],
)
def test_a_log_that_cannot_be_is_refused(options: list[str], message: str, runs: Runs, trainwright: Command) -> None:
    runs.follow(runs.make((OK,), run_id="one"))
    refused = trainwright("logs", "one", *options)
    assert (refused.code, message in refused.err) == (2, True)


def test_logs_of_a_run_that_has_not_started_say_so(runs: Runs, trainwright: Command) -> None:
    runs.make((OK,), run_id="one")
    refused = trainwright("logs", "one")
    assert (refused.code, "one is PLANNED; nothing has written a log yet" in refused.err) == (2, True)


def test_following_shows_all_stages_and_ends_with_the_run(runs: Runs, trainwright: Command) -> None:
    gate = runs.exp_dir.parent / "gate"
    os.mkfifo(gate)
    waits = f"print('first', flush=True); open({str(gate)!r}).read()"
    record = runs.make((waits, BOOM), run_id="one")
    runs.start(record)
    await_log(record, "first")
    gate.write_text("go on")
    followed = trainwright("logs", "one", "--follow")
    assert followed.code == 1
    assert followed.out.endswith("boom\n")
    assert "one FAILED: rank 0 ended with exit code 7" in followed.err


def test_compare_shows_only_keys_that_differ(runs: Runs, trainwright: Command) -> None:
    runs.follow(runs.make((OK,), 'data.splits_string="9,1"', run_id="one"), runs.make((BOOM,), "seed=7", run_id="two"))
    header, *rows = (line.split() for line in trainwright("compare", "one", "two").out.splitlines())
    assert header == ["run", "seed", "data.splits_string", "state"]
    assert rows == [["one", "1234", "9,1", "SUCCEEDED"], ["two", "7", "95,5,0", "FAILED"]]
    told = json.loads(trainwright("compare", "one", "two", "--json").out)
    assert [run["config"] for run in told["runs"]] == [
        {"seed": 1234, "data.splits_string": "9,1"},
        {"seed": 7, "data.splits_string": "95,5,0"},
    ]


def test_results_is_a_table_of_a_sweeps_keys_and_metrics(runs: Runs, trainwright: Command) -> None:
    records = [runs.make((MEASURES,), f"seed={seed}", run_id=f"of-{seed}") for seed in (1, 2)]
    sweep = registry.create_sweep(records)
    runs.follow(*records)
    header, *rows = (line.split() for line in trainwright("results", sweep.name).out.splitlines())
    assert header == ["run", "seed", "state", "step", "train_loss", "val_loss"]
    assert [row[1:] for row in rows] == [
        ["1", "SUCCEEDED", "3/" + str(records[0].config.trainer.max_steps), "2", "4.5"],
        ["2", "SUCCEEDED", "3/" + str(records[0].config.trainer.max_steps), "2", "4.5"],
    ]
    assert trainwright("results", str(sweep)).out == trainwright("results", sweep.name).out
    refused = trainwright("status", sweep.name)
    assert (refused.code, "this is a sweep of 2 runs" in refused.err) == (2, True)


def test_lists_never_read_a_record(runs: Runs) -> None:
    """A list of thousands would take a minute: records are YAML."""
    record = runs.make((OK,), run_id="one")
    RunPaths(record.run_dir).record(1).unlink()
    assert overview.look(record.run_dir).launcher == "local"


def test_following_a_running_run_ends_when_it_is_cancelled(runs: Runs, trainwright: Command) -> None:
    record = runs.make((WAITS,), run_id="one")
    runs.start(record)
    await_log(record, "ready")
    assert trainwright("cancel", "one", "--yes").code == 0
    followed = trainwright("logs", "one", "--follow")
    assert (followed.code, followed.out) == (1, "ready\n")


def test_a_terminal_gets_colours_and_lines_of_its_width(runs: Runs) -> None:
    runs.follow(runs.make((MEASURES,), run_id="measured"), runs.make((BOOM,), run_id="failing"))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", MAIN, "ps", "--exp-dir", str(runs.exp_dir)]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "50"}
    subprocess.run(command, stdin=theirs, stdout=theirs, env=environment, check=True)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    os.close(theirs)
    assert "\x1b[32mSUCCEEDED" in shown
    assert "\x1b[31mFAILED" in shown
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in shown.splitlines()]
    assert [len(line) <= 50 for line in lines] == [True] * 3
    assert lines[1].startswith("measured")


def test_a_reader_that_has_seen_enough_is_no_error(runs: Runs) -> None:
    runs.make((OK,), run_id="one")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", MAIN, "ps", "--exp-dir", str(runs.exp_dir)]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")
