"""Shards equal those of neuronx-distributed's own converter: names, order, shapes, types and bits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.models import differing, read_model
from tests.checkpoint.nxd_reader import read_as_nxd
from trainwright.checkpoint import hf_to_nxd, nxd_to_hf

GOLDEN = Path(__file__).parents[1] / "golden" / "nxd"
CASES = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())


def convert(case: str, output: Path, **options: Any) -> None:
    wanted = json.loads((GOLDEN / case / "case.json").read_text())
    hf_to_nxd(
        GOLDEN / case / "hf",
        output,
        tensor_model_parallel_size=wanted["tp"],
        pipeline_model_parallel_size=wanted["pp"],
        kv_replicator=wanted["kv_replicator"],
        fuse_qkv=wanted["fuse_qkv"],
        **options,
    )


@pytest.mark.parametrize("layout", ["inline", "xser"])
@pytest.mark.parametrize("case", CASES)
def test_shards_equal_those_of_nxds_converter(tmp_path: Path, case: str, layout: str) -> None:
    convert(case, tmp_path / "nxd", layout=layout)
    expected = sorted((GOLDEN / case / "expected").iterdir())
    assert [path.name for path in sorted((tmp_path / "nxd" / "model").glob("dp_*_[0-9][0-9].pt"))] == [
        path.name for path in expected
    ]
    for path in expected:
        wanted = torch.load(path, weights_only=True)
        found = read_as_nxd(tmp_path / "nxd" / "model" / path.name)
        assert list(found) == list(wanted)
        assert not differing(found, wanted)


@pytest.mark.parametrize("layout", ["inline", "xser"])
@pytest.mark.parametrize("case", CASES)
def test_nxds_own_shards_give_the_model_back(tmp_path: Path, case: str, layout: str) -> None:
    hf = GOLDEN / case / "hf"
    convert(case, tmp_path / "nxd", layout=layout)
    nxd_to_hf(tmp_path / "nxd", tmp_path / "back", base=hf)
    assert not differing(read_model(tmp_path / "back"), read_model(hf))


@pytest.mark.parametrize("case", CASES)
def test_the_goldens_themselves_are_read(tmp_path: Path, case: str) -> None:
    (tmp_path / "nxd").mkdir()
    (tmp_path / "nxd" / "model").symlink_to(GOLDEN / case / "expected")
    nxd_to_hf(tmp_path / "nxd", tmp_path / "back", base=GOLDEN / case / "hf")
    assert not differing(read_model(tmp_path / "back"), read_model(GOLDEN / case / "hf"))
