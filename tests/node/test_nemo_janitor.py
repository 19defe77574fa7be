"""Directories as NeMo leaves them, and what the janitor makes of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.nemo_checkpoints import archive, distributed, marker, name_of, ranks
from trainwright.node import nemo_config, nemo_janitor
from trainwright.node.janitor import JanitorError
from trainwright.node.nemo_checkpoints import find, problem
from trainwright.node.nemo_janitor import Order

LAST = "-last"


def tidied(
    checkpoints: Path,
    *,
    has_resumed: bool = False,
    may_ignore_damaged: bool = False,
    needs_averaged: bool = False,
    tensor: int = 1,
    pipeline: int = 1,
) -> Order:
    return nemo_janitor.tidy(
        checkpoints,
        checkpoints.parent / "damaged",
        has_resumed=has_resumed,
        may_ignore_damaged=may_ignore_damaged,
        needs_averaged=needs_averaged,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
    )


def chosen(order: Order) -> str | None:
    return None if order.checkpoint is None else order.checkpoint.name


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def test_without_checkpoints_a_run_starts_at_step_0(checkpoints: Path) -> None:
    assert tidied(checkpoints) == Order(None, ())
    checkpoints.mkdir()
    assert tidied(checkpoints) == Order(None, ())


def test_a_tidy_directory_is_left_as_it_is_and_the_last_is_resumed(checkpoints: Path) -> None:
    for step in (10, 20):
        distributed(checkpoints, name_of(step))
    newest = distributed(checkpoints, name_of(20, suffix=LAST))
    before = sorted(checkpoints.rglob("*"))
    order = tidied(checkpoints)
    assert order.checkpoint is not None
    assert (order.checkpoint.resume_path, order.checkpoint.step, order.actions) == (newest, 20, ())
    assert sorted(checkpoints.rglob("*")) == before


def test_of_two_lasts_the_newer_is_resumed_and_the_older_goes_as_nemo_meant_to(checkpoints: Path) -> None:
    old, new = name_of(20, suffix=LAST), name_of(100, suffix=LAST)  # by step: by name the old one comes later
    for name in (old, new):
        distributed(checkpoints, name)
    order = tidied(checkpoints)
    assert (chosen(order), names(checkpoints)) == (new, [new])
    assert order.actions == (f"removed {old}: {new} has replaced it",)


def test_a_last_stays_where_a_best_one_is_newer(checkpoints: Path) -> None:
    distributed(checkpoints, name_of(20, suffix=LAST))
    distributed(checkpoints, name_of(30))
    order = tidied(checkpoints)
    assert (chosen(order), order.actions) == (name_of(30), ())


@pytest.mark.parametrize("loss", ["nan", "inf", "1e-05"])
def test_a_name_that_nemo_cannot_read_is_no_reason_not_to_resume(loss: str, checkpoints: Path) -> None:
    name = name_of(20, loss=loss)
    distributed(checkpoints, name)
    assert tidied(checkpoints) == Order(find(checkpoints)[0], ())


def test_a_version_behind_last_is_a_later_save_of_its_step(checkpoints: Path) -> None:
    for name in (name_of(20, suffix=LAST), name_of(20, suffix="-last-v1"), name_of(20)):
        archive(checkpoints / f"{name}.ckpt")
    order = tidied(checkpoints)
    assert chosen(order) == name_of(20, suffix="-last-v1")
    assert names(checkpoints) == [f"{name_of(20, suffix='-last-v1')}.ckpt", f"{name_of(20)}.ckpt"]


def test_an_interrupted_save_is_removed_with_its_marker(checkpoints: Path) -> None:
    distributed(checkpoints, name_of(20))
    distributed(checkpoints, name_of(30), is_whole=False)
    marker(checkpoints, name_of(30))
    marker(checkpoints, "of-nothing")
    order = tidied(checkpoints)
    assert (chosen(order), names(checkpoints)) == (name_of(20), [name_of(20)])
    assert order.actions == (
        f"removed {name_of(30)}: its save was interrupted: it has no metadata.json",
        f"removed NeMo's marker {name_of(30)}-unfinished",
        "removed NeMo's marker of-nothing-unfinished",
    )


def test_a_marker_beside_what_looks_whole_is_believed_where_another_is_left(checkpoints: Path) -> None:
    for step in (20, 30):
        distributed(checkpoints, name_of(step))
    marker(checkpoints, name_of(30))
    order = tidied(checkpoints)
    assert (chosen(order), names(checkpoints)) == (name_of(20), [name_of(20)])


def test_markers_that_nemo_forgot_cost_no_checkpoint_where_all_have_one(checkpoints: Path) -> None:
    for step in (10, 20, 30):
        distributed(checkpoints, name_of(step), is_whole=step != 30)
        marker(checkpoints, name_of(step))
    order = tidied(checkpoints)
    assert (chosen(order), names(checkpoints)) == (name_of(20), [name_of(10), name_of(20)])


@pytest.mark.parametrize(
    ("lacks", "why"),
    [
        ("common.pt", "common.pt is missing or was cut short"),
        ("model.embedding.word_embeddings.weight/1.0", "model.embedding.word_embeddings.weight has 1 of 2 chunks"),
    ],
)
def test_a_newer_one_that_is_broken_is_set_aside_since_nemo_would_not_save_it_again(
    lacks: str, why: str, checkpoints: Path
) -> None:
    distributed(checkpoints, name_of(20))
    distributed(checkpoints, name_of(30), lacks=lacks)
    order = tidied(checkpoints)
    damaged = checkpoints.parent / "damaged" / name_of(30)
    assert (chosen(order), names(checkpoints), names(damaged)) == (name_of(20), [name_of(20)], [name_of(30)])
    assert order.actions == (f"set aside {name_of(30)} in {damaged}: {why}",)


def test_an_older_one_that_is_broken_is_nobodys_concern(checkpoints: Path) -> None:
    distributed(checkpoints, name_of(10), lacks="common.pt")
    distributed(checkpoints, name_of(20))
    assert tidied(checkpoints).actions == ()
    assert names(checkpoints) == [name_of(10), name_of(20)]


def test_where_none_is_whole_the_run_is_refused_naming_each_and_nothing_is_touched(checkpoints: Path) -> None:
    distributed(checkpoints, name_of(10), lacks="common.pt")
    distributed(checkpoints, name_of(20), is_whole=False)
    distributed(checkpoints, name_of(30, consumed="7"))
    before = sorted(checkpoints.rglob("*"))
    with pytest.raises(JanitorError) as raised:
        tidied(checkpoints)
    told = str(raised.value)
    assert f"{name_of(10)}: common.pt is missing" in told
    assert f"{name_of(20)}: its save was interrupted" in told
    assert "NeMo would begin the data anew" in told
    assert "exp_manager.resume_ignore_damaged=true" in told
    assert sorted(checkpoints.rglob("*")) == before


def test_damaged_ones_are_set_aside_where_the_user_says_so(checkpoints: Path) -> None:
    distributed(checkpoints, name_of(10), lacks="common.pt")
    distributed(checkpoints, name_of(20), is_whole=False)
    order = tidied(checkpoints, may_ignore_damaged=True, has_resumed=True)
    assert (chosen(order), names(checkpoints)) == (None, [])
    assert names(checkpoints.parent / "damaged") == [name_of(10)]


def test_a_kill_in_the_first_save_costs_no_word_but_a_lost_resume_does(checkpoints: Path) -> None:
    distributed(checkpoints, name_of(10), is_whole=False)
    with pytest.raises(JanitorError, match="no checkpoint in"):
        tidied(checkpoints, has_resumed=True)
    assert chosen(tidied(checkpoints)) is None
    assert names(checkpoints) == []
    with pytest.raises(JanitorError, match="there is none left"):
        tidied(checkpoints, has_resumed=True)


def test_ranks_resume_from_what_all_of_them_have(checkpoints: Path) -> None:
    ranks(checkpoints, name_of(10))
    ranks(checkpoints, name_of(20), folders=("mp_rank_00",))
    cut, _ = ranks(checkpoints, name_of(30))
    archive(cut, is_whole=False)
    order = tidied(checkpoints, tensor=2)
    assert order.checkpoint is not None
    assert order.checkpoint.resume_path == checkpoints / f"{name_of(10)}.ckpt"  # NeMo adds the folders of ranks
    assert [action.partition(": ")[2] for action in order.actions] == [
        "1 of 2 ranks are missing, first mp_rank_01",
        f"mp_rank_00/{name_of(30)}.ckpt was cut short",
    ]
    assert names(checkpoints / "mp_rank_01") == [f"{name_of(10)}.ckpt"]


@pytest.mark.parametrize(
    ("tensor", "pipeline", "folders", "is_fit"),
    [
        (2, 2, [f"tp_rank_{t:02d}_pp_rank_{p:03d}" for t in (0, 1) for p in (0, 1)], True),
        (1, 2, ["tp_rank_00_pp_rank_000", "tp_rank_00_pp_rank_001"], True),
        (1, 1, ["fsdp_shard_00000", "fsdp_shard_00001"], True),
        (4, 1, ["mp_rank_00", "mp_rank_01"], False),
        (1, 1, ["mp_rank_00", "mp_rank_01"], False),
        (2, 1, ["."], False),
    ],
)
def test_checkpoints_of_other_degrees_are_never_removed(
    tensor: int, pipeline: int, folders: list[str], is_fit: bool, checkpoints: Path
) -> None:
    paths = ranks(checkpoints, name_of(10), folders=tuple(folders))
    if is_fit:
        assert chosen(tidied(checkpoints, tensor=tensor, pipeline=pipeline)) == name_of(10)
    else:
        with pytest.raises(JanitorError, match=r"ranks are missing|pieces, this run|in one piece"):
            tidied(checkpoints, tensor=tensor, pipeline=pipeline)
    assert all(path.exists() for path in paths)


def test_averaged_weights_belong_to_their_checkpoint(checkpoints: Path) -> None:
    for name in (name_of(10), f"{name_of(10)}-EMA", name_of(20)):
        archive(checkpoints / f"{name}.ckpt")
    assert chosen(tidied(checkpoints)) == name_of(20)
    order = tidied(checkpoints, needs_averaged=True)
    assert chosen(order) == name_of(10)
    assert "is missing, from which exp_manager.ema goes on" in order.actions[0]


@pytest.mark.parametrize("is_marked", [False, True])
@pytest.mark.parametrize("foreign", ["done", "commit.json", "model/weights.pt", "weights/common.pt"])
def test_a_directory_that_nemo_did_not_write_is_never_removed(foreign: str, is_marked: bool, checkpoints: Path) -> None:
    path = distributed(checkpoints, name_of(30), is_whole=False)
    (path / foreign).parent.mkdir(exist_ok=True)
    (path / foreign).write_text("of another program")
    if is_marked:
        marker(checkpoints, name_of(30))
    with pytest.raises(JanitorError, match=rf"holds {Path(foreign).parts[0]}, which NeMo does not write"):
        tidied(checkpoints)
    assert (path / foreign).exists()
    distributed(checkpoints, name_of(20))
    assert chosen(tidied(checkpoints)) == name_of(20)
    kept = checkpoints.parent / "damaged" / name_of(30) / name_of(30) / foreign
    assert kept.read_text() == "of another program"


def test_other_directories_are_no_checkpoints(checkpoints: Path) -> None:
    (checkpoints / "notes").mkdir(parents=True)
    (checkpoints / "megatron_gpt.nemo").write_bytes(b"x")
    assert tidied(checkpoints) == Order(None, ())
    assert names(checkpoints) == ["megatron_gpt.nemo", "notes"]


def torch_dist(path: Path) -> Path:
    """A directory in megatron-core's other format, its shards and their index written by torch."""
    import torch
    import torch.distributed.checkpoint as dcp

    dcp.save({"weight": torch.zeros(64, 64), "step": 3}, checkpoint_id=path, no_dist=True)
    archive(path / "common.pt")
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return path


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_shards_are_compared_with_what_torchs_own_index_says_of_them(checkpoints: Path) -> None:
    path = torch_dist(checkpoints / name_of(10))
    (one,) = find(checkpoints)
    assert problem(one) is None
    whole = path.with_name("kept")
    shutil.copytree(path, whole)
    changes: list[tuple[str, Callable[[Path], object], str]] = [
        ("__0_0.distcp", cut, "__0_0.distcp was cut short: 1000 bytes, .metadata speaks of"),
        ("__0_0.distcp", Path.unlink, "__0_0.distcp is missing"),
        (".metadata", lambda file: file.write_bytes(b""), ".metadata cannot be read"),
        (".metadata", lambda file: file.write_bytes(b"no pickle"), ".metadata cannot be read"),
        ("metadata.json", lambda file: file.write_text("{"), "metadata.json cannot be read"),
        ("metadata.json", lambda file: file.write_text('{"sharded_backend": "new"}'), "trainwright does not know"),
    ]
    for name, change, why in changes:
        shutil.rmtree(path)
        shutil.copytree(whole, path)
        change(path / name)
        told = problem(one)
        assert told is not None
        assert why in told


