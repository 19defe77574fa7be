from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from trainwright.node.events import Event
from trainwright.node.rank import RankEnd
from trainwright.node.supervisor import Outcome
from trainwright.node.verdict import judge, judge_preparation

TERM, INT, USR1, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL


def outcome(*codes: int, stopped_by: int | None = None, launcher_code: int = 0, missing: int = 0) -> Outcome:
    """Ranks that ended in the given order; -n for the signal n."""
    ends = {
        rank: RankEnd(rank, code if code >= 0 else 128 - code, -code if code < 0 else None, f"12:00:{rank:02d}")
        for rank, code in enumerate(codes)
    }
    return Outcome(ends, tuple(range(len(codes), len(codes) + missing)), stopped_by, launcher_code, ())


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        (outcome(0, 0), ("SUCCEEDED", 0, None)),
        (outcome(0, 0, launcher_code=1), ("SUCCEEDED", 0, None)),
        (outcome(0, 3, 1), ("FAILED", 3, 1)),
        (outcome(-KILL, -TERM), ("FAILED", 137, 0)),
        (outcome(75, 75), ("PREEMPTED", 75, None)),
        (outcome(0, 75), ("PREEMPTED", 75, None)),
        (outcome(75, 1), ("FAILED", 1, 1)),
        # told to stop
        (outcome(75, 75, stopped_by=TERM), ("PREEMPTED", 75, None)),
        (outcome(75, 75, stopped_by=USR1), ("PREEMPTED", 75, None)),
        (outcome(-TERM, -TERM, stopped_by=TERM), ("CANCELLED", 143, 0)),
        (outcome(75, -KILL, stopped_by=TERM), ("CANCELLED", 137, 1)),
        (outcome(-INT, 1, stopped_by=INT), ("CANCELLED", 130, 0)),
        (outcome(0, 0, stopped_by=INT), ("CANCELLED", 130, None)),
        (outcome(-USR1, -KILL, stopped_by=USR1), ("PREEMPTED", 75, None)),
        (outcome(0, 0, stopped_by=USR1), ("PREEMPTED", 75, None)),
        (outcome(75, 1, stopped_by=USR1), ("FAILED", 1, 1)),
        # ranks that never started
        (outcome(launcher_code=1, missing=2), ("FAILED", 1, None)),
        (outcome(launcher_code=-KILL, missing=2), ("FAILED", 137, None)),
        (outcome(launcher_code=0, missing=2), ("FAILED", 1, None)),
        (outcome(0, launcher_code=1, missing=1), ("FAILED", 1, None)),
        (outcome(stopped_by=INT, launcher_code=-KILL, missing=2), ("CANCELLED", 130, None)),
        (outcome(stopped_by=USR1, launcher_code=-KILL, missing=2), ("PREEMPTED", 75, None)),
    ],
)
def test_ends_of_ranks_add_up_to_one_state_and_code(ended: Outcome, expected: tuple[str, int, int | None]) -> None:
    verdict = judge(ended)
    assert (verdict.state, verdict.exit_code, verdict.first.rank if verdict.first else None) == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [(0, None), (2, ("FAILED", 2)), (75, ("PREEMPTED", 75)), (-KILL, ("FAILED", 137))],
)
def test_what_runs_before_the_ranks_may_end_a_stage(code: int, expected: tuple[str, int] | None) -> None:
    verdict = judge_preparation(outcome(launcher_code=code), "node 0 is gone")
    assert (verdict and (verdict.state, verdict.exit_code)) == expected
    assert verdict is None or verdict.reason == "before the ranks: node 0 is gone"


def test_a_rank_s_own_word_is_part_of_the_reason() -> None:
    ended = outcome(3)
    failed = replace(ended, ends={0: replace(ended.ends[0], reason="no graph")})
    assert judge(failed).reason == "rank 0 ended with exit code 3: no graph"
    fine = outcome(0, 0)
    told = replace(fine, ends={**fine.ends, 1: replace(fine.ends[1], reason="skipped: all there")})
    assert (judge(told).state, judge(told).reason) == ("SUCCEEDED", "skipped: all there")


def test_the_reason_names_rank_and_signal() -> None:
    assert judge(outcome(-KILL)).reason == "rank 0 was killed by SIGKILL"
    assert judge(outcome(3, 0)).reason == "rank 0 ended with exit code 3"


def test_ranks_that_left_before_the_failure_are_named() -> None:
    assert judge(outcome(0, 0, 3)).reason == "rank 2 ended with exit code 3, after ranks [0, 1] had ended with 0"


@pytest.mark.parametrize(
    ("peer", "codes", "expected"),
    [
        (("FAILED", 9), (-TERM, -KILL), ("CANCELLED", 9)),
        (("FAILED", 9), (75, 75), ("CANCELLED", 9)),
        (("CANCELLED", 143), (75,), ("CANCELLED", 143)),
        (("PREEMPTED", 75), (75, 75), ("PREEMPTED", 75)),
        (("PREEMPTED", 75), (75, -KILL), ("CANCELLED", 75)),
        (("TIMEOUT", 75), (75,), ("CANCELLED", 75)),
    ],
)
def test_a_node_that_was_stopped_for_another_follows_its_exit_code(
    peer: tuple[str, int], codes: tuple[int, ...], expected: tuple[str, int]
) -> None:
    state, code = peer
    event = Event(7, state, "12:00:00", "a1-node3", "train", 1, {"exit_code": code, "reason": "rank 5 fell"})
    verdict = judge(replace(outcome(*codes), peer=event))
    assert (verdict.state, verdict.exit_code, verdict.first) == (*expected, None)
    assert verdict.reason == f"stopped since node 3 was {state}: rank 5 fell"
