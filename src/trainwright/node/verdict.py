"""How a node's part of a run ended: from the ends of its ranks to one state and one exit code."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from . import events
from .events import Event
from .rank import PREEMPTED_CODE, RankEnd
from .signals import signal_name
from .supervisor import Outcome

# A rank that knows nothing of SIGUSR1 dies of it, or of our SIGKILL after the grace: preempted, not failed.
_KILLED_BY_PREEMPTION = {signal.SIGUSR1, signal.SIGTERM, signal.SIGKILL}


@dataclass(frozen=True)
class Verdict:
    """The worker's last word."""

    state: str
    exit_code: int
    reason: str | None  # None: it succeeded, and has nothing to say of that
    first: RankEnd | None  # the rank to blame; None: no rank


def judge(outcome: Outcome) -> Verdict:
    """Return what the ends of the ranks and the signal to stop add up to.

    A run that was told to stop has not succeeded, even if its ranks end with 0: scripts that save and leave do that.
    """
    failed = sorted((end for end in outcome.ends.values() if end.exit_code), key=lambda end: end.ended)
    if outcome.peer is not None:
        return _judge_follower(outcome.peer, outcome)
    if outcome.missing and not failed:
        return _judge_launcher(outcome)
    crashed = [end for end in failed if end.exit_code != PREEMPTED_CODE]
    if outcome.stopped_by is not None:
        return _judge_stopped(outcome.stopped_by, failed, crashed)
    if crashed:
        return Verdict(events.FAILED, crashed[0].exit_code, _blame(crashed[0], outcome), crashed[0])
    if failed:
        return Verdict(events.PREEMPTED, PREEMPTED_CODE, "the ranks asked to be started again", None)
    told = [end.reason for _, end in sorted(outcome.ends.items()) if end.reason is not None]
    return Verdict(events.SUCCEEDED, 0, told[0] if told else None, None)


def judge_preparation(outcome: Outcome, said: str | None) -> Verdict | None:
    """Return the last word on a stage whose ranks cannot start; None: they can.

    `said` is why, in the words of what ran before them; None: it left none.
    """
    if outcome.stopped_by is not None or outcome.peer is not None:
        return judge(outcome)
    code = outcome.launcher_code if outcome.launcher_code >= 0 else 128 - outcome.launcher_code
    if not code:
        return None
    state = events.PREEMPTED if code == PREEMPTED_CODE else events.FAILED  # another node was, which this one waited for
    return Verdict(state, code, f"before the ranks: {said or f'ended with exit code {code}'}", None)


def _judge_stopped(number: int, failed: list[RankEnd], crashed: list[RankEnd]) -> Verdict:
    reason = f"stopped by {signal_name(number)}"
    if number == signal.SIGUSR1:  # the scheduler's announcement that time is nearly over
        crashed = [end for end in crashed if end.signal not in _KILLED_BY_PREEMPTION]
        if crashed:
            return Verdict(events.FAILED, crashed[0].exit_code, f"{reason}; {crashed[0]}", crashed[0])
        return Verdict(events.PREEMPTED, PREEMPTED_CODE, reason, None)
    if crashed:
        return Verdict(events.CANCELLED, crashed[0].exit_code, f"{reason}; {crashed[0]}", crashed[0])
    if failed:
        return Verdict(events.PREEMPTED, PREEMPTED_CODE, reason, None)
    return Verdict(events.CANCELLED, 128 + number, reason, None)


def _blame(crashed: RankEnd, outcome: Outcome) -> str:
    """Say who failed first, and which ranks had left before: one that ends early makes the others fail."""
    early = sorted(end.rank for end in outcome.ends.values() if not end.exit_code and end.ended < crashed.ended)
    return f"{crashed}, after ranks {early} had ended with 0" if early else str(crashed)


def _judge_follower(peer: Event, outcome: Outcome) -> Verdict:
    """Return the word of a node that was stopped since another had ended: it follows that one's exit code."""
    reason = f"stopped since node {peer.node} was {peer.state}: {peer.extra.get('reason')}"
    saved = all(end.exit_code in (0, PREEMPTED_CODE) for end in outcome.ends.values())
    if saved and not outcome.missing and peer.state == events.PREEMPTED:
        return Verdict(events.PREEMPTED, PREEMPTED_CODE, reason, None)
    return Verdict(events.CANCELLED, int(peer.extra.get("exit_code") or 1), reason, None)


def _judge_launcher(outcome: Outcome) -> Verdict:
    if outcome.stopped_by is not None:
        return _judge_stopped(outcome.stopped_by, [], [])
    code = outcome.launcher_code
    code = 128 - code if code < 0 else code or 1
    reason = f"the launcher ended with exit code {code} before ranks {list(outcome.missing)} started"
    return Verdict(events.FAILED, code, reason, None)
