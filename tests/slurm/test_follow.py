"""The commands that follow runs, on a real Slurm."""

import json
import os
import pickle
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Result
from tests.slurm.cluster import Cluster, wait_for
from tests.slurm.runs import OK, WAITS, Runs, await_log, await_state, job_id, log, stages
from trainwright import cli, registry
from trainwright.follow import find, overview
from trainwright.node import events
from trainwright.node.run_paths import RunPaths
from trainwright.registry import RunRecord

Command = Callable[..., Result]
SUBMIT = (
    "import pickle, sys; from trainwright import dispatch;"
    "dispatch.submit_and_follow([pickle.load(open(sys.argv[1], 'rb'))])"
)


@pytest.fixture
def trainwright(runs: Runs, capfd: pytest.CaptureFixture[str]) -> Command:
    """Return `trainwright COMMAND ...` as a function that looks for the runs of this test."""

    def command(name: str, *arguments: str) -> Result:
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main([name, "--exp-dir", f"{runs.shared}/experiments", *arguments])
        return Result(int(ended.value.code or 0), *capfd.readouterr())

    return command


def test_a_sweep_in_the_queue_and_on_nodes_is_cancelled_whole(runs: Runs, slurm: Cluster, trainwright: Command) -> None:
    running, waiting = runs.start((WAITS, OK)), runs.start((OK,), overrides=("launcher.cpus_per_task=64",))
    sweep = registry.create_sweep([running, waiting])
    await_log(running, "ready")
    states = {run["run_id"]: run["state"] for run in json.loads(trainwright("ps", "--json").out)["runs"]}
    assert states == {running.run_id: "RUNNING", waiting.run_id: "QUEUED"}
    assert "PartitionConfig" in trainwright("status", waiting.run_id).out
    for _ in range(2):
        assert trainwright("cancel", sweep.name, "--yes").code == 0
    assert stages(running) == {"s0": "CANCELLED", "s1": "CANCELLED"}
    assert stages(waiting) == {"s0": "CANCELLED"}
    jobs = [job_id(running), job_id(running, "s1"), job_id(waiting)]
    wait_for(lambda: all(slurm.job(job)["JobState"] == "CANCELLED" for job in jobs), "Slurm ends all three")


def test_a_run_that_slurm_forgot_is_unknown_until_its_own_word_decides(runs: Runs, trainwright: Command) -> None:
    (record,) = runs.make((OK,))
    paths = RunPaths(record.run_dir)
    events.append(paths, "SUBMITTED", who="submit", stage="s0", attempt=1, job_id="999999")
    events.append(paths, "RUNNING", who="a1-node0", stage="s0", attempt=1, num_nodes=1)
    told = json.loads(trainwright("status", record.run_id, "--json").out)["run"]
    assert (told["state"], told["reason"]) == ("UNKNOWN", "the scheduler has forgotten job 999999")
    events.append(paths, "SUCCEEDED", who="a1-node0", stage="s0", attempt=1, num_nodes=1)
    assert json.loads(trainwright("status", record.run_id, "--json").out)["run"]["state"] == "SUCCEEDED"


