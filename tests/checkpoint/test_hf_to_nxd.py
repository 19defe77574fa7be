"""What can be converted to shards, and what is refused with what would be right."""

import json
import shutil
import socket
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.models import Sizes, differing, random_tensors, read_model, read_shards, tree, write_model
from trainwright.checkpoint import hf_to_nxd, nxd_to_hf
from trainwright.errors import UserError
from trainwright.node.commit import COMMIT_FILE, read_commit, verify

SIZES = Sizes(key_value_heads=2, replicator=2, queries_per_rank=1, layers=3)


def model(directory: Path, sizes: Sizes = SIZES, dtype: torch.dtype = torch.bfloat16, **config: Any) -> Path:
    return write_model(directory, {**sizes.config(), **config}, random_tensors(sizes, dtype))


def refusal(source: Path, output: Path, **options: Any) -> str:
    """Return why a conversion is refused; nothing may be left behind."""
    with pytest.raises(UserError) as caught:
        hf_to_nxd(source, output, **{"tensor_model_parallel_size": 4, **options})
    assert not output.exists()
    return str(caught.value)


def test_all_degrees_that_do_not_fit_are_told_at_once(tmp_path: Path) -> None:
    told = refusal(
        model(tmp_path / "hf"),
        tmp_path / "nxd",
        tensor_model_parallel_size=6,
        kv_replicator=2,
        pipeline_model_parallel_size=4,
        hardware="trn2",
    ).splitlines()
    assert told == [
        "--tp: 6 is not num_key_value_heads=2 times --kv-replicator=2; use --tp 4, or --kv-replicator 3",
        "--tp: 6 does not divide num_attention_heads=4; use a divisor",
        "--tp: 6 does not divide vocab_size=8; use a divisor",
        "--tp: 6 does not divide intermediate_size=8; use a divisor",
        "--pp: 4 stages for num_hidden_layers=3; use at most that",
        "--hardware: trn2 with --kv-replicator=2: the order of heads that trn2 needs is unverified there; "
        "use --kv-replicator 1 with --tp 2, or --hardware trn1",
    ]


def test_a_vocabulary_that_tp_does_not_divide_is_refused_since_nxd_pads_nothing(tmp_path: Path) -> None:
    sizes = Sizes(key_value_heads=2, replicator=2)
    tensors = random_tensors(sizes) | {
        name: torch.zeros(9, 16) for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    hf = write_model(tmp_path / "hf", {**sizes.config(), "vocab_size": 9}, tensors)
    assert refusal(hf, tmp_path / "nxd") == "--tp: 4 does not divide vocab_size=9; use a divisor"


def test_trn2_with_one_copy_of_each_head_is_converted(tmp_path: Path) -> None:
    hf_to_nxd(model(tmp_path / "hf"), tmp_path / "nxd", tensor_model_parallel_size=2, hardware="trn2")
    assert read_commit(tmp_path / "nxd") is not None


def test_an_output_that_nxdt_will_cut_at_dash_v_is_refused_with_what_it_becomes(tmp_path: Path) -> None:
    told = refusal(model(tmp_path / "hf-v1"), tmp_path / "tanuki-v1.0" / "nxd")
    assert told.endswith(f"at the first '-v', to {tmp_path}/tanuki; use a path without it")


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("qwen2", "biases"),
        ("mixtral", "experts"),
        ("gpt2", "unknown"),
    ],
)
def test_other_families_are_refused_by_name(tmp_path: Path, model_type: str, reason: str) -> None:
    told = refusal(model(tmp_path / "hf", model_type=model_type), tmp_path / "nxd")
    assert f"model_type: {model_type} is not converted" in told
    assert reason in told
    assert told.endswith("use one of llama, mistral")


def test_a_head_size_of_its_own_is_refused_since_nxd_ignores_it(tmp_path: Path) -> None:
    told = refusal(model(tmp_path / "hf", head_dim=8), tmp_path / "nxd")
    assert "head_dim: 8 is not hidden_size/num_attention_heads=4" in told


