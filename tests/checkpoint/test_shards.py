"""Which head lies on which rank: tensors whose values are their own row or column against the closed rules.

A round trip cannot see a wrong order; these can. The rules: rank r = j * K + i holds key-value head i and the query
heads i * (H / K) + j * g ... + g - 1.
"""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.models import Sizes, Tensors, read_shard, write_model
from trainwright.checkpoint import hf_to_nxd
from trainwright.checkpoint.naming import parse_config
from trainwright.checkpoint.shards import Degrees, Stage, stage_tensors, stages


def numbered(sizes: Sizes) -> Tensors:
    """Return tensors whose values are the number of their row; of their column where columns are split."""
    tensors = {}
    for name, shape in sizes.shapes().items():
        is_split_by_column = "o_proj" in name or "down_proj" in name
        number = torch.arange(shape[1 if is_split_by_column else 0], dtype=torch.float32)
        tensors[name] = (
            (number if is_split_by_column or len(shape) == 1 else number[:, None]).expand(shape).contiguous()
        )
    return tensors


def convert(directory: Path, sizes: Sizes, *, fuse_qkv: bool) -> list[Tensors]:
    hf = write_model(directory / "hf", sizes.config(), numbered(sizes))
    hf_to_nxd(hf, directory / "nxd", tensor_model_parallel_size=sizes.tp, fuse_qkv=fuse_qkv)
    return [read_shard(directory / "nxd", rank) for rank in range(sizes.tp)]


def heads_of(rows: torch.Tensor, head_size: int) -> list[int]:
    """Return the heads whose rows these are, each whole and in order."""
    numbers = rows.long().tolist()
    heads = [numbers[start] // head_size for start in range(0, len(numbers), head_size)]
    assert numbers == [head * head_size + row for head in heads for row in range(head_size)]
    return heads


@pytest.mark.parametrize("fuse_qkv", [True, False])
def test_rank_r_of_32_holds_query_head_4_times_r_mod_8_plus_r_div_8_and_key_value_head_r_mod_8(
    tmp_path: Path, fuse_qkv: bool
) -> None:
    sizes = Sizes(key_value_heads=8, replicator=4, head_size=2, layers=1, ffn_per_rank=1, vocab_per_rank=1)
    for rank, shard in enumerate(convert(tmp_path, sizes, fuse_qkv=fuse_qkv)):
        prefix = "model.layers.0.self_attn"
        if fuse_qkv:
            query, key, value = shard[f"{prefix}.qkv_proj.weight_qkv"][:, 0].split([2, 2, 2])
        else:
            query, key, value = (shard[f"{prefix}.qkv_proj.weight_{part}"][:, 0] for part in "qkv")
        assert heads_of(query, 2) == [4 * (rank % 8) + rank // 8]
        assert heads_of(key, 2) == heads_of(value, 2) == [rank % 8]
        assert heads_of(shard[f"{prefix}.o_proj.weight"][0], 2) == [4 * (rank % 8) + rank // 8]


def test_the_example_of_8_query_and_2_key_value_heads_on_4_ranks(tmp_path: Path) -> None:
    sizes = Sizes(key_value_heads=2, replicator=2, queries_per_rank=2, head_size=8, ffn_per_rank=24, layers=1)
    shards = convert(tmp_path, sizes, fuse_qkv=True)
    assert shards[0]["model.layers.0.self_attn.qkv_proj.weight_qkv"].shape == (32, 64)
    for rank, (queries, group) in enumerate([([0, 1], 0), ([4, 5], 1), ([2, 3], 0), ([6, 7], 1)]):
        query, key, value = shards[rank]["model.layers.0.self_attn.qkv_proj.weight_qkv"][:, 0].split([16, 8, 8])
        assert (heads_of(query, 8), heads_of(key, 8), heads_of(value, 8)) == (queries, [group], [group])
        gate_up = shards[rank]["model.layers.0.mlp.gate_up_proj.weight"][:, 0].long().tolist()
        assert gate_up == 2 * list(range(24 * rank, 24 * rank + 24))


@settings(max_examples=60, deadline=None)
@given(
    groups=st.integers(1, 6),
    replicator=st.integers(1, 5),
    queries=st.integers(1, 4),
    fuse_qkv=st.booleans(),
)
def test_each_query_head_is_once_somewhere_and_always_beside_its_own_key_value_head(
    groups: int, replicator: int, queries: int, fuse_qkv: bool
) -> None:
    sizes = Sizes(key_value_heads=groups, replicator=replicator, queries_per_rank=queries, head_size=2, layers=1)
    shape, _ = parse_config(sizes.config())
    assert shape is not None
    degrees = Degrees(
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=1,
        kv_replicator=replicator,
        fuse_qkv=fuse_qkv,
    )
    whole = Stage(layers=range(1), is_first=True, is_last=True)
    held: list[int] = []
    for rank in range(sizes.tp):
        slices = {s.tensor: s for t in stage_tensors(shape, degrees, rank, whole, sizes.shapes()) for s in t.slices}
        query, key, value, output = (slices[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qkvo")
        heads = list(range(query.start // 2, query.stop // 2))
        copy, group = divmod(rank, groups)
        first = group * (sizes.heads // groups) + copy * queries
        assert heads == list(range(first, first + queries))
        assert {head // (sizes.heads // groups) for head in heads} == {key.start // 2} == {value.start // 2} == {group}
        assert (output.dimension, output.start, output.stop) == (1, query.start, query.stop)
        held += heads
    assert sorted(held) == list(range(sizes.heads))


@pytest.mark.parametrize(
    ("layers", "pipeline", "expected"),
    [
        (8, 3, [[0, 1], [2, 3, 4], [5, 6, 7]]),
        (3, 2, [[0], [1, 2]]),
        (4, 4, [[0], [1], [2], [3]]),
        (5, 3, [[0], [1, 2], [3, 4]]),
        (32, 1, [list(range(32))]),
    ],
)
def test_layers_that_are_left_over_go_to_the_last_stages(layers: int, pipeline: int, expected: list[list[int]]) -> None:
    assert [list(stage.layers) for stage in stages(layers, pipeline)] == expected