def test_a_machine_without_slurm_believes_the_events(
    runs: Runs, trainwright: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (record,) = runs.make((OK,))
    events.append(RunPaths(record.run_dir), "SUBMITTED", who="submit", stage="s0", attempt=1, job_id="999999")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert json.loads(trainwright("status", record.run_id, "--json").out)["run"]["state"] == "SUBMITTED"


def test_what_slurm_alone_knows_is_written_down_before_it_forgets(
    runs: Runs, slurm: Cluster, trainwright: Command
) -> None:
    record = runs.start((OK,), overrides=("launcher.cpus_per_task=64",))
    slurm.ask("scancel", job_id(record))
    wait_for(lambda: slurm.job(job_id(record))["JobState"] == "CANCELLED", "Slurm has ended it")
    assert registry.refresh(record.run_dir).state == "SUBMITTED"
    trainwright("ps")
    assert registry.refresh(record.run_dir).state == "CANCELLED"


@pytest.fixture
def followed(runs: Runs) -> Iterator[Callable[[int], tuple[RunRecord, "subprocess.Popen[bytes]"]]]:
    """Return a function that follows a run with launcher.wait=true from a process with that standard input."""
    started: list[subprocess.Popen[bytes]] = []

    def start(stdin: int) -> tuple[RunRecord, "subprocess.Popen[bytes]"]:
        (record,) = runs.make((WAITS,))
        pickled = runs.shared / "record"
        pickled.write_bytes(pickle.dumps(record))
        process = subprocess.Popen([sys.executable, "-c", SUBMIT, pickled], stdin=stdin, stderr=subprocess.PIPE)
        started.append(process)
        await_log(record, "ready")
        return record, process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_ctrl_c_without_a_terminal_leaves_the_job_running(
    followed: Callable[[int], tuple[RunRecord, "subprocess.Popen[bytes]"]], slurm: Cluster
) -> None:
    record, process = followed(subprocess.DEVNULL)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    assert slurm.job(job_id(record))["JobState"] == "RUNNING"
    slurm.ask("scancel", job_id(record))
    await_state(record, "CANCELLED")


def test_ctrl_c_at_a_terminal_asks_and_cancels(
    followed: Callable[[int], tuple[RunRecord, "subprocess.Popen[bytes]"]], slurm: Cluster
) -> None:
    ours, theirs = pty.openpty()
    record, process = followed(theirs)
    process.send_signal(signal.SIGINT)
    os.write(ours, b"y\n")
    _, said = process.communicate(timeout=60)
    assert b"cancel them all? [y/N]" in said
    wait_for(lambda: slurm.job(job_id(record))["JobState"] == "CANCELLED", "Slurm ends it")
    await_state(record, "CANCELLED")
    os.close(ours)
    os.close(theirs)


def test_a_secret_reaches_the_node_and_no_file(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED", "hunter2-hunter2")
    code = "import os; print(os.environ['PLANTED'][::-1])"
    (outcome,) = runs.follow((code,), overrides=("launcher.env_from=[PLANTED]",), env_from=("PLANTED",))
    assert log(outcome) == "2retnuh-2retnuh\n"
    files = [path for path in runs.shared.rglob("*") if path.is_file()]
    assert not [path for path in files if b"hunter2-hunter2" in path.read_bytes()]


SWEEPER = """
import json
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper


@dataclass
class Node:
    _target_: str = "hydra_plugins.descent.Descent"


ConfigStore.instance().store(group="hydra/sweeper", name="descent", node=Node, provider="test")


class Descent(Sweeper):
    '''Takes the learning rate that follows from the value of the run before, as searches do.'''

    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            config=config, hydra_context=hydra_context, task_function=task_function
        )

    def sweep(self, arguments):
        (first,) = self.launcher.launch([[*arguments, "optim.lr=1e-3"]], initial_job_idx=0)
        following = f"optim.lr={first.return_value / 1000}"
        self.launcher.launch([[*arguments, following, "dry_run=true"]], initial_job_idx=1)
"""


def test_a_sweeper_that_needs_values_gets_them_with_wait(slurm: Cluster, on_slurm: tuple[str, ...], runs: Runs) -> None:
    """hydra-optuna-sweeper 1.3 brings Optuna 2.10 and 16 packages more; this does what it does."""
    plugin = runs.shared / "plugins" / "hydra_plugins" / "descent"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(SWEEPER)
    text = runs.shared / "text.txt"
    text.write_text("to be or not to be, that is the question\n\n" * 6000)
    swept = subprocess.run(
        [
            sys.executable,
            "-c",
            "from trainwright.app import main; main()",
            *on_slurm,
            "hydra/sweeper=descent",
            "debug=fast",
            "launcher.wait=true",
            "launcher.grace_s=20",
            "launcher.signal_s=30",
            f"site.slurm.shared_dir={runs.shared}",
            f"exp_manager.exp_dir={runs.shared}/experiments",
            f"data.text={text}",
            "trainer.max_steps=1",
            "trainer.limit_val_batches=1",
            "~local",
        ],
        cwd=runs.shared,
        env={**os.environ, "PYTHONPATH": str(runs.shared / "plugins")},
        capture_output=True,
        text=True,
    )
    assert swept.returncode == 0, swept.stderr
    (first,) = (overview.look(run) for run in find.find_runs([runs.shared / "experiments"]))
    (following,) = runs.shared.glob("dry_runs/*/*")
    assert first.metrics.val_loss is not None
    assert registry.read_record(following, 1)["config"]["optim"]["lr"] == first.metrics.val_loss / 1000
    assert "step 1/1  train_loss" in swept.stdout
