"""Runs of Python snippets on this machine, and the command line that follows them."""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.conftest import Result
from trainwright import cli, dispatch, registry
from trainwright.code_state import CodeState
from trainwright.config import RunConfig
from trainwright.job import JobSpec
from trainwright.node.run_paths import RunPaths
from trainwright.plan import make_plan
from trainwright.registry import RunRecord

OK = "print('fine')"
BOOM = "import sys; print('boom'); sys.exit(7)"
WAITS = "import signal; print('ready', flush=True); signal.pause()"


@dataclass
class Runs:
    """Makes and submits runs below one exp_dir."""

    parsed: Callable[..., RunConfig]
    exp_dir: Path
    submitters: list[multiprocessing.process.BaseProcess] = field(default_factory=list)

    def make(
        self, chain: Sequence[str], *overrides: str, run_id: str | None = None, code: CodeState | None = None
    ) -> RunRecord:
        """Record one run: a stage for each snippet, whose argv[1] is RUN_DIR."""
        config = self.parsed(*overrides, f"exp_manager.exp_dir={self.exp_dir}")
        made = run_id or registry.new_id(config.name)
        run_dir = str(registry.run_dir(config, made))
        jobs = tuple(
            JobSpec(
                run_id=made,
                run_dir=run_dir,
                stage=f"s{number}",
                attempt=1,
                launch="plain",
                command=(sys.executable, "-c", code, run_dir),
                python=sys.executable,
                env=config.launcher.env,
                num_nodes=config.hardware.num_nodes,
                devices=1,
                image=None,
                time_limit_s=None,
                grace_s=5.0,
                files={},
            )
            for number, code in enumerate(chain)
        )
        record = RunRecord(
            run_id=made,
            attempt=1,
            config=config,
            plan=make_plan(config),
            findings=(),
            jobs=dispatch.surround(jobs, config, code),
            code=code,
            overrides=(*overrides, "~local"),
        )
        registry.create(record)
        return record

    def follow(self, *records: RunRecord) -> None:
        """Submit runs and wait for their ends."""
        dispatch.submit_and_follow(records)

    def start(self, *records: RunRecord) -> multiprocessing.process.BaseProcess:
        """Submit runs from a process of their own, as a command in another terminal does."""
        submitter = multiprocessing.get_context("spawn").Process(target=_submit, args=(records,))
        submitter.start()
        self.submitters.append(submitter)
        return submitter


def _submit(records: Sequence[RunRecord]) -> None:
    """Submit and follow, with a terminal of its own that nobody reads."""
    silent = os.open(os.devnull, os.O_WRONLY)
    for shown in (1, 2):
        os.dup2(silent, shown)
    dispatch.submit_and_follow(records)


@pytest.fixture
def runs(parsed: Callable[..., RunConfig], tmp_path: Path) -> Iterator[Runs]:
    made = Runs(parsed, tmp_path / "exp")
    yield made
    for submitter in made.submitters:
        submitter.kill()
        submitter.join()


@pytest.fixture
def trainwright(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    """Return `trainwright COMMAND ...` as a function that looks for runs below `exp`."""
    monkeypatch.chdir(tmp_path)
    runs.exp_dir.mkdir(exist_ok=True)

    def command(name: str, *arguments: str) -> Result:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--exp-dir", str(runs.exp_dir), *arguments])
        return Result(int(ended.value.code or 0), *capfd.readouterr())

    return command


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Return once `condition()` is true: polling another process."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.05)


def await_log(record: RunRecord, text: str, stage: str = "s0") -> None:
    log = RunPaths(record.run_dir).rank_log(stage, 1, 0)
    wait_for(lambda: log.exists() and text in log.read_text(), f"{text!r} in {log}")
