"""Directories as NxDT and NeMo leave them, and what the janitor makes of them."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from trainwright.node.janitor import JanitorError, Order, global_step, look, tidy

TP = 4


def checkpoint(
    checkpoints: Path, step: int, *, age: float = 0.0, done: bool = True, name: str | None = None, suffix: str = ""
) -> Path:
    """A checkpoint as NxD writes it, `age` seconds old by its directory's time."""
    path = checkpoints / (name or f"tanuki--step={step}-consumed_samples={step * 8}.0{suffix}.ckpt")
    for part in ("model", "optim"):
        (path / part).mkdir(parents=True)
        for rank in range(TP):
            shard = path / part / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt"
            shard.write_bytes(b"weights")
            Path(f"{shard}.tensors").mkdir()
    (path / "checkpoint").write_text("1")
    (path / "user_content.pt").write_bytes(b"content")
    if done:
        (path / "done").write_text("1")
    os.utime(path, (1.7e9 - age, 1.7e9 - age))
    return path


def marker(checkpoint: Path) -> Path:
    path = checkpoint.with_name(f"{checkpoint.name[: -len('.ckpt')]}-unfinished")
    path.touch()
    return path


def tidied(checkpoints: Path, *, has_resumed: bool = False, may_ignore_damaged: bool = False) -> Order:
    return tidy(checkpoints, has_resumed=has_resumed, may_ignore_damaged=may_ignore_damaged)


def nxdt_resumes_from(checkpoints: Path) -> str | None:
    """NxDT's own rule: the newest by time among all that look like checkpoints."""
    found = sorted(checkpoints.glob("**/*.ckpt"), key=lambda path: path.stat().st_mtime)
    return found[-1].name if found else None


def test_without_checkpoints_a_run_starts_at_step_0(tmp_path: Path) -> None:
    assert tidied(tmp_path / "checkpoints") == Order(None, ())
    (tmp_path / "checkpoints").mkdir()
    assert tidied(tmp_path / "checkpoints") == Order(None, ())


def test_a_single_complete_one_is_left_as_it_is(tmp_path: Path) -> None:
    kept = checkpoint(tmp_path, 50)
    before = sorted(tmp_path.rglob("*"))
    order = tidied(tmp_path)
    assert order.checkpoint is not None
    assert (order.checkpoint.path, order.checkpoint.step, order.actions) == (kept, 50, ())
    assert sorted(tmp_path.rglob("*")) == before


def test_an_interrupted_save_is_swept_with_nemo_s_marker_and_the_one_before_is_resumed(tmp_path: Path) -> None:
    kept, cut = checkpoint(tmp_path, 50, age=100), checkpoint(tmp_path, 100, done=False)
    mark = marker(cut)
    order = tidied(tmp_path)
    assert order.checkpoint is not None
    assert order.checkpoint.path == kept
    assert order.actions == (
        f"removed {cut.name}: its save was interrupted: it has no `done`",
        f"removed NeMo's marker {mark.name}",
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == [kept.name]


def test_a_marker_that_outlived_its_save_does_not_cost_the_checkpoint(tmp_path: Path) -> None:
    kept = checkpoint(tmp_path, 50)
    mark = marker(kept)
    order = tidied(tmp_path)
    assert order.checkpoint is not None
    assert (order.checkpoint.path, mark.exists(), kept.exists()) == (kept, False, True)


def test_the_newest_step_becomes_the_newest_by_time(tmp_path: Path) -> None:
    newest = checkpoint(tmp_path, 100, age=50)
    for step, age in ((50, 10), (60, 0), (70, 20)):
        checkpoint(tmp_path, step, age=age)
    order = tidied(tmp_path)
    assert nxdt_resumes_from(tmp_path) == newest.name
    (told,) = order.actions
    assert told == f"made {newest.name} the newest by time, which tanuki--step=60-consumed_samples=480.0.ckpt was"
    assert tidied(tmp_path).actions == ()


def test_steps_are_numbers_not_text(tmp_path: Path) -> None:
    newest = checkpoint(tmp_path, 1000, age=10)
    checkpoint(tmp_path, 999)
    tidied(tmp_path)
    assert nxdt_resumes_from(tmp_path) == newest.name


def test_of_two_of_one_step_the_later_one_is_taken(tmp_path: Path) -> None:
    checkpoint(tmp_path, 100, age=10)
    last = checkpoint(tmp_path, 100, suffix="-last")
    order = tidied(tmp_path)
    assert order.checkpoint is not None
    assert order.checkpoint.path == last


def test_a_damaged_one_is_told_and_stays_but_is_not_resumed_from(tmp_path: Path) -> None:
    kept, damaged = checkpoint(tmp_path, 50, age=100), checkpoint(tmp_path, 100)
    (damaged / "model" / "dp_rank_00_tp_rank_02_pp_rank_00.pt").unlink()
    order = tidied(tmp_path)
    assert order.checkpoint is not None
    assert (order.checkpoint.path, damaged.exists()) == (kept, True)
    assert order.actions[0] == (
        f"passed over {damaged.name}: model/ lacks 1 of 4 shards, first tp_rank_02_pp_rank_00; it stays"
    )
    assert nxdt_resumes_from(tmp_path) == kept.name


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda path: [file.unlink() for file in (path / "model").glob("*.pt")], "model/ has no shards"),
        (lambda path: (path / "model").rename(path / "weights"), "it has no model/"),
        (lambda path: (path / "user_content.pt").write_bytes(b""), "user_content.pt is missing or empty"),
        (lambda path: (path / "user_content.pt").unlink(), "user_content.pt is missing or empty"),
        (
            lambda path: (path / "model/dp_rank_00_tp_rank_01_pp_rank_00.pt").write_bytes(b""),
            "model/dp_rank_00_tp_rank_01_pp_rank_00.pt is empty",
        ),
    ],
)
def test_where_none_is_complete_each_is_named_with_why(
    tmp_path: Path, damage: Callable[[Path], object], told: str
) -> None:
    damaged, cut = checkpoint(tmp_path, 50), checkpoint(tmp_path, 100, done=False)
    damage(damaged)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(JanitorError) as refused:
        tidied(tmp_path)
    message = str(refused.value)
    assert f"no checkpoint in {tmp_path} can be resumed from" in message
    assert f"{damaged.name}: {told}" in message
    assert f"{cut.name}: its save was interrupted" in message
    assert "exp_manager.resume_ignore_damaged=true" in message
    assert sorted(tmp_path.rglob("*")) == before


