"""There and back again every bit is the same, for every shape that is legal."""

import tempfile
from pathlib import Path
from typing import Literal

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.models import Sizes, differing, random_tensors, read_model, write_model
from trainwright.checkpoint import hf_to_nxd, nxd_to_hf, verify

SIZES = st.builds(
    Sizes,
    key_value_heads=st.integers(1, 3),
    replicator=st.integers(1, 3),
    queries_per_rank=st.integers(1, 3),
    head_size=st.sampled_from([2, 4, 6]),
    layers=st.integers(1, 5),
    ffn_per_rank=st.integers(1, 3),
    vocab_per_rank=st.integers(1, 3),
    is_tied=st.booleans(),
    has_inv_freq=st.booleans(),
    model_type=st.sampled_from(["llama", "mistral"]),
)


@settings(max_examples=40, deadline=None)
@given(
    sizes=SIZES,
    pp=st.integers(1, 3),
    fuse_qkv=st.booleans(),
    layout=st.sampled_from(["inline", "inline", "inline", "xser"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    files=st.integers(1, 3),
    max_shard_bytes=st.sampled_from([1, 1000, 10**9]),
    workers=st.integers(1, 4),
)
def test_the_round_trip_is_exact(
    sizes: Sizes,
    pp: int,
    fuse_qkv: bool,
    layout: Literal["inline", "xser"],
    dtype: torch.dtype,
    files: int,
    max_shard_bytes: int,
    workers: int,
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        tensors = random_tensors(sizes, dtype)
        hf = write_model(root / "hf", sizes.config(), tensors, files)
        hf_to_nxd(
            hf,
            root / "nxd",
            tensor_model_parallel_size=sizes.tp,
            pipeline_model_parallel_size=min(pp, sizes.layers),
            fuse_qkv=fuse_qkv,
            layout=layout,
            workers=workers,
        )
        assert verify(root / "nxd", against=hf).problems == ()
        nxd_to_hf(root / "nxd", root / "back", base=hf, max_shard_bytes=max_shard_bytes, workers=workers)
        assert not differing(read_model(root / "back"), tensors)
        assert verify(root / "back", against=hf).problems == ()