@pytest.mark.parametrize(
    ("there", "made"),
    [([], []), (["run_0", "run_1"], []), (["run_1"], [0]), (["run_2", "run_3"], [0, 1]), (["run_0", "run_old"], [])],
)
def test_nemo_finds_a_free_name_for_the_files_of_the_process_before(
    there: list[str], made: list[int], tmp_path: Path
) -> None:
    for name in there:
        (tmp_path / name).mkdir()
    actions = nemo_janitor.prepare_archive(tmp_path)
    assert [action.split(":")[0] for action in actions] == [f"made an empty run_{number}" for number in made]
    assert not (tmp_path / f"run_{len(list(tmp_path.glob('run_*')))}").exists()


YAML = """\
# What NeMo reads.
trainer:
  max_steps: 50
exp_manager:
  name: gpt
  resume_if_exists: true
  resume_ignore_no_checkpoint: true
  resume_from_checkpoint: /old
  ema:
    decay: 0.9
    enable: true
model:
  resume_from_checkpoint: null
  resume_if_exists: true
"""


def test_nemo_is_told_what_to_resume_from_in_its_own_section() -> None:
    path = "/gcs/b/checkpoints/gpt--val_loss=8.01-step=50-consumed_samples=12800.0-last"
    told = nemo_config.with_resume(YAML, path)
    assert set(told.splitlines()) ^ set(YAML.splitlines()) == {
        f"  resume_from_checkpoint: {json.dumps(path)}",
        "  resume_from_checkpoint: /old",
        "  resume_if_exists: false",
    }
    assert told.endswith("model:\n  resume_from_checkpoint: null\n  resume_if_exists: true\n")
    fresh = nemo_config.with_resume(YAML, None)
    assert nemo_config.says(fresh, "resume_from_checkpoint") == "/old"
    assert nemo_config.says(fresh, "resume_if_exists") == "false"
    assert (nemo_config.says(YAML, "version"), nemo_config.averages(YAML)) == (None, True)
    assert not nemo_config.averages(YAML.replace("    enable: true", "    enable: false"))
