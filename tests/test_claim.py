"""One run, one process that works on it: who claims an attempt, and when the claim is over."""

import multiprocessing
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir

from tests.test_walk import TINY, TRAIN_PY, losses, train, wait_until
from trainwright import registry
from trainwright.dispatch import Composed, prepare
from trainwright.errors import UserError
from trainwright.node import events, processes
from trainwright.node.run_paths import RunPaths
from trainwright.places import CONF
from trainwright.registry import RunRecord

ME = processes.identity()
RECYCLED = {**ME, "started": ME["started"] - 1}
ELSEWHERE = {**ME, "host": "elsewhere"}


def _record(exp_dir: Path) -> RunRecord:
    """Return the next attempt at the run `one`, as this process sees it."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        tree = compose("config", ["model=llama_tiny", "run_id=one", f"exp_manager.exp_dir={exp_dir}", "~local"])
    (record,) = prepare([Composed(number=0, overrides=(), tree=tree)])
    return record


def _claim(exp_dir: Path, ready: Any, outcomes: Any) -> None:
    record = _record(exp_dir)
    ready.wait()
    try:
        registry.create(record)
    except UserError as refused:
        outcomes.put(str(refused))
    else:
        outcomes.put("won")


@pytest.mark.parametrize("attempt", [1, 2])
def test_of_processes_that_start_one_attempt_at_once_exactly_one_wins(tmp_path: Path, attempt: int) -> None:
    if attempt == 2:
        first = _record(tmp_path)
        registry.create(first)
        registry.note(first, events.FAILED, stage="train")
    context = multiprocessing.get_context("fork")
    ready, outcomes = context.Barrier(4), context.Queue()
    starters = [context.Process(target=_claim, args=(tmp_path, ready, outcomes)) for _ in range(4)]
    for starter in starters:
        starter.start()
    told = sorted(outcomes.get(timeout=60) for _ in starters)
    assert told == ["run_id: another process is starting one at this moment; wait for it"] * 3 + ["won"]
    for starter in starters:
        starter.join()
        assert starter.exitcode == 0
    assert registry.last_attempt(tmp_path / "llama_tiny" / "one") == attempt


@pytest.mark.parametrize(
    ("submitter", "worker", "told", "is_held"),
    [
        (ME, None, (), True),  # recorded, not submitted yet
        (RECYCLED, None, (), False),  # its process id belongs to another one by now
        (ELSEWHERE, None, (), True),  # nobody here can tell
        (RECYCLED, ME, (events.RUNNING,), True),  # the submitter was killed, a worker still saves
        (RECYCLED, RECYCLED, (events.RUNNING,), False),  # the machine lost power
        (ME, ME, (events.RUNNING, events.FAILED), False),  # the command goes on with other runs of its sweep
        (RECYCLED, ELSEWHERE, (events.RUNNING, events.SUCCEEDED), False),
    ],
)
def test_an_attempt_is_held_by_the_processes_that_still_work_on_it(
    tmp_path: Path,
    submitter: dict[str, Any],
    worker: dict[str, Any] | None,
    told: tuple[str, ...],
    is_held: bool,
) -> None:
    record = _record(tmp_path)
    registry.create(record)
    paths = RunPaths(record.run_dir)
    tree = registry.read_record(record.run_dir, 1)
    assert tree["process"] == ME
    paths.record(1).write_text(yaml.safe_dump({**tree, "process": submitter}))
    for state in told:
        extra = {"process": worker} if state == events.RUNNING else {}
        events.append(paths, state, who=events.node_who(1, 0), stage="train", attempt=1, **extra)
    assert (registry.holder(record.run_dir, 1) is not None) == is_held
    found = [finding.rule for finding in _record(tmp_path).findings if finding.severity == "error"]
    assert found == (["still-running"] if is_held else [])


def test_a_node_that_failed_does_not_hide_one_that_still_stops(tmp_path: Path) -> None:
    record = _record(tmp_path)
    registry.create(record)
    paths = RunPaths(record.run_dir)
    for node in (0, 1):
        who = events.node_who(1, node)
        events.append(paths, events.RUNNING, who=who, stage="train", attempt=1, num_nodes=2, process=ME)
    events.append(paths, events.FAILED, who=events.node_who(1, 0), stage="train", attempt=1, num_nodes=2)
    assert registry.refresh(record.run_dir).state == events.FAILED
    assert registry.holder(record.run_dir, 1) == f"process {ME['pid']} on {ME['host']}"


def test_a_second_command_is_refused_while_a_run_runs_and_resumes_it_after_a_crash(tmp_path: Path) -> None:
    command = [sys.executable, TRAIN_PY, *TINY, "run_id=one", "trainer.max_steps=100000"]
    first = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert first.stdout is not None
        assert any(line.startswith("step 3/") for line in first.stdout)
        second = train(tmp_path, "run_id=one")
        assert second.returncode == 3
        assert f"[still-running] run_id=one is still worked on by process {first.pid} on" in second.stderr
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    run = tmp_path / "outputs" / "llama_tiny" / "one"
    wait_until(lambda: registry.holder(run, 1) is None)
    stopped_after = max(losses(run))
    third = train(tmp_path, "run_id=one", f"trainer.max_steps={stopped_after + 2}")
    assert third.returncode == 0, third.stderr
    assert list(losses(run, attempt=2)) == [stopped_after + 1, stopped_after + 2]
