"""The convert stage writes what the run's config asks for, and never passes off other shards as that."""

import shutil
from pathlib import Path

import pytest

from tests.backends.nxdt.runs import SIZES, Record, tiny_model, tiny_tensors
from tests.checkpoint.models import tree, write_model
from tests.checkpoint.nxd_reader import read_as_nxd
from tests.fakes import HubServer
from trainwright.backends.nxdt import convert, fetch
from trainwright.checkpoint.nxd_checkpoint import shard_name

NO_DATA = ("data.train_source=null", "data.val_source=null")


def test_the_shards_of_the_config_are_written_once(
    record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model(tmp_path / "fsx" / "models" / "tanuki_8b")
    run = record()
    assert run.stage(convert.main) == 0
    shards = tmp_path / "fsx" / "shards" / "tanuki_8b" / "tp4-pp1-kv2-fusedTrue"
    assert sorted(path.name for path in (shards / "model").glob("*_00.pt")) == [shard_name(tp, 0) for tp in range(4)]
    read = read_as_nxd(shards / "model" / shard_name(1, 0))  # the layout with a file for each tensor
    assert "model.layers.1.self_attn.qkv_proj.weight_qkv" in read
    before = tree(shards)
    capsys.readouterr()
    assert run.stage(convert.main) == 0
    assert "is there, from the same values" in capsys.readouterr().out
    assert tree(shards) == before


def test_shards_of_other_degrees_at_that_path_are_refused(
    record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model(tmp_path / "fsx" / "models" / "tanuki_8b")
    path = f"backend.pretrained_dir={tmp_path}/shards"
    assert record(path).stage(convert.main) == 0
    assert record(path, "backend.fuse_qkv=false").stage(convert.main) == 2
    told = capsys.readouterr().err
    assert f"error: backend.pretrained_dir {tmp_path}/shards: complete, but made with" in told


def test_shards_of_another_commit_of_the_model_are_refused_by_name(
    hub: HubServer, record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = hub.publish("team/tiny", {p.name: p.read_bytes() for p in tiny_model(tmp_path / "1").iterdir()})
    run = record("model.source=team/tiny", *NO_DATA)
    assert (run.stage(fetch.main), run.stage(convert.main)) == (0, 0)
    second = hub.publish("team/tiny", {p.name: p.read_bytes() for p in tiny_model(tmp_path / "2", seed=9).iterdir()})
    shutil.rmtree(tmp_path / "fsx" / "models")
    assert (run.stage(fetch.main), run.stage(convert.main)) == (2, 2)  # the first, since convert may be skipped
    told = capsys.readouterr().err
    assert told.count("error: backend.pretrained_dir: ") == 2
    assert f"was made from team/tiny, revision main, commit {first}, but" in told
    assert f"holds team/tiny, revision main, commit {second}; choose another backend.pretrained_dir" in told


def test_a_model_of_another_source_than_the_configs_is_refused(
    hub: HubServer, record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.publish("team/tiny", {p.name: p.read_bytes() for p in tiny_model(tmp_path / "1").iterdir()})
    assert record("model.source=team/tiny", *NO_DATA).stage(fetch.main) == 0
    assert record("model.source=team/other").stage(convert.main) == 2
    assert "but model.source=team/other with model.revision=null is asked for" in capsys.readouterr().err


def test_what_cannot_be_spread_is_told_in_terms_of_the_config(
    record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "fsx" / "models" / "tanuki_8b", SIZES.config(), tiny_tensors())
    assert record("parallelism.kv_replicator=4").stage(convert.main) == 2
    told = capsys.readouterr().err
    assert (
        "parallelism.tensor_model_parallel_size: 4 is not num_key_value_heads=2 times parallelism.kv_replicator" in told
    )
    assert "--" not in told
