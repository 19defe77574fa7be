from __future__ import annotations

import itertools
import random

import pytest

from trainwright.node.events import Event
from trainwright.node.run_state import RunState, fold

PLAN = ("submit PLANNED - 1", {"stages": ["train"], "num_nodes": 2})
CHAIN = ("submit PLANNED - 1", {"stages": ["fetch", "train"], "num_nodes": {"fetch": 1, "train": 2}})


def history(*lines: object) -> list[Event]:
    """Events from `who STATE stage attempt`, in order; a pair adds what else the event holds."""
    events = []
    for number, line in enumerate(lines, start=1):
        text, extra = line if isinstance(line, tuple) else (line, {})
        who, state, stage, attempt = text.split()
        time = f"2026-11-29T12:00:{number:02d}.000000Z"
        events.append(Event(number, state, time, who, None if stage == "-" else stage, int(attempt), extra))
    return events


def both(state: str, attempt: int = 1) -> list[str]:
    return [f"a{attempt}-node{node} {state} train {attempt}" for node in (0, 1)]


SUBMITTED = "submit SUBMITTED train 1"


@pytest.mark.parametrize(
    ("expected", "lines"),
    [
        # before anything runs
        ("PLANNED", [PLAN]),
        ("SUBMITTED", [PLAN, SUBMITTED]),
        ("QUEUED", [PLAN, SUBMITTED, "submit QUEUED train 1"]),
        ("NOT_SUBMITTED", [PLAN, "submit NOT_SUBMITTED train 1"]),
        ("NOT_SUBMITTED", [PLAN, "submit NOT_SUBMITTED - 1"]),
        # nodes speak
        ("RUNNING", [PLAN, SUBMITTED, "a1-node0 RUNNING train 1"]),
        ("RUNNING", [PLAN, *both("RUNNING"), "a1-node0 SUCCEEDED train 1"]),
        ("RUNNING", [PLAN, "a1-node0 RUNNING train 1", "a1-node0 SUCCEEDED train 1"]),
        ("RUNNING", [PLAN, "submit NOT_SUBMITTED train 1", *both("RUNNING")]),
        ("SUCCEEDED", [PLAN, *both("RUNNING"), *both("SUCCEEDED")]),
        ("FAILED", [PLAN, *both("RUNNING"), "a1-node1 FAILED train 1", "a1-node0 SUCCEEDED train 1"]),
        ("FAILED", [PLAN, *both("RUNNING"), "a1-node0 SUCCEEDED train 1", "a1-node1 FAILED train 1"]),
        ("FAILED", [PLAN, *both("RUNNING"), "a1-node1 FAILED train 1", "a1-node0 CANCELLED train 1"]),
        ("FAILED", [PLAN, *both("RUNNING"), "a1-node1 PREEMPTED train 1", "a1-node0 FAILED train 1"]),
        ("PREEMPTED", [PLAN, *both("RUNNING"), *both("PREEMPTED")]),
        ("CANCELLED", [PLAN, *both("RUNNING"), "a1-node0 PREEMPTED train 1", "a1-node1 CANCELLED train 1"]),
        # the scheduler ends a run that fell silent
        ("FAILED", [PLAN, SUBMITTED, "submit FAILED train 1"]),
        ("CANCELLED", [PLAN, SUBMITTED, "submit CANCELLED train 1"]),
        ("SUCCEEDED", [PLAN, "submit SUCCEEDED train 1"]),
        ("TIMEOUT", [PLAN, *both("RUNNING"), "submit TIMEOUT train 1"]),
        ("PREEMPTED", [PLAN, *both("RUNNING"), "submit PREEMPTED train 1"]),
        ("UNKNOWN", [PLAN, *both("RUNNING"), "submit UNKNOWN train 1"]),
        ("RUNNING", [PLAN, *both("RUNNING"), "submit UNKNOWN train 1", "submit RUNNING train 1"]),
        # a crashed job never reads as succeeded on the scheduler's word alone
        ("UNKNOWN", [PLAN, *both("RUNNING"), "submit SUCCEEDED train 1"]),
        ("FAILED", [PLAN, *both("RUNNING"), *both("FAILED"), "submit SUCCEEDED train 1"]),
        # the node's own word stands, but the scheduler knows why it was stopped
        ("SUCCEEDED", [PLAN, *both("SUCCEEDED"), "submit FAILED train 1"]),
        ("TIMEOUT", [PLAN, *both("CANCELLED"), "submit TIMEOUT train 1"]),
        ("TIMEOUT", [PLAN, *both("PREEMPTED"), "submit TIMEOUT train 1"]),
        ("CANCELLED", [PLAN, *both("PREEMPTED"), "submit CANCELLED train 1"]),
        ("PREEMPTED", [PLAN, *both("PREEMPTED"), "submit FAILED train 1"]),
        # a requeue starts over, in the same attempt or in the next
        ("REQUEUED", [PLAN, *both("RUNNING"), *both("PREEMPTED"), "submit REQUEUED train 1"]),
        ("REQUEUED", [PLAN, *both("PREEMPTED"), "submit REQUEUED train 2"]),
        ("REQUEUED", [PLAN, "a1-node0 REQUEUED train 1", "a1-node1 PREEMPTED train 1"]),
        ("RUNNING", [PLAN, *both("PREEMPTED"), "submit REQUEUED train 2", "a2-node0 RUNNING train 2"]),
        ("RUNNING", [PLAN, *both("PREEMPTED"), "submit REQUEUED train 1", *both("RUNNING")]),
        ("SUCCEEDED", [PLAN, *both("PREEMPTED"), "submit REQUEUED train 1", *both("RUNNING"), *both("SUCCEEDED")]),
        ("RUNNING", [PLAN, *both("FAILED"), "submit REQUEUED train 1", "a1-node0 RUNNING train 1"]),
        # the newest attempt counts
        ("PLANNED", [PLAN, *both("FAILED"), ("submit PLANNED - 2", {"stages": ["train"], "num_nodes": 2})]),
        ("RUNNING", [PLAN, *both("FAILED"), "a2-node0 RUNNING train 2"]),
        ("FAILED", [PLAN, *both("SUCCEEDED"), "a2-node0 FAILED train 2"]),
        # several stages
        ("PLANNED", [CHAIN, "a1-node0 SUCCEEDED fetch 1"]),
        ("RUNNING", [CHAIN, "a1-node0 RUNNING fetch 1", "submit QUEUED train 1"]),
        ("QUEUED", [CHAIN, "a1-node0 SUCCEEDED fetch 1", "submit QUEUED train 1"]),
        ("SUCCEEDED", [CHAIN, "a1-node0 SUCCEEDED fetch 1", *both("SUCCEEDED")]),
        ("SUCCEEDED", [CHAIN, "submit SUCCEEDED fetch 1", *both("SUCCEEDED")]),
        ("RUNNING", [CHAIN, "a1-node0 SUCCEEDED fetch 1", "a1-node1 SUCCEEDED train 1"]),
        ("FAILED", [CHAIN, "a1-node0 FAILED fetch 1", "submit CANCELLED train 1"]),
        (
            "SUCCEEDED",  # the second attempt repeats only what had failed
            [CHAIN, "a1-node0 SUCCEEDED fetch 1", *both("FAILED"), ("submit PLANNED - 2", {"stages": ["train"]})]
            + [(f"a2-node{node} SUCCEEDED train 2", {"num_nodes": 2}) for node in (0, 1)],
        ),
    ],
)
def test_events_add_up_to_the_state_an_engineer_expects(expected: str, lines: list[object]) -> None:
    assert fold(history(*lines)).state == expected


