"""The whole walk with real processes: `python train.py` to checkpoints, results, resume and signals."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainwright import registry
from trainwright.node.commit import read_commit
from trainwright.node.run_paths import RunPaths

TRAIN_PY = Path(__file__).parents[1] / "train.py"
TINY = (
    "model=llama_tiny",
    "~local",
    "model.hidden_size=16",
    "model.ffn_hidden_size=32",
    "data.seq_length=32",
    "data.micro_batch_size=1",
    "data.global_batch_size=2",
    "trainer.max_steps=4",
    "trainer.val_check_interval=2",
    "trainer.limit_val_batches=2",
    "trainer.log_every_n_steps=1",
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one directory for the runs of this module, so that the text is tokenized once."""
    return tmp_path_factory.mktemp("walk")


def train(home: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, TRAIN_PY, *TINY, *overrides], cwd=home, capture_output=True, text=True)


def losses(run: Path, attempt: int = 1) -> dict[int, float]:
    lines = RunPaths(run).metrics(attempt).read_text().splitlines()
    # A validation that an interrupted attempt owed is a line without a training loss.
    return {point["step"]: float(point["train_loss"]) for point in map(json.loads, lines) if "train_loss" in point}


def results(run: Path) -> dict[str, Any]:
    found = registry.results(run)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def finished(home: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Return a run of four steps on one rank, and what its command printed."""
    command = train(home, "run_id=one")
    assert command.returncode == 0, command.stderr
    return home / "outputs" / "llama_tiny" / "one", command


def test_a_run_leaves_a_checkpoint_events_and_results(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    run, command = finished
    assert registry.refresh(run).state == "SUCCEEDED"
    found = results(run)
    assert (found["steps"], found["consumed_samples"]) == (4, 8)
    assert found["batch"]["accumulate_grad_batches"] == 2
    committed = [read_commit(run / saved["path"]) for saved in found["checkpoints"]]
    assert [commit["step"] for commit in committed if commit] == [2, 4]
    assert len(list(run.glob("events.out.tfevents.*"))) == 1
    assert {path.name for path in run.iterdir() if path.is_dir()} == {"checkpoints", "run"}
    assert f"val_loss     {found['val_loss']:.4f}" in command.stdout
    assert f"trainwright tensorboard {run}" in command.stdout


def test_two_nodes_train_as_one_rank_does(finished: tuple[Path, object], home: Path) -> None:
    command = train(home, "run_id=two", "hardware.num_nodes=2")
    assert command.returncode == 0, command.stderr
    one, two = losses(finished[0]), losses(home / "outputs" / "llama_tiny" / "two")
    assert two == pytest.approx(one, rel=1e-5)  # fp32 sums in another order
    assert results(home / "outputs" / "llama_tiny" / "two")["batch"]["world_size"] == 2
    logs = RunPaths(home / "outputs" / "llama_tiny" / "two")
    assert logs.rank_log("train", 1, 1).is_file()


def test_a_run_id_resumes_and_a_changed_config_is_refused(finished: tuple[Path, object], home: Path) -> None:
    run, _ = finished
    refused = train(home, "run_id=one", "optim.lr=1e-4", "trainer.max_steps=6")
    assert refused.returncode == 3
    assert "optim.lr: 0.003 -> 0.0001" in refused.stderr
    resumed = train(home, "run_id=one", "trainer.max_steps=6")
    assert resumed.returncode == 0, resumed.stderr
    assert sorted(losses(run, attempt=2)) == [5, 6]
    assert (registry.refresh(run).state, registry.refresh(run).attempt) == ("SUCCEEDED", 2)
    assert (results(run)["steps"], results(run)["attempt"]) == (6, 2)


@pytest.fixture
def long_run(home: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Return a function that starts a run which would go on for long, and waits for its first steps."""
    started: list[subprocess.Popen[str]] = []

    def start(run_id: str) -> subprocess.Popen[str]:
        command = [sys.executable, TRAIN_PY, *TINY, f"run_id={run_id}", "trainer.max_steps=100000"]
        process = subprocess.Popen(command, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        started.append(process)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 3/"):
                return process
        pytest.fail("the run ended before its third step")

    yield start
    for process in started:
        process.kill()
        process.communicate()


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)  # polling another process, not synchronising with it


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_polite_signal_saves_and_exits_75(
    how: signal.Signals, long_run: Callable[[str], subprocess.Popen[str]], home: Path
) -> None:
    run_id = f"stopped-{how}"
    process = long_run(run_id)
    process.send_signal(how)
    process.communicate(timeout=60)
    run = home / "outputs" / "llama_tiny" / run_id
    assert (process.returncode, registry.refresh(run).state) == (75, "PREEMPTED")
    last_step = max(losses(run))
    saved = [read_commit(path) for path in RunPaths(run).checkpoints.iterdir()]
    assert max(commit["step"] for commit in saved if commit) == last_step


def test_a_killed_command_leaves_no_rank_behind(long_run: Callable[[str], subprocess.Popen[str]], home: Path) -> None:
    process = long_run("killed")
    run = home / "outputs" / "llama_tiny" / "killed"
    rank = json.loads(RunPaths(run).rank_record("train", 1, 0).read_text())["pid"]
    process.kill()
    wait_until(lambda: registry.refresh(run).state == "PREEMPTED")
    wait_until(lambda: not os.path.exists(f"/proc/{rank}"))


def test_a_sweep_makes_recorded_runs_and_a_table(home: Path) -> None:
    command = train(home, "name=sweep", "-m", "optim.lr=1e-3,3e-4", "trainer.max_steps=2")
    assert command.returncode == 0, command.stderr
    runs = list((home / "outputs" / "sweep").glob("sweep-*"))
    assert len(runs) == 2
    assert all(registry.refresh(run).state == "SUCCEEDED" for run in runs)
    table = command.stdout.splitlines()[-3:]
    assert table[0].split() == ["run", "optim.lr", "state", "val_loss", "time"]
    assert [line.split()[1:3] for line in table[1:]] == [["0.001", "SUCCEEDED"], ["0.0003", "SUCCEEDED"]]
    (listing,) = (home / "outputs" / "sweep" / "sweeps").glob("*/jobs.json")
    assert [job["overrides"][-1] for job in json.loads(listing.read_text())["jobs"]] == ["trainer.max_steps=2"] * 2


def test_a_failing_run_fails_the_command_and_says_where_to_read(home: Path) -> None:
    empty = home / "empty.txt"
    empty.write_text("too short\n")
    command = train(home, "run_id=failing", f"data.text={empty}")
    assert command.returncode == 1
    run = home / "outputs" / "llama_tiny" / "failing"
    assert registry.refresh(run).state == "FAILED"
    assert "error: " in RunPaths(run).rank_log("train", 1, 0).read_text()
    assert str(RunPaths(run).logs) in command.stderr
    assert "Traceback" not in command.stdout + command.stderr


def test_hydra_mode_run_trains_in_this_process(home: Path) -> None:
    command = train(home, "run_id=here", "hydra.mode=RUN", "trainer.max_steps=1")
    assert command.returncode == 0, command.stderr
    run = home / "outputs" / "llama_tiny" / "here"
    assert (registry.refresh(run).state, results(run)["steps"]) == ("SUCCEEDED", 1)
    assert not list(home.glob("outputs/20*")), "Hydra wrote a directory of its own"


def test_a_full_disk_leaves_no_half_made_run(home: Path) -> None:
    """A limit on the size of files, since a full disk cannot be had without mounting one: both refuse the write."""
    import resource

    def no_space() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))

    command = subprocess.run(
        [sys.executable, "-B", TRAIN_PY, *TINY, "name=full"],
        cwd=home,
        capture_output=True,
        text=True,
        preexec_fn=no_space,
    )
    assert command.returncode == 2
    assert "exp_manager.exp_dir" in command.stderr
    assert "File too large" in command.stderr
    assert not list((home / "outputs" / "full").iterdir())
