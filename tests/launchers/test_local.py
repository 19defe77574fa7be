"""launcher=local with real workers: queues, nodes, stages, and what happens when one of them fails."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trainwright import dispatch, registry
from trainwright.config import RunConfig
from trainwright.job import JobSpec
from trainwright.node.run_paths import RunPaths
from trainwright.plan import make_plan
from trainwright.registry import RunRecord
from trainwright.report import Outcome

Parsed = Callable[..., RunConfig]
OK = "print('fine')"
BOOM = "import sys; print('boom'); sys.exit(7)"


@pytest.fixture
def follow(parsed: Parsed, tmp_path: Path) -> Callable[..., list[Outcome]]:
    """Return a function that runs chains of Python snippets, one chain a run, and returns the outcomes."""

    def run(*chains: tuple[str, ...], overrides: tuple[str, ...] = (), num_nodes: int = 1) -> list[Outcome]:
        config = parsed(*overrides, f"exp_manager.exp_dir={tmp_path}", f"hardware.num_nodes={num_nodes}")
        records = []
        for number, chain in enumerate(chains):
            run_id = f"r{number}"
            record = RunRecord(
                run_id=run_id,
                attempt=1,
                config=config,
                plan=make_plan(config),
                findings=(),
                jobs=tuple(
                    JobSpec(
                        run_id=run_id,
                        run_dir=str(registry.run_dir(config, run_id)),
                        stage=f"s{i}",
                        attempt=1,
                        launch="plain",
                        command=(sys.executable, "-c", code),
                        python=sys.executable,
                        env={"OF_THE_JOB": run_id},
                        num_nodes=num_nodes,
                        devices=1,
                        image=None,
                        time_limit_s=None,
                        grace_s=5.0,
                        files={},
                    )
                    for i, code in enumerate(chain)
                ),
                overrides=(f"number={number}",),
            )
            registry.create(record)
            records.append(record)
        return dispatch.submit_and_follow(records)

    return run


def log(outcome: Outcome, stage: str = "s0", rank: int = 0) -> str:
    return RunPaths(outcome.run_dir).rank_log(stage, 1, rank).read_text()


@pytest.mark.parametrize("max_parallel", [1, 3])
def test_one_failure_neither_hides_nor_stops_the_others(
    follow: Callable[..., list[Outcome]], max_parallel: int, capfd: pytest.CaptureFixture[str]
) -> None:
    outcomes = follow((OK,), (BOOM,), (OK,), overrides=(f"launcher.max_parallel={max_parallel}",))
    assert [outcome.state for outcome in outcomes] == ["SUCCEEDED", "FAILED", "SUCCEEDED"]
    assert [outcome.exit_code for outcome in outcomes] == [0, 1, 0]
    assert "7" in str(outcomes[1].reason)
    table = capfd.readouterr().out
    assert all(f"r{i}" in table for i in range(3))
    assert "number" in table


def test_on_failure_stop_leaves_the_rest_unstarted(follow: Callable[..., list[Outcome]]) -> None:
    outcomes = follow((BOOM,), (OK,), (OK,), overrides=("on_failure=stop",))
    assert [outcome.state for outcome in outcomes] == ["FAILED", "NOT_SUBMITTED", "NOT_SUBMITTED"]
    assert not RunPaths(outcomes[1].run_dir).rank_log("s0", 1, 0).exists()


def test_a_stage_waits_for_the_one_before(follow: Callable[..., list[Outcome]], tmp_path: Path) -> None:
    first = f"open({str(tmp_path / 'made')!r}, 'x').close()"
    second = f"open({str(tmp_path / 'made')!r}).close(); print('second')"
    (outcome,) = follow((first, second), overrides=("launcher.max_parallel=2",))
    assert outcome.state == "SUCCEEDED"
    assert log(outcome, "s1") == "second\n"


def test_no_stage_starts_behind_a_failed_one(follow: Callable[..., list[Outcome]]) -> None:
    (outcome,) = follow((OK, BOOM, OK))
    assert (outcome.state, outcome.exit_code) == ("FAILED", 1)
    states = {stage.stage: stage.state for stage in registry.refresh(outcome.run_dir).stages}
    assert states == {"s0": "SUCCEEDED", "s1": "FAILED", "s2": "NOT_SUBMITTED"}


def test_each_node_has_its_own_cluster_environment(follow: Callable[..., list[Outcome]]) -> None:
    names = ("NODE_RANK", "NNODES", "MASTER_ADDR", "MASTER_PORT", "OF_THE_JOB")
    code = f"import os; print(*(os.environ[name] for name in {names}))"
    (outcome,) = follow((code,), num_nodes=2)
    told = [log(outcome, rank=rank).split() for rank in (0, 1)]
    assert [words[:3] for words in told] == [["0", "2", "127.0.0.1"], ["1", "2", "127.0.0.1"]]
    assert told[0][3:] == [told[1][3], "r0"]


def test_a_failing_node_brings_the_other_down(follow: Callable[..., list[Outcome]]) -> None:
    code = "import os, signal, sys\nif os.environ['NODE_RANK'] == '1': sys.exit(9)\nsignal.pause()"
    (outcome,) = follow((code,), num_nodes=2)
    assert (outcome.state, outcome.exit_code) == ("FAILED", 1)
    assert registry.refresh(outcome.run_dir).first_failing_rank == 1


def test_a_killed_worker_leaves_the_schedulers_word(follow: Callable[..., list[Outcome]]) -> None:
    code = (
        "import os, signal; wrapper = os.getppid(); status = open(f'/proc/{wrapper}/status').read();"
        "os.kill(int(status.split('PPid:')[1].split()[0]), signal.SIGKILL)"
    )
    (outcome,) = follow((code,))
    assert outcome.state == "FAILED"
    assert "left no word" in str(outcome.reason)
    assert registry.refresh(outcome.run_dir).exit_code == 128 + 9


def test_nothing_of_one_job_leaks_into_the_next(follow: Callable[..., list[Outcome]]) -> None:
    outcomes = follow(("import os; os.environ['LEAK'] = '1'",), ("import os; print(os.environ.get('LEAK'))",))
    assert log(outcomes[1]) == "None\n"