def test_a_file_where_a_directory_belongs_is_damage(tmp_path: Path) -> None:
    (tmp_path / "x--step=50.ckpt").write_text("?")
    with pytest.raises(JanitorError, match="it is a file"):
        tidied(tmp_path)


def test_a_first_save_that_was_interrupted_starts_at_step_0(tmp_path: Path) -> None:
    cut = checkpoint(tmp_path, 50, done=False)
    marker(cut)
    order = tidied(tmp_path)
    assert order.checkpoint is None
    assert len(order.actions) == 2
    assert list(tmp_path.iterdir()) == []


def test_several_interrupted_saves_and_none_complete_is_no_first_save(tmp_path: Path) -> None:
    for step in (50, 100):
        checkpoint(tmp_path, step, done=False)
    with pytest.raises(JanitorError, match="no checkpoint in"):
        tidied(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_run_that_has_resumed_before_does_not_start_again_at_step_0(tmp_path: Path) -> None:
    with pytest.raises(JanitorError, match="there is none left"):
        tidied(tmp_path, has_resumed=True)
    checkpoint(tmp_path, 50, done=False)
    with pytest.raises(JanitorError, match="its save was interrupted"):
        tidied(tmp_path, has_resumed=True)


def test_on_request_damaged_ones_are_set_aside_and_the_run_starts_at_step_0(tmp_path: Path) -> None:
    damaged = checkpoint(tmp_path, 50)
    (damaged / "user_content.pt").unlink()
    checkpoint(tmp_path, 100, done=False)
    order = tidied(tmp_path, has_resumed=True, may_ignore_damaged=True)
    assert order.checkpoint is None
    assert nxdt_resumes_from(tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == [f"{damaged.name}.damaged"]


@pytest.mark.parametrize("folder", ["tanuki-8b-v1.0/28", "x/my-version", "-v"])
def test_a_path_that_nxdt_would_cut_is_refused(tmp_path: Path, folder: str) -> None:
    with pytest.raises(JanitorError, match='NxDT cuts the path of a checkpoint at the first "-v"'):
        tidied(tmp_path / folder / "checkpoints")


def test_a_step_that_the_name_does_not_tell_is_read_from_the_content(tmp_path: Path) -> None:
    named = checkpoint(tmp_path, 50)
    other = checkpoint(tmp_path, 0, name="tanuki-last.ckpt", age=100)
    write_content(other / "user_content.pt", {"epoch": 3, "global_step": 70_000, "loops": {"x": 1}})
    assert {one.path: one.step for one in look(tmp_path)} == {named: 50, other: 70_000}
    tidied(tmp_path)
    assert nxdt_resumes_from(tmp_path) == other.name


def write_content(path: Path, content: object, protocol: int = 2) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("user_content/data.pkl", pickle.dumps(content, protocol=protocol))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("step", [0, 100, 300, 70_000, 2**40])
def test_the_step_is_read_from_any_pickle_without_running_it(tmp_path: Path, protocol: int, step: int) -> None:
    class Foreign:
        def __reduce__(self) -> tuple[object, ...]:
            return os.system, ("touch ran",)

    path = tmp_path / "user_content.pt"
    write_content(path, {"cfg": Foreign(), "global_step": step, "name": "global_step"}, protocol)
    assert global_step(path) == step
    write_content(path, {"global_step": None, "steps": 3}, protocol)
    assert global_step(path) is None
    path.write_bytes(b"no zip")
    assert global_step(path) is None
