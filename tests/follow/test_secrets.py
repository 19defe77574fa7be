"""launcher.env_from: values reach the job, and nothing that we write."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Result
from tests.follow.conftest import Runs
from trainwright.node.run_paths import RunPaths

PLANTED = "hunter2-hunter2"
REVERSED = PLANTED[::-1]
SHOWS = "import os; print(os.environ['PLANTED'][::-1])"


@pytest.fixture(autouse=True)
def _planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED", PLANTED)


def holding_it(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and PLANTED.encode() in path.read_bytes()]


def test_a_finished_run_has_seen_the_value_and_shows_it_nowhere(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    record = runs.make((SHOWS,), "launcher.env_from=[PLANTED]", run_id="one")
    runs.follow(record)
    assert RunPaths(record.run_dir).rank_log("s0", 1, 0).read_text() == f"{REVERSED}\n"
    assert holding_it(runs.exp_dir) == []
    assert PLANTED not in "".join(capfd.readouterr())


def test_a_failed_run_does_not_quote_it(runs: Runs, trainwright: Callable[..., Result]) -> None:
    boom = "import os; raise SystemExit('token ' + os.environ['PLANTED'])"
    record = runs.make((boom,), "launcher.env_from=[PLANTED]", run_id="one")
    runs.follow(record)
    log = RunPaths(record.run_dir).rank_log("s0", 1, 0)
    assert holding_it(runs.exp_dir) == [log], "the program's own output is left as it is, byte for byte"
    told = trainwright("status", "one")
    assert ("| token <PLANTED>" in told.out, PLANTED in told.out + told.err) == (True, False)


def test_a_dry_run_and_its_errors_do_not_hold_it(train: Callable[..., Result], tmp_path: Path) -> None:
    result = train("dry_run=true", "launcher.env_from=[PLANTED]")
    assert result.code == 0, result.err
    assert list(tmp_path.rglob("run.yaml"))
    assert holding_it(tmp_path) == []
    refused = train("launcher.env_from=[PLANTED]", f"+launcher.env.TOKEN={PLANTED}")
    assert refused.code == 3
    assert "launcher.env.TOKEN spells out the value of PLANTED" in refused.err
    assert PLANTED not in result.out + result.err + refused.out + refused.err
    assert holding_it(tmp_path) == []


def test_a_variable_that_is_not_set_is_a_finding(train: Callable[..., Result]) -> None:
    refused = train("launcher.env_from=[NOT_SET_ANYWHERE]")
    assert refused.code == 3
    assert "error [env-from] launcher.env_from names NOT_SET_ANYWHERE, which is not set here" in refused.err


def test_a_variable_that_does_not_reach_the_node_fails_the_run_by_name(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = runs.make((SHOWS,), "launcher.env_from=[PLANTED]", run_id="one")
    monkeypatch.delenv("PLANTED")
    runs.follow(record)
    assert not RunPaths(record.run_dir).rank_log("s0", 1, 0).exists()
    assert (
        "did not reach this node: PLANTED"
        in RunPaths(record.run_dir).events.joinpath("0004-a1-node0-FAILED.json").read_text()
    )
