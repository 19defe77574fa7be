"""What of the code is recorded with a run, and what its jobs run."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Result
from tests.follow.conftest import Runs
from trainwright import code_state
from trainwright.node.run_paths import RunPaths

Train = Callable[..., Result]
SHOWS = "import ours; print(ours.VALUE)"


def git(repository: Path, *command: str) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
    asked = subprocess.run(["git", *identity, *command], cwd=repository, capture_output=True, text=True, check=True)
    return asked.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository with one commit, in which the `train` fixture starts runs too."""
    (tmp_path / "ours.py").write_text("VALUE = 'old'\n")
    (tmp_path / ".gitignore").write_text("ignored\n")
    git(tmp_path, "init")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    (tmp_path / "ignored").write_text("data")
    return tmp_path


def record_of(folder: Path) -> Path:
    (found,) = folder.glob("dry_runs/*/*")
    return RunPaths(found).code(1)


def test_commit_changes_and_new_files_are_recorded(repository: Path, train: Train) -> None:
    (repository / "ours.py").write_text("VALUE = 'changed'\n")
    (repository / "new file").write_text("x")
    assert train("dry_run=true").code == 0
    code = record_of(repository)
    state = json.loads((code / "state.json").read_text())
    assert state == {
        "schema_version": 1,
        "directory": str(repository),
        "commit": git(repository, "rev-parse", "HEAD"),
        "is_dirty": True,
        "changed": ["ours.py"],
        "untracked": ["new file"],
    }
    git(repository, "checkout", "ours.py")
    git(repository, "apply", str(code / "changes.diff"))
    assert (repository / "ours.py").read_text() == "VALUE = 'changed'\n"


def test_runs_of_before_are_no_changes(repository: Path, train: Train) -> None:
    assert [train("dry_run=true", "code=require_clean").code for _ in range(2)] == [0, 0]
    assert len(list(repository.glob("dry_runs/*/*"))) == 2


def look(repository: Path) -> code_state.CodeState | None:
    return code_state.look(repository, leave_out=(str(repository / "dry_runs"), str(repository / "outputs")))


def test_require_clean_refuses_with_the_list(repository: Path, train: Train) -> None:
    (repository / "ours.py").write_text("VALUE = 'changed'\n")
    (repository / "new.py").write_text("x")
    refused = train("code=require_clean")
    assert refused.code == 3
    assert f"code=require_clean, but {repository} has changed ours.py, new new.py; commit them" in refused.err


@pytest.mark.parametrize("mode", ["require_clean", "snapshot"])
def test_outside_of_a_repository_there_is_nothing_to_keep(mode: str, train: Train) -> None:
    refused = train(f"code={mode}")
    assert (refused.code, "is not started in a git repository" in refused.err) == (3, True)


@pytest.mark.parametrize(("mode", "value"), [("snapshot", "old"), ("record", "edited")])
def test_a_job_that_waited_runs_the_sources_of_its_submit_only_with_snapshot(
    mode: str, value: str, repository: Path, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    record = runs.make((SHOWS,), f"code={mode}", run_id="one", code=look(repository))
    (repository / "ours.py").write_text("VALUE = 'edited'\n")
    runs.follow(record)
    assert RunPaths(record.run_dir).rank_log("s0", 1, 0).read_text() == f"{value}\n"


def test_a_snapshot_holds_new_files_and_not_what_is_ignored_or_output(repository: Path, runs: Runs) -> None:
    (repository / "new.py").write_text("x")
    record = runs.make((SHOWS,), "code=snapshot", run_id="one", code=look(repository))
    snapshot = RunPaths(record.run_dir).code_snapshot(1)
    assert {path.name for path in snapshot.iterdir()} == {"ours.py", ".gitignore", "new.py"}


def test_a_repository_without_commits_is_all_new(tmp_path: Path) -> None:
    git(tmp_path, "init")
    (tmp_path / "a").write_text("x")
    git(tmp_path, "add", "a")
    code = code_state.look(tmp_path)
    assert code is not None
    assert (code.commit, code.changed, code.untracked) == (None, ("a",), ())
    assert b"+x" in code.diff


def test_a_secret_does_not_stand_in_the_recorded_diff(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED", "hunter2")
    (repository / "ours.py").write_text("VALUE = 'hunter2'\n")
    code = code_state.look(repository, hidden=("PLANTED",))
    assert code is not None
    assert b"+VALUE = '<PLANTED>'" in code.diff
    assert b"hunter2" not in code.diff
