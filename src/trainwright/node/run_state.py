"""The state of a run: a fold over its events, the same whatever order they are listed in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterable, Mapping, Sequence

from . import events as ev
from .events import Event

# When several nodes of a stage have ended, or several stages of a run differ, the first of these wins.
_NODE_PRECEDENCE = (ev.FAILED, ev.TIMEOUT, ev.CANCELLED, ev.PREEMPTED)
_STAGE_PRECEDENCE = (
    *_NODE_PRECEDENCE,
    ev.NOT_SUBMITTED,
    ev.UNKNOWN,
    ev.RUNNING,
    ev.REQUEUED,
    ev.QUEUED,
    ev.SUBMITTED,
    ev.PLANNED,
    ev.SUCCEEDED,
)
# A node that was told to stop does not know why. The scheduler does.
_STOPPED = (ev.CANCELLED, ev.PREEMPTED)
_REASONS_TO_STOP = (ev.TIMEOUT, ev.CANCELLED, ev.PREEMPTED)


@dataclass(frozen=True)
class StageState:
    """Where one stage stands in its newest attempt."""

    stage: str | None  # None: a run that never named a stage
    attempt: int
    state: str
    nodes: Mapping[int, str]  # node rank -> the last state it told
    exit_code: int | None  # None: not ended, or nobody knows
    reason: str | None  # None: nothing to explain
    first_failing_rank: int | None
    last_lines: tuple[str, ...]  # of the first failing rank
    submitted: str | None
    started: str | None
    ended: str | None


@dataclass(frozen=True)
class RunState:
    """Where a run stands. The details are those of the stage that decides."""

    state: str
    attempt: int
    stages: tuple[StageState, ...]
    exit_code: int | None
    reason: str | None
    first_failing_rank: int | None
    last_lines: tuple[str, ...]
    submitted: str | None
    started: str | None
    ended: str | None


def fold(events: Iterable[Event]) -> RunState:
    """Return the state that the events of one run add up to."""
    history = sorted(events, key=ev.order)
    if not history:
        return RunState(ev.UNKNOWN, 0, (), None, "the run has no events", None, (), None, None, None)
    stages = tuple(_fold_stage(stage, history) for stage in _stage_names(history))
    decisive = min(stages, key=lambda stage: _STAGE_PRECEDENCE.index(stage.state))
    attempt = max(event.attempt for event in history)
    ends = [stage.ended for stage in stages if stage.ended]
    return RunState(
        state=decisive.state,
        attempt=attempt,
        stages=stages,
        exit_code=decisive.exit_code,
        reason=decisive.reason,
        first_failing_rank=decisive.first_failing_rank,
        last_lines=decisive.last_lines,
        submitted=_earliest(stage.submitted for stage in stages if stage.attempt == attempt),
        started=_earliest(stage.started for stage in stages if stage.attempt == attempt),
        ended=max(ends) if decisive.state in ev.ENDED and ends else None,
    )


def _stage_names(history: Sequence[Event]) -> list[str | None]:
    """All stages in the order in which they were planned, then those that only spoke."""
    names: dict[str | None, None] = {}
    for event in history:
        names.update(dict.fromkeys(event.extra.get("stages", ()) if event.state == ev.PLANNED else ()))
    names.update(dict.fromkeys(event.stage for event in history if event.stage is not None))
    return list(names) or [None]


def _concerns(event: Event, stage: str | None) -> bool:
    """An event without a stage concerns those it lists, or all of them."""
    if event.stage is not None:
        return event.stage == stage
    return stage is None or stage in event.extra.get("stages", (stage,))


def _fold_stage(stage: str | None, history: Sequence[Event]) -> StageState:
    own = [event for event in history if _concerns(event, stage)]
    if not own:  # a run-level event that lists other stages is all there is
        return StageState(stage, 0, ev.UNKNOWN, {}, None, "no event tells of it", None, (), None, None, None)
    attempt = max(event.attempt for event in own)
    own = [event for event in own if event.attempt == attempt]
    requeued = max((index for index, event in enumerate(own) if event.state == ev.REQUEUED), default=None)
    current = own if requeued is None else own[requeued:]  # a requeue starts over
    words = [event for event in current if event.node is None or event.state == ev.REQUEUED]
    nodes = _last_words(current, from_running=requeued is not None)
    num_nodes = _num_nodes(own, stage)
    state, speaker, reason = _judge(nodes, words[-1] if words else None, num_nodes)
    extra: Mapping[str, Any] = speaker.extra if speaker else {}
    return StageState(
        stage=stage,
        attempt=attempt,
        state=state,
        nodes={node: nodes[node].state for node in sorted(nodes)},
        exit_code=0 if state == ev.SUCCEEDED else extra.get("exit_code"),
        reason=reason or extra.get("reason"),
        first_failing_rank=extra.get("first_failing_rank"),
        last_lines=tuple(extra.get("last_lines", ())),
        submitted=_earliest(event.time for event in own if event.state == ev.SUBMITTED),
        started=_earliest(event.time for event in own if event.state == ev.RUNNING),
        ended=max(event.time for event in current if event.state in ev.ENDED) if state in ev.ENDED else None,
    )


def _last_words(events: Sequence[Event], from_running: bool) -> dict[int, Event]:
    """The last event of each node; with `from_running`, what a node says before it runs again is about its past."""
    last: dict[int, Event] = {}
    for event in events:
        if event.node is None or event.state == ev.REQUEUED:
            continue
        if event.state == ev.RUNNING or event.node in last or not from_running:
            last[event.node] = event
    return last


def _judge(nodes: Mapping[int, Event], word: Event | None, num_nodes: int) -> tuple[str, Event | None, str | None]:
    """Return the state of a stage, the event that decides it, and a reason if that event gives none."""
    for state in _NODE_PRECEDENCE:
        speakers = [event for event in nodes.values() if event.state == state]
        if speakers:
            if state in _STOPPED and word is not None and word.state in _REASONS_TO_STOP:
                return word.state, word if "reason" in word.extra else _first(speakers), None
            return state, _first(speakers), None
    silent = [node for node in range(num_nodes) if node not in nodes or nodes[node].state != ev.SUCCEEDED]
    if nodes and not silent:
        told = [event for event in nodes.values() if event.extra.get("reason")]
        return ev.SUCCEEDED, _first(told) if told else None, None
    if not nodes:
        return (word.state, word, None) if word else (ev.UNKNOWN, None, "no node has spoken")
    if word is not None and word.state == ev.SUCCEEDED:
        return ev.UNKNOWN, word, f"the scheduler says SUCCEEDED, but of nodes {silent} nothing tells how they ended"
    if word is not None and word.state in (*_NODE_PRECEDENCE, ev.UNKNOWN):
        return word.state, word, None
    return ev.RUNNING, _first(list(nodes.values())), None


def _first(speakers: Sequence[Event]) -> Event:
    """The event whose rank ended first: what came down after it is a consequence."""
    return min(speakers, key=lambda event: (event.extra.get("rank_ended") or event.time, *ev.order(event)))


def _num_nodes(own: Sequence[Event], stage: str | None) -> int:
    """Nodes themselves know best; before they speak, the plan tells, as one number or one per stage."""
    told = [event.extra["num_nodes"] for event in reversed(own) if "num_nodes" in event.extra]
    number = told[0] if told else 1
    return int(number.get(stage, 1) if isinstance(number, dict) else number)


def _earliest(times: Iterable[str | None]) -> str | None:
    return min((time for time in times if time), default=None)
