"""The shards compute what the model computes: a forward pass rank by rank, sums where NxD all-reduces."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu
from transformers import AutoModelForCausalLM

from tests.checkpoint.models import Sizes, Tensors, random_tensors, read_shards, write_model
from trainwright.checkpoint import hf_to_nxd


def logits_of_shards(
    stages: list[list[Tensors]], sizes: Sizes, tokens: torch.Tensor, *, fuse_qkv: bool
) -> torch.Tensor:
    """Return logits `[tokens, vocab]` of a Llama whose tensor-parallel ranks each see only their own shard.

    Every rank attends with its query heads to the one key-value head that it holds.
    """
    ranks = range(sizes.tp)
    vocab, eps = sizes.vocab_per_rank, 1e-6
    hidden = sum_of(
        embedding((tokens - rank * vocab).clamp(0, vocab - 1), stages[0][rank]["model.embed_tokens.weight"])
        * ((tokens // vocab) == rank)[:, None]
        for rank in ranks
    )
    for stage in stages:
        layers = sorted({int(name.split(".")[2]) for name in stage[0] if name.startswith("model.layers.")})
        for layer in layers:
            weights = [
                {name.removeprefix(f"model.layers.{layer}."): value for name, value in shard.items()} for shard in stage
            ]
            normed = rms_norm(hidden, hidden.shape[-1:], weights[0]["input_layernorm.weight"], eps)
            hidden = hidden + sum_of(attention(weights[rank], normed, sizes, fuse_qkv=fuse_qkv) for rank in ranks)
            normed = rms_norm(hidden, hidden.shape[-1:], weights[0]["post_attention_layernorm.weight"], eps)
            hidden = hidden + sum_of(mlp(weights[rank], normed) for rank in ranks)
    hidden = rms_norm(hidden, hidden.shape[-1:], stages[-1][0]["model.norm.weight"], eps)
    return torch.cat([linear(hidden, stages[-1][rank]["lm_head.weight"]) for rank in ranks], dim=-1)


def attention(weights: Tensors, normed: torch.Tensor, sizes: Sizes, *, fuse_qkv: bool) -> torch.Tensor:
    size, queries = sizes.head_size, sizes.queries_per_rank
    if fuse_qkv:
        parts = weights["self_attn.qkv_proj.weight_qkv"].split([queries * size, size, size])
    else:
        parts = tuple(weights[f"self_attn.qkv_proj.weight_{part}"] for part in "qkv")
    query, key, value = (linear(normed, part).unflatten(-1, (-1, size)).transpose(0, 1) for part in parts)
    mixed = scaled_dot_product_attention(
        rotated(query), rotated(key).expand_as(query), value.expand_as(query), is_causal=True
    )
    return linear(mixed.transpose(0, 1).flatten(1), weights["self_attn.o_proj.weight"])


def rotated(heads: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions, base 10000, halves rotated as in Hugging Face's Llama."""
    length, size = heads.shape[-2:]
    frequencies = 10000.0 ** -(torch.arange(0, size, 2, dtype=heads.dtype) / size)
    angles = torch.arange(length, dtype=heads.dtype)[:, None] * frequencies
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


def mlp(weights: Tensors, normed: torch.Tensor) -> torch.Tensor:
    gate, up = weights["mlp.gate_up_proj.weight"].chunk(2)
    return linear(silu(linear(normed, gate)) * linear(normed, up), weights["mlp.down_proj.weight"])


def sum_of(parts: object) -> torch.Tensor:
    return torch.stack(list(parts)).sum(0)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("sizes", "pp", "fuse_qkv"),
    [
        (Sizes(key_value_heads=2, replicator=2, queries_per_rank=2, head_size=8, layers=3), 2, True),
        (Sizes(key_value_heads=2, replicator=2, queries_per_rank=2, head_size=8, layers=3), 1, False),
        (Sizes(key_value_heads=4, replicator=2, queries_per_rank=1, head_size=8), 1, True),
        (Sizes(key_value_heads=2, replicator=4, queries_per_rank=1, head_size=4), 2, True),
        (Sizes(key_value_heads=2, replicator=1, queries_per_rank=4, head_size=4), 1, True),  # rows divide by three
        (Sizes(key_value_heads=4, replicator=1, queries_per_rank=1, head_size=4, is_tied=True), 1, False),
        (Sizes(key_value_heads=3, replicator=2, queries_per_rank=1, head_size=4, model_type="mistral"), 1, True),
    ],
    ids=str,
)
def test_the_shards_compute_the_logits_of_the_model(tmp_path: Path, sizes: Sizes, pp: int, fuse_qkv: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(value.shape, generator=generator) * (0.4 if value.dim() == 2 else 1.0)
        for name, value in random_tensors(sizes).items()
    }
    hf = write_model(tmp_path / "hf", sizes.config(), tensors)
    hf_to_nxd(
        hf,
        tmp_path / "nxd",
        tensor_model_parallel_size=sizes.tp,
        pipeline_model_parallel_size=pp,
        fuse_qkv=fuse_qkv,
    )
    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32).double()
    tokens = torch.randint(0, sizes.config()["vocab_size"], (12,), generator=generator)
    with torch.no_grad():
        expected = model(tokens[None]).logits[0]
        shards = read_shards(tmp_path / "nxd", sizes.tp, pp)
        doubled = [[{name: value.double() for name, value in shard.items()} for shard in stage] for stage in shards]
        found = logits_of_shards(doubled, sizes, tokens, fuse_qkv=fuse_qkv)
    # transformers computes its rotary angles in fp32; a wrong order of heads is off by more than 0.1.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