def test_unknown_missing_and_misshapen_tensors_are_listed_together(tmp_path: Path) -> None:
    tensors = random_tensors(SIZES)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(16)
    tensors["model.norm.weight"] = torch.zeros(3)
    told = refusal(write_model(tmp_path / "hf", SIZES.config(), tensors), tmp_path / "nxd").splitlines()
    assert len(told) == 3
    assert "llama has no tensor model.layers.0.self_attn.q_proj.bias; --allow-extra" in told[0]
    assert "missing: model.layers.1.mlp.up_proj.weight" in told[1]
    assert "model.norm.weight has shape [3], config.json makes it [16]" in told[2]


def test_an_allowed_extra_tensor_is_on_every_rank_of_its_stage_and_comes_back(tmp_path: Path) -> None:
    extra = {"model.layers.0.extra": torch.rand(3), "outside": torch.arange(4)}
    tensors = random_tensors(SIZES) | extra
    hf = write_model(tmp_path / "hf", SIZES.config(), tensors)
    hf_to_nxd(hf, tmp_path / "nxd", tensor_model_parallel_size=4, pipeline_model_parallel_size=2, allow_extra=True)
    first, last = read_shards(tmp_path / "nxd", 4, 2)
    assert all({"model.layers.0.extra", "outside"} <= shard.keys() for shard in first)
    assert all("outside" in shard and "model.layers.0.extra" not in shard for shard in last)
    nxd_to_hf(tmp_path / "nxd", tmp_path / "back", base=hf, allow_extra=True)
    assert not differing(read_model(tmp_path / "back"), tensors)


def test_a_tied_model_gets_the_head_that_nxds_loader_needs(tmp_path: Path) -> None:
    hf = model(tmp_path / "hf", Sizes(is_tied=True))
    report = hf_to_nxd(hf, tmp_path / "nxd", tensor_model_parallel_size=4)
    for shard in read_shards(tmp_path / "nxd", 4)[0]:
        assert torch.equal(
            shard["lm_head.weight"].view(torch.int16), shard["model.embed_tokens.weight"].view(torch.int16)
        )
    assert report.notes == ("lm_head.weight is a copy of model.embed_tokens.weight, to which the model ties it",)


