"""Runs that are killed (SIGKILL) at random moments continue as if they had not been.

A moment is drawn from the trace of an uninterrupted run: one of its stretches inside a step, a shard write, a commit or
a deletion, a quarter of the kills each, and a random part of its length. Where the kill fell is read off the killed
run's own trace. `TRAINWRIGHT_KILLS` sets how many there are; the histogram is printed.
"""

import functools
import os
import random
import select
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from tests.backends.native.ranks import join, start_ranks
from tests.backends.native.runs import MakeConfig, losses
from tests.kills.trace import COMMIT, DELETION, SHARD_WRITE, STEP, Phase, parse, run_traced
from trainwright.backends.native.retention import saved_checkpoints
from trainwright.config import RunConfig
from trainwright.node import commit
from trainwright.node.run_paths import RunPaths

CLASSES = (STEP, SHARD_WRITE, COMMIT, DELETION)
NUM_KILLS = int(os.environ.get("TRAINWRIGHT_KILLS", "12"))
SAVES = {
    "model__attention_dropout": 0.1,
    "trainer__max_steps": 10,
    "exp_manager__ema__enable": True,
    "exp_manager__checkpoint_callback_params__every_n_train_steps": 2,
    "exp_manager__checkpoint_callback_params__save_top_k": 0,  # so each save deletes the one before
}


@dataclass(frozen=True)
class Scenario:
    """What runs, and who is killed."""

    num_ranks: int
    async_save: bool
    kills_all: bool  # False: one rank, and the others are then stopped as torchrun does

    def config(self, make_config: MakeConfig) -> RunConfig:
        return make_config(
            **SAVES,
            data__micro_batch_size=2 // self.num_ranks,
            exp_manager__checkpoint_callback_params__async_save=self.async_save,
        )


SCENARIOS = {
    "the only rank": Scenario(num_ranks=1, async_save=False, kills_all=True),
    "one rank of two": Scenario(num_ranks=2, async_save=False, kills_all=False),
    "both ranks, saving in the background": Scenario(num_ranks=2, async_save=True, kills_all=True),
}


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_a_killed_run_continues_with_the_losses_of_one_that_was_not(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], scenario: Scenario
) -> None:
    config = scenario.config(make_config)
    expected, example = _run_to_the_end(config, tmp_path / "whole", scenario)
    wanted = ceil(NUM_KILLS / len(SCENARIOS) / len(CLASSES))
    randomness = random.Random(os.environ.get("TRAINWRIGHT_KILLS_SEED", "1"))
    fell: Counter[str] = Counter()
    for number in range(10 * wanted * len(CLASSES)):
        due = [name for name in CLASSES if fell[name] < wanted]
        if not due:
            break
        run_dir = tmp_path / f"killed-{number}"
        where = _kill_within(config, run_dir, scenario, _draw(example, due[0], randomness), randomness)
        if where is None:
            continue  # the run came to its end first
        fell[where] += 1
        assert set(join(start_ranks(config, run_dir, attempt=2, devices=scenario.num_ranks))) == {0}, (
            run_dir / "rank0.log"
        ).read_text()
        first, second = losses(run_dir), losses(run_dir, attempt=2)
        assert first | second == second | first == expected, f"killed inside a {where}"
        saved = saved_checkpoints(RunPaths(run_dir).checkpoints)
        assert saved[-1].step == config.trainer.max_steps
        assert not any(commit.verify(one.path) for one in saved)
        assert len(saved) == 1 or not second  # killed after the last commit, so nothing was left to save and delete
    with capsys.disabled():
        print(f"\nkills inside a {', '.join(f'{name}: {fell[name]}' for name in CLASSES)}")
    assert all(fell[name] >= wanted for name in CLASSES)


def _run_to_the_end(config: RunConfig, run_dir: Path, scenario: Scenario) -> tuple[dict[int, str], list[Phase]]:
    """Return the losses and the trace of an uninterrupted run."""
    trace = run_dir.with_suffix(".trace")
    ranks = start_ranks(config, run_dir, devices=scenario.num_ranks, run=functools.partial(run_traced, trace=trace))
    assert set(join(ranks)) == {0}, (run_dir / "rank0.log").read_text()
    return losses(run_dir), parse(trace.read_bytes())


@dataclass(frozen=True)
class Moment:
    """The `occurrence`-th stretch of that name, and how long after its beginning."""

    name: str
    occurrence: int
    delay_s: float


def _draw(example: Sequence[Phase], name: str, randomness: random.Random) -> Moment:
    """Return a moment inside one of the stretches of `example`; its last one has no end."""
    lengths = [(after.began_ns - phase.began_ns) / 1e9 for phase, after in pairwise(example) if phase.name == name]
    occurrence = randomness.randrange(len(lengths))
    return Moment(name, occurrence, randomness.uniform(0, lengths[occurrence]))


def _kill_within(
    config: RunConfig, run_dir: Path, scenario: Scenario, moment: Moment, randomness: random.Random
) -> str | None:
    """Start the run, kill it at about that moment, and return what it was at; None where it was over."""
    pipe = run_dir.with_suffix(".pipe")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    ranks = start_ranks(config, run_dir, devices=scenario.num_ranks, run=functools.partial(run_traced, trace=pipe))
    try:
        trace = _follow(reader, moment)
        if trace is None:
            join(ranks)
            return None
        time.sleep(moment.delay_s)  # the moment that was drawn, not a synchronisation
        victims = ranks if scenario.kills_all else [randomness.choice(ranks)]
        for victim in victims:
            victim.kill()
        killed_ns = time.monotonic_ns()
        _end(ranks)
        trace += _read(reader)
    finally:
        os.close(reader)
    if any(rank.exitcode != -signal.SIGKILL for rank in victims):
        return None
    return [phase.name for phase in parse(trace) if phase.began_ns <= killed_ns][-1]


def _follow(reader: int, moment: Moment) -> bytes | None:
    """Read a trace until the moment's stretch begins; None when the run ends before."""
    trace = b""
    while sum(phase.name == moment.name for phase in parse(trace)) <= moment.occurrence:
        ready, _, _ = select.select([reader], [], [], 60)
        assert ready, "the run hangs"
        content = _read(reader)
        if not content and trace:
            return None
        trace += content
    return trace


def _read(reader: int) -> bytes:
    try:
        return os.read(reader, 1 << 16)
    except BlockingIOError:
        return b""


def _end(ranks: Sequence[ForkServerProcess]) -> None:
    """Stop the ranks that are left, as torchrun does when one has failed, and wait for all."""
    for rank in ranks:
        rank.terminate()
    for rank in ranks:
        rank.join(timeout=30)
        rank.kill()
        rank.join()
