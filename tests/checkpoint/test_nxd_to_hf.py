"""Exported models are complete, copies that differ are never dropped in silence, and strange files are refused."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.checkpoint.models import (
    Sizes,
    differing,
    disown,
    edit_shard,
    random_tensors,
    read_model,
    read_shard,
    write_model,
)
from trainwright.checkpoint import hf_to_nxd, nxd_to_hf
from trainwright.checkpoint.nxd_checkpoint import shard_name
from trainwright.errors import UserError

SIZES = Sizes(key_value_heads=2, replicator=2, queries_per_rank=1, layers=2)


def finite_tensors(sizes: Sizes = SIZES, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in sizes.shapes().items()}


def pair(directory: Path, tensors: dict[str, torch.Tensor] | None = None, sizes: Sizes = SIZES, **options: Any) -> Path:
    """Write a model and its shards, as `hf` and `nxd`; return `hf`."""
    hf = write_model(directory / "hf", sizes.config(), tensors or finite_tensors(sizes))
    hf_to_nxd(hf, directory / "nxd", tensor_model_parallel_size=sizes.tp, **options)
    return hf


def refusal(directory: Path, **options: Any) -> str:
    """Return why the export of `nxd` is refused; nothing may be left behind."""
    with pytest.raises(UserError) as caught:
        nxd_to_hf(directory / "nxd", directory / "back", **{"base": directory / "hf", **options})
    assert not (directory / "back").exists() or not list((directory / "back").iterdir())
    return str(caught.value)


def test_transformers_loads_what_is_exported_with_tokenizer_template_and_generation_config(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES.config())
    base = LlamaForCausalLM(config)
    base.generation_config.max_new_tokens = 7
    base.save_pretrained(tmp_path / "hf")
    vocabulary = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, unk_token="[UNK]", chat_template="old")
    tokenizer.save_pretrained(tmp_path / "hf")
    (tmp_path / "template").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}\n")
    hf_to_nxd(tmp_path / "hf", tmp_path / "nxd", tensor_model_parallel_size=4)
    nxd_to_hf(
        tmp_path / "nxd",
        tmp_path / "back",
        base=tmp_path / "hf",
        max_shard_bytes=2000,
        chat_template=tmp_path / "template",
    )
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not differing(dict(model.state_dict()), dict(base.state_dict()))
    assert model.generation_config.max_new_tokens == 7
    loaded = AutoTokenizer.from_pretrained(tmp_path / "back")
    assert loaded.tokenize("a b") == ["a", "b"]
    assert loaded.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "[a]"
    stored = json.loads((tmp_path / "back" / "tokenizer_config.json").read_text())
    assert stored["chat_template"] == (tmp_path / "template").read_text()


def test_all_files_of_the_base_but_its_weights_are_copied(tmp_path: Path) -> None:
    hf = pair(tmp_path)
    (hf / "tokenizer.model").write_bytes(b"\0\1")
    (hf / "pytorch_model.bin").write_bytes(b"old")
    (hf / ".gitattributes").write_text("")
    nxd_to_hf(tmp_path / "nxd", tmp_path / "back", base=hf)
    assert {path.name for path in (tmp_path / "back").iterdir()} == {
        "model.safetensors",
        "config.json",
        "tokenizer.model",
        "commit.json",
        "conversion.json",
    }


def test_the_index_places_every_tensor_of_the_base_in_files_below_the_limit(tmp_path: Path) -> None:
    hf = pair(tmp_path)
    nxd_to_hf(tmp_path / "nxd", tmp_path / "back", base=hf, max_shard_bytes=3000)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    tensors = read_model(hf)
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors.values())
    for file in set(index["weight_map"].values()):
        assert sum(tensors[name].nbytes for name, where in index["weight_map"].items() if where == file) <= 3000


def test_what_training_changed_is_exported(tmp_path: Path) -> None:
    hf = pair(tmp_path)
    for rank in range(4):
        scaled = {name: value * 2 for name, value in read_shard(tmp_path / "nxd", rank).items()}
        edit_shard(tmp_path / "nxd", rank, **scaled)
    nxd_to_hf(tmp_path / "nxd", tmp_path / "back", base=hf)
    assert not differing(read_model(tmp_path / "back"), {name: value * 2 for name, value in read_model(hf).items()})


def test_an_export_in_another_type_says_so_in_its_config(tmp_path: Path) -> None:
    hf = pair(tmp_path)
    nxd_to_hf(tmp_path / "nxd", tmp_path / "back", base=hf, dtype="bf16")
    assert {value.dtype for value in read_model(tmp_path / "back").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "back" / "config.json").read_text())["torch_dtype"] == "bfloat16"


KEY = "model.layers.1.self_attn.qkv_proj.weight_k"


def test_copies_of_a_key_value_head_that_differ_are_refused_by_default(tmp_path: Path) -> None:
    pair(tmp_path, fuse_qkv=False)
    edit_shard(tmp_path / "nxd", 3, **{KEY: read_shard(tmp_path / "nxd", 3)[KEY] + 0.5})
    told = refusal(tmp_path)
    assert "the copies of 1 tensors differ between ranks: model.layers.1.self_attn.k_proj.weight by up to 0.5" in told
    assert told.endswith("--on-difference average takes their mean")


def test_copies_that_differ_are_averaged_when_asked_and_noted(tmp_path: Path) -> None:
    hf = pair(tmp_path, fuse_qkv=False)
    edit_shard(tmp_path / "nxd", 3, **{KEY: read_shard(tmp_path / "nxd", 3)[KEY] + 0.5})
    report = nxd_to_hf(tmp_path / "nxd", tmp_path / "back", base=hf, on_difference="average")
    expected = read_model(hf)
    expected["model.layers.1.self_attn.k_proj.weight"][4:] += 0.25  # head 1 lies on ranks 1 and 3
    found = read_model(tmp_path / "back")
    assert differing(found, expected) in ([], ["model.layers.1.self_attn.k_proj.weight"])
    torch.testing.assert_close(found, expected)
    assert "their mean was taken" in report.notes[0]


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.input_layernorm.weight"])
def test_norms_that_differ_between_ranks_are_refused_too(tmp_path: Path, name: str) -> None:
    pair(tmp_path)
    edit_shard(tmp_path / "nxd", 1, **{name: read_shard(tmp_path / "nxd", 1)[name] + 1})
    assert f"{name} by up to 1" in refusal(tmp_path)


def test_a_tied_head_that_training_untied_is_refused(tmp_path: Path) -> None:
    pair(tmp_path, sizes=Sizes(is_tied=True))
    edit_shard(tmp_path / "nxd", 1, **{"lm_head.weight": read_shard(tmp_path / "nxd", 1)["lm_head.weight"] + 1})
    assert "model.embed_tokens.weight by up to 1" in refusal(tmp_path)


def test_buffers_that_nxd_does_not_store_come_from_the_base(tmp_path: Path) -> None:
    sizes = Sizes(has_inv_freq=True)
    hf = pair(tmp_path, sizes=sizes)
    for rank in range(4):
        edit_shard(
            tmp_path / "nxd",
            rank,
            **{f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": None for layer in range(2)},
        )
    report = nxd_to_hf(tmp_path / "nxd", tmp_path / "back", base=hf)
    assert not differing(read_model(tmp_path / "back"), read_model(hf))
    assert report.notes == ("2 tensors that no shard holds are the base model's",)


def test_missing_unknown_and_misshapen_tensors_of_shards_are_told_together(tmp_path: Path) -> None:
    pair(tmp_path)
    edit_shard(
        tmp_path / "nxd", 2, **{"model.norm.weight": torch.zeros(5), "lora": torch.zeros(1), "lm_head.weight": None}
    )
    told = refusal(tmp_path).splitlines()
    assert len(told) == 3
    assert "model.norm.weight of tp rank 2 has shape [5], the model makes it [16]" in told[0]
    assert "missing on some rank: lm_head.weight" in told[1]
    assert "no place for lora; --allow-extra leaves them out" in told[2]


def test_shards_that_the_base_does_not_fit_are_refused(tmp_path: Path) -> None:
    pair(tmp_path)
    other = Sizes(key_value_heads=3, replicator=1, layers=2)
    base = write_model(tmp_path / "other", other.config(), random_tensors(other))
    assert "4 is not num_key_value_heads=3 times" in refusal(tmp_path, base=base)


class Payload:
    """Unpickles by calling a function: what a hostile checkpoint does."""

    def __init__(self, touched: Path) -> None:
        self.touched = touched

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.touched,)


def test_a_pickle_with_code_is_refused_and_never_run(tmp_path: Path) -> None:
    pair(tmp_path)
    disown(tmp_path / "nxd")
    torch.save({"model.norm.weight": Payload(tmp_path / "run")}, tmp_path / "nxd" / "model" / shard_name(1, 0))
    told = refusal(tmp_path)
    assert f"{shard_name(1, 0)}: it is a pickle of more than plain tensors and is not read" in told
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "content", [{"model": {"nested": torch.zeros(1)}}, [torch.zeros(1)], {"step": 3}], ids=["nested", "list", "number"]
)
def test_a_shard_of_anything_but_named_tensors_is_refused(tmp_path: Path, content: object) -> None:
    pair(tmp_path)
    disown(tmp_path / "nxd")
    torch.save(content, tmp_path / "nxd" / "model" / shard_name(0, 0))
    assert shard_name(0, 0) in refusal(tmp_path)


def test_a_plain_pickle_file_is_refused(tmp_path: Path) -> None:
    pair(tmp_path)
    disown(tmp_path / "nxd")
    (tmp_path / "nxd" / "model" / shard_name(0, 0)).write_bytes(pickle.dumps(Payload(tmp_path / "run")))
    assert shard_name(0, 0) in refusal(tmp_path)
    assert not (tmp_path / "run").exists()


def test_a_missing_shard_an_interrupted_save_and_a_stranger_are_told_together(tmp_path: Path) -> None:
    pair(tmp_path)
    model = tmp_path / "nxd" / "model"
    (model / shard_name(2, 0)).unlink()
    (model / "dp_rank_00_ep_rank_01_tp_rank_00_pp_rank_00.pt").write_bytes(b"")
    disown(tmp_path / "nxd")
    (tmp_path / "nxd" / "done").unlink()
    told = refusal(tmp_path).splitlines()
    assert len(told) == 3
    assert "no `done` file: the save was interrupted" in told[0]
    assert "ep_rank_01" in told[1]
    assert told[2].endswith(f"missing: {shard_name(2, 0)}")


def test_references_without_their_info_file_are_refused_as_nxd_would_crash(tmp_path: Path) -> None:
    pair(tmp_path, layout="xser")
    disown(tmp_path / "nxd")
    (tmp_path / "nxd" / "model" / (shard_name(1, 0) + ".info.pt")).unlink()
    assert f"{shard_name(1, 0)}.info.pt is missing; NxD cannot read it either" in refusal(tmp_path)


def test_the_folder_of_the_shards_can_be_named_instead_of_the_checkpoint(tmp_path: Path) -> None:
    hf = pair(tmp_path)
    nxd_to_hf(tmp_path / "nxd" / "model", tmp_path / "back", base=hf)
    assert not differing(read_model(tmp_path / "back"), read_model(hf))


def test_a_template_needs_a_tokenizer_to_belong_to(tmp_path: Path) -> None:
    pair(tmp_path)
    assert "has no tokenizer_config.json to put it into" in refusal(tmp_path, chat_template=tmp_path / "t")