@pytest.mark.parametrize(("dtype", "expected"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("stored", [torch.float16, torch.float32, torch.bfloat16])
def test_a_chosen_type_is_torchs_rounding_and_spares_buffers(
    tmp_path: Path, dtype: str, expected: torch.dtype, stored: torch.dtype
) -> None:
    sizes = Sizes(has_inv_freq=True, layers=1)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: value if name.endswith("inv_freq") else torch.randn(value.shape, generator=generator).to(stored)
        for name, value in random_tensors(sizes).items()
    }
    hf = write_model(tmp_path / "hf", sizes.config(), tensors)
    hf_to_nxd(hf, tmp_path / "nxd", tensor_model_parallel_size=4, dtype=dtype)  # type: ignore[arg-type]
    shards = read_shards(tmp_path / "nxd", 4)[0]
    embedding = torch.cat([shard["model.embed_tokens.weight"] for shard in shards])
    assert torch.equal(embedding, tensors["model.embed_tokens.weight"].to(expected))
    assert shards[3]["model.layers.0.self_attn.rotary_emb.inv_freq"].dtype == torch.float32


def test_parts_of_different_types_are_not_joined_unasked(tmp_path: Path) -> None:
    tensors = random_tensors(SIZES)
    name = "model.layers.2.self_attn.k_proj.weight"
    tensors[name] = tensors[name].bfloat16()
    told = refusal(write_model(tmp_path / "hf", SIZES.config(), tensors), tmp_path / "nxd")
    assert "qkv_proj.weight_qkv joins tensors of several types" in told
    assert f"{name} bfloat16" in told
    assert told.endswith("use bf16 or fp32")


def test_a_single_file_without_index_is_read(tmp_path: Path) -> None:
    hf = write_model(tmp_path / "hf", SIZES.config(), random_tensors(SIZES), files=1)
    assert hf_to_nxd(hf, tmp_path / "nxd", tensor_model_parallel_size=4).read_bytes > 0


def test_a_broken_index_and_a_cut_file_are_told_together(tmp_path: Path) -> None:
    hf = model(tmp_path / "hf")
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "model-00003-of-00002.safetensors"
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    cut = hf / "model-00002-of-00002.safetensors"
    cut.write_bytes(cut.read_bytes()[:-2])
    told = refusal(hf, tmp_path / "nxd")
    assert "model-00003-of-00002.safetensors cannot be read" in told
    assert "the file is cut short or damaged" in told


def test_a_pickled_model_is_not_read(tmp_path: Path) -> None:
    hf = model(tmp_path / "hf")
    for path in hf.glob("*.safetensors*"):
        path.unlink()
    torch.save({}, hf / "pytorch_model.bin")
    assert "pytorch_model.bin is a pickle, which is not read: save it as safetensors first" in refusal(
        hf, tmp_path / "nxd"
    )


def test_a_header_longer_than_its_file_is_told(tmp_path: Path) -> None:
    hf = write_model(tmp_path / "hf", SIZES.config(), random_tensors(SIZES), files=1)
    (hf / "model.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}")
    assert "no safetensors file, or cut short" in refusal(hf, tmp_path / "nxd")


def test_a_missing_config_is_told_with_the_option(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none", tmp_path / "nxd").startswith(
        f"--input {tmp_path}/none: config.json: No such file"
    )


def test_the_manifest_names_hashes_degrees_versions_and_checksums(tmp_path: Path) -> None:
    hf = model(tmp_path / "hf")
    report = hf_to_nxd(hf, tmp_path / "nxd", tensor_model_parallel_size=4)
    manifest = read_commit(tmp_path / "nxd")
    assert manifest is not None
    assert manifest["degrees"] == report.degrees
    assert manifest["degrees"]["kv_replicator"] == 2
    assert set(manifest["source"]["crc32"]) == set(SIZES.shapes())
    assert manifest["source"]["files"].keys() == {path.name for path in hf.glob("*.safetensors")}
    assert {"trainwright", "torch"} <= manifest["versions"].keys()
    assert verify(tmp_path / "nxd") == []


def test_the_same_conversion_gives_the_same_bytes_with_any_number_of_workers(tmp_path: Path) -> None:
    hf = model(tmp_path / "hf")
    for workers in (1, 4):
        hf_to_nxd(hf, tmp_path / str(workers), tensor_model_parallel_size=4, layout="xser", workers=workers)
    assert tree(tmp_path / "1") == tree(tmp_path / "4")


def test_no_network_and_no_prompt_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr("builtins.input", refuse)
    monkeypatch.setattr("getpass.getpass", refuse)
    hf_to_nxd(model(tmp_path / "hf"), tmp_path / "nxd", tensor_model_parallel_size=4)


def test_nxds_markers_stand_beside_the_shards(tmp_path: Path) -> None:
    hf_to_nxd(model(tmp_path / "hf"), tmp_path / "nxd", tensor_model_parallel_size=4)
    assert {name: (tmp_path / "nxd" / name).read_text() for name in ("checkpoint", "done")} == {
        "checkpoint": "1",
        "done": "1",
    }


def test_a_damaged_output_is_neither_taken_nor_overwritten(tmp_path: Path) -> None:
    hf = model(tmp_path / "hf")
    hf_to_nxd(hf, tmp_path / "nxd", tensor_model_parallel_size=4)
    shard = next((tmp_path / "nxd" / "model").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"damaged: model/dp_rank.* remove it, or name another"):
        hf_to_nxd(hf, tmp_path / "nxd", tensor_model_parallel_size=4)
    assert shard.exists()
    shutil.rmtree(tmp_path / "nxd")
    hf_to_nxd(hf, tmp_path / "nxd", tensor_model_parallel_size=4)
    assert (tmp_path / "nxd" / COMMIT_FILE).exists()
