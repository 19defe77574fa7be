"""retry and resume: real training runs, composed again from what was given at first."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.follow.conftest import BOOM, OK, Runs
from trainwright import dispatch, registry
from trainwright.follow import overview
from trainwright.follow.observe import confirm
from trainwright.follow.retry import to_retry
from trainwright.node.run_paths import RunPaths

TRAINWRIGHT = [sys.executable, "-c", "from trainwright.cli import main; main()"]
TINY = (
    "model=llama_tiny",
    "~local",
    "model.hidden_size=16",
    "model.ffn_hidden_size=32",
    "data.seq_length=16",
    "data.micro_batch_size=1",
    "data.global_batch_size=1",
    "trainer.max_steps=1",
    "trainer.val_check_interval=1",
    "trainer.limit_val_batches=1",
)

TEXT = "to be or not to be, that is the question\n\n" * 6000


def trainwright(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TRAINWRIGHT, *arguments], cwd=home, capture_output=True, text=True)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where a sweep of two runs was started, of which the second failed for want of text."""
    home = tmp_path_factory.mktemp("retry")
    (home / "long.txt").write_text(TEXT)
    (home / "short.txt").write_text("too short")
    swept = trainwright(
        home,
        "train",
        *TINY,
        "-m",
        "name=pair",
        f"data.text={home}/long.txt,{home}/short.txt",
        "launcher.max_parallel=2",
    )
    assert (swept.returncode, "1 of 2 runs did not succeed" in swept.stderr) == (1, True)
    return home


def sweep(home: Path) -> list[dict[str, Any]]:
    (listing,) = (home / "outputs" / "pair" / "sweeps").glob("*/jobs.json")
    runs: list[dict[str, Any]] = json.loads(listing.read_text())["jobs"]
    return runs


def test_retry_refuses_a_config_that_composes_to_something_else(home: Path) -> None:
    record = RunPaths(sweep(home)[1]["run_dir"]).record(1)
    as_recorded = record.read_text()
    record.write_text(as_recorded.replace("weight_decay: 0.1\n", "weight_decay: 0.5\n"))
    assert record.read_text() != as_recorded
    refused = trainwright(home, "retry", sweep(home)[1]["run_id"])
    record.write_text(as_recorded)
    assert refused.returncode == 2
    assert "optim.weight_decay: 0.5 -> 0.1" in refused.stderr
    assert "--accept-changes" in refused.stderr
    assert registry.last_attempt(Path(sweep(home)[1]["run_dir"])) == 1


def test_retry_sends_only_what_failed_from_wherever_it_is_given(home: Path, tmp_path: Path) -> None:
    (home / "short.txt").write_text(TEXT)
    (listing,) = (home / "outputs" / "pair" / "sweeps").iterdir()
    again = trainwright(tmp_path, "retry", "--failed", "--json", str(listing))
    assert again.returncode == 0, again.stderr
    succeeded, failed = sweep(home)
    told = json.loads(again.stdout)
    assert told["runs"] == [{"run_id": failed["run_id"], "state": "SUCCEEDED", "attempt": 2}]
    assert [registry.last_attempt(Path(run["run_dir"])) for run in (succeeded, failed)] == [1, 2]
    assert len(list(listing.parent.iterdir())) == 1, "no new sweep"
    nothing = trainwright(home, "retry", listing.name)
    assert (nothing.returncode, nothing.stdout[:24]) == (0, "nothing to start again: ")


def test_resume_is_the_same_run_with_what_a_resume_may_change(home: Path, tmp_path: Path) -> None:
    run = Path(sweep(home)[0]["run_dir"])
    refused = trainwright(tmp_path, "resume", str(run), "trainer.max_steps=2", "optim.lr=1")
    assert refused.returncode == 3
    assert f"run_id={run.name} was started with another config: optim.lr: 0.003 -> 1.0" in refused.stderr
    resumed = trainwright(tmp_path, "resume", str(run), "trainer.max_steps=2", "dry_run=true")
    assert resumed.returncode == 0, resumed.stderr
    assert f"dry run of {run.name}" in resumed.stdout
    assert " 2 steps, " in resumed.stdout


def test_what_is_retried_follows_from_the_state(runs: Runs) -> None:
    fine, failed, planned = (runs.make((code,), run_id=name) for name, code in (("a", OK), ("b", BOOM), ("c", OK)))
    dispatch.submit_and_follow([fine, failed])
    seen = confirm([overview.look(record.run_dir) for record in (fine, failed, planned)])
    assert [run.run_id for run in to_retry(seen, only_failed=True)] == ["b"]
    assert [run.run_id for run in to_retry(seen, only_failed=False)] == ["b"], "the process that planned c lives"
    record = RunPaths(planned.run_dir).record(1)
    lines = record.read_text().splitlines()
    record.write_text("\n".join("  started: 1" if line.startswith("  started: ") else line for line in lines))
    seen = confirm([overview.look(record.run_dir) for record in (fine, failed, planned)])
    assert [run.run_id for run in to_retry(seen, only_failed=False)] == ["b", "c"]