def crash() -> list[Event]:
    late = {"exit_code": 143, "first_failing_rank": 0, "rank_ended": "2026-11-29T12:00:09Z", "reason": "late"}
    first = {
        "exit_code": 137,
        "first_failing_rank": 5,
        "rank_ended": "2026-11-29T12:00:08Z",
        "reason": "rank 5 was killed by SIGKILL",
        "last_lines": ["step 3", "step 4"],
    }
    return history(
        PLAN,
        SUBMITTED,
        *both("RUNNING"),
        ("a1-node0 FAILED train 1", late),
        ("a1-node1 FAILED train 1", first),
    )


def test_the_rank_that_failed_first_explains_the_run_though_its_node_spoke_last() -> None:
    state = fold(crash())
    assert (state.exit_code, state.first_failing_rank, state.reason) == (137, 5, "rank 5 was killed by SIGKILL")
    assert state.last_lines == ("step 3", "step 4")
    assert state.stages[0].nodes == {0: "FAILED", 1: "FAILED"}


def test_times_are_those_of_the_newest_attempt() -> None:
    state = fold(crash())
    assert [str(time)[17:19] for time in (state.submitted, state.started, state.ended)] == ["02", "03", "06"]
    again = fold([*crash(), *history(*[SUBMITTED] * 6, "submit SUBMITTED train 2")[6:]])
    assert (again.attempt, str(again.submitted)[17:19], again.started, again.ended) == (2, "07", None, None)


def test_a_succeeded_run_has_exit_code_0_and_a_running_one_has_none() -> None:
    assert fold(history(PLAN, *both("SUCCEEDED"))).exit_code == 0
    assert fold(history(PLAN, *both("RUNNING"))).exit_code is None


def test_a_run_without_events_is_unknown() -> None:
    assert fold([]).state == "UNKNOWN"


def test_the_state_does_not_depend_on_the_order_of_listing() -> None:
    events = crash()
    expected = fold(events)
    shuffled = random.Random(0)
    orders = itertools.islice(iter(lambda: shuffled.sample(events, len(events)), None), 200)
    assert all(fold(order) == expected for order in orders)
    assert isinstance(expected, RunState)


def test_a_stage_that_succeeded_may_say_why() -> None:
    skipped = {"exit_code": 0, "reason": "skipped: all graphs are there"}
    state = fold(history(PLAN, *both("RUNNING"), "a1-node1 SUCCEEDED train 1", ("a1-node0 SUCCEEDED train 1", skipped)))
    assert (state.state, state.exit_code, state.reason) == ("SUCCEEDED", 0, "skipped: all graphs are there")
