from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from trainwright.node import requeue
from trainwright.node.address import reachable
from trainwright.node.cluster_env import ClusterEnvError
from trainwright.node.run_paths import RunPaths
from trainwright.node.verdict import Verdict

PREEMPTED = Verdict("PREEMPTED", 75, "stopped by SIGUSR1", None)


def test_a_restarted_job_is_the_next_attempt_with_the_submitted_ones_record(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.jobs.mkdir(parents=True)
    paths.record(3).write_text("attempt: 3\nconfig:\n  attempt: 3\n")
    paths.job(3, "train").write_text('{"attempt": 3, "command": ["{attempt}"]}')
    assert [requeue.adopt(paths, "train", 3, restarts=2) for _node in range(2)] == [5, 5]
    assert paths.record(4).read_text() == "attempt: 4\nconfig:\n  attempt: 3\n"
    assert json.loads(paths.job(5, "train").read_text()) == {"attempt": 5, "command": ["{attempt}"]}
    assert not paths.record(6).exists()


def test_a_job_that_was_never_restarted_writes_nothing(tmp_path: Path) -> None:
    assert requeue.num_restarts({}) == 0
    assert requeue.adopt(RunPaths(tmp_path), "train", 1, restarts=0) == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("verdict", "stopped_by", "restarts", "max_requeues", "state"),
    [
        (PREEMPTED, signal.SIGUSR1, 0, None, "PREEMPTED"),  # nobody starts it again: the user's affair
        (PREEMPTED, signal.SIGUSR1, 2, 3, "PREEMPTED"),
        (PREEMPTED, signal.SIGUSR1, 3, 3, "TIMEOUT"),
        (PREEMPTED, None, 3, 3, "TIMEOUT"),  # the ranks asked for it themselves
        (PREEMPTED, signal.SIGTERM, 3, 3, "PREEMPTED"),
        (Verdict("FAILED", 1, "rank 0 fell", None), signal.SIGUSR1, 3, 3, "FAILED"),
        (Verdict("SUCCEEDED", 0, None, None), None, 3, 3, "SUCCEEDED"),
    ],
)
def test_a_run_that_would_go_on_is_a_timeout_when_it_may_not(
    verdict: Verdict, stopped_by: int | None, restarts: int, max_requeues: int | None, state: str
) -> None:
    assert requeue.final(verdict, stopped_by, restarts, max_requeues).state == state


def test_a_job_that_failing_nodes_brought_back_too_often_is_refused() -> None:
    assert requeue.refuse(restarts=2, max_requeues=2) is None
    assert requeue.refuse(restarts=9, max_requeues=None) is None
    refused = requeue.refuse(restarts=3, max_requeues=2)
    assert refused is not None
    assert (refused.state, refused.exit_code) == ("TIMEOUT", 1)


def test_a_name_that_resolves_is_taken_as_it_is() -> None:
    assert reachable("127.0.0.1") == "127.0.0.1"


def test_a_name_that_nobody_knows_is_an_error_that_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterEnvError, match="is no host name here; set TRAINWRIGHT_MASTER_ADDR"):
        reachable("no-such-host.invalid")
