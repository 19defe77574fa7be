"""Verification finds one wrong bit anywhere, and what is not even a checkpoint."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.checkpoint.models import Sizes, disown, edit_shard, random_tensors, read_shard, write_model
from trainwright.checkpoint import hf_to_nxd, nxd_to_hf, verify
from trainwright.checkpoint.bits import DTYPES
from trainwright.checkpoint.differences import _difference, differences, structure_problems, type_problems
from trainwright.checkpoint.hf_model import HfModel
from trainwright.errors import UserError

SIZES = Sizes(key_value_heads=2, replicator=2, layers=2)


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    return write_model(tmp_path / "hf", SIZES.config(), random_tensors(SIZES))


@pytest.fixture
def nxd(tmp_path: Path, hf: Path) -> Path:
    hf_to_nxd(hf, tmp_path / "nxd", tensor_model_parallel_size=4)
    return tmp_path / "nxd"


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_is_found_by_its_checksum(nxd: Path) -> None:
    shard = sorted((nxd / "model").iterdir())[1]
    flip(shard, shard.stat().st_size // 2)
    (problem,) = verify(nxd).problems
    assert problem.startswith(f"model/{shard.name} has checksum")


@pytest.mark.parametrize("rank", range(4))
def test_a_changed_copy_on_any_rank_is_found_without_checksums(hf: Path, nxd: Path, rank: int) -> None:
    name = "model.layers.1.self_attn.qkv_proj.weight_qkv"
    changed = read_shard(nxd, rank)[name].view(torch.int32) ^ torch.zeros(12, 16, dtype=torch.int32)
    changed[-1, -1] ^= 1  # the last row of V
    edit_shard(nxd, rank, **{name: changed.view(torch.float32)})
    verdict = verify(nxd, against=hf)
    assert verdict.checks[0] == "no checksums: no commit.json"
    assert verdict.problems == (
        f"tp rank {rank}, pp rank 0, {name}: not the values of model.layers.1.self_attn.v_proj.weight",
    )


def test_shards_of_another_type_are_compared_as_that_type(hf: Path, tmp_path: Path) -> None:
    finite = {name: torch.randn(shape) for name, shape in SIZES.shapes().items()}
    source = write_model(tmp_path / "finite", SIZES.config(), finite)
    hf_to_nxd(source, tmp_path / "bf16", tensor_model_parallel_size=4, dtype="bf16")
    assert verify(tmp_path / "bf16", against=source).problems == ()
    assert verify(tmp_path / "bf16", against=hf).problems


def test_a_changed_exported_model_is_found(hf: Path, nxd: Path, tmp_path: Path) -> None:
    nxd_to_hf(nxd, tmp_path / "back", base=hf)
    assert verify(tmp_path / "back", against=hf).problems == ()
    disown(tmp_path / "back")
    flip(tmp_path / "back" / "model.safetensors", -1)
    (problem,) = verify(tmp_path / "back", against=hf).problems
    assert problem.startswith("lm_head.weight has other values: 1 of 128 differ, by up to ")


def test_a_config_that_does_not_fit_the_tensors_is_found(hf: Path) -> None:
    (hf / "config.json").write_text(json.dumps({**SIZES.config(), "num_hidden_layers": 3}))
    assert verify(hf).problems[0].startswith("missing: model.layers.2.")


def test_what_is_no_checkpoint_is_an_error_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no shards such as dp_rank_00_tp_rank_00_pp_rank_00"):
        verify(tmp_path)


def test_differences_are_counted_bit_for_bit_and_measured_where_they_are_numbers(tmp_path: Path) -> None:
    """The largest difference here is more than its own type can hold."""
    base = {name: torch.zeros(shape) for name, shape in SIZES.shapes().items()}
    model = {name: tensor.clone() for name, tensor in base.items()}
    norm, down = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"
    model[norm][:3] = torch.tensor([torch.nan, torch.inf, -0.0])
    base[down][0, 0], model[down][0, 0], model[down][1, 1] = 3e38, -3e38, 1.0
    for name, tensors in {"base": base, "model": model}.items():
        write_model(tmp_path / name, SIZES.config(), tensors)
    pair = HfModel(tmp_path / "model", "model"), HfModel(tmp_path / "base", "base")
    changed = {one.name: one for one in differences(*pair) if one.num_differing}
    assert set(changed) == {norm, down}
    assert (changed[norm].num_differing, changed[norm].num_nan, changed[norm].num_infinite) == (3, 1, 1)
    assert changed[norm].largest == 0.0
    assert (changed[down].num_differing, changed[down].num_nan, changed[down].num_infinite) == (2, 0, 0)
    assert changed[down].largest == pytest.approx(6e38)
    assert list(structure_problems(*pair)) == list(type_problems(*pair)) == []


def test_a_difference_far_inside_a_large_tensor_is_found() -> None:
    bits = np.zeros(600_000, np.uint16)
    changed = bits.copy()
    changed[[0, 300_000, 599_999]] = 0x3F80, 0x7FC0, 0x7F80  # 1.0, NaN, infinity
    found = _difference("large", changed, bits, DTYPES["BF16"])
    assert (found.num_differing, found.num_nan, found.num_infinite, found.largest) == (3, 1, 1, 1.0)
