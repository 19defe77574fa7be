"""The families of models: the tensors of each, their names here and there, and how they are spread over ranks.

A family is a table; the engine knows none by name. Source of NxD's side: neuronx_distributed, checkpoint_converter.py
and its CheckpointConverterLlama (SDK 2.29), model_style hf.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

# rows, columns: equal shares of dimension 0 or 1. query, key_value: whole heads in the order of shards.py.
# whole: the same copy on every rank.
Split = Literal["rows", "columns", "query_rows", "query_columns", "key_value_rows", "whole"]
Size = Literal["vocab_size", "hidden_size", "ffn_hidden_size", "query_size", "key_value_size", "num_frequencies"]


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One tensor of the Hugging Face model; inside a layer the name is what follows the layer's prefix."""

    name: str
    split: Split
    shape: tuple[Size, ...]
    is_buffer: bool = False  # made by the model itself: may be absent, and keeps its type
    tied_to: str | None = None  # the weight that stands for it where the model ties the two; None: never tied


@dataclass(frozen=True, kw_only=True)
class Stored:
    """One tensor of a shard: on each rank its parts are joined along dimension 0."""

    name: str
    parts: tuple[Weight, ...]


@dataclass(frozen=True, kw_only=True)
class Family:
    """All tensors of a kind of model, in NxD's order."""

    model_type: str
    layer_prefix: str
    first: tuple[Stored, ...]  # before the layers
    qkv_apart: tuple[Stored, ...]
    qkv_fused: tuple[Stored, ...]  # NxD puts these after all others of the shard
    layer: tuple[Stored, ...]  # the rest of a layer
    last: tuple[Stored, ...]  # after the layers

    def weights(self, num_layers: int) -> Iterator[tuple[str, Weight]]:
        """Yield each tensor of the Hugging Face model under its full name, in the order of the model."""
        groups = [(self.first, "")]
        groups += [(self.qkv_apart + self.layer, self.layer_prefix.format(layer)) for layer in range(num_layers)]
        groups += [(self.last, "")]
        for stored, prefix in groups:
            for weight in (part for tensor in stored for part in tensor.parts):
                yield prefix + weight.name, weight

    def layer_of(self, name: str) -> int | None:
        """Return the number of the layer that the tensor `name` is in, None for one outside the layers."""
        before, after = self.layer_prefix.split("{}")
        found = re.match(re.escape(before) + r"(\d+)" + re.escape(after), name)
        return int(found.group(1)) if found else None


def _same(name: str, split: Split, *shape: Size, is_buffer: bool = False, tied_to: str | None = None) -> Stored:
    weight = Weight(name=name, split=split, shape=shape, is_buffer=is_buffer, tied_to=tied_to)
    return Stored(name=name, parts=(weight,))


_EMBEDDING = "model.embed_tokens.weight"
_QUERY = Weight(name="self_attn.q_proj.weight", split="query_rows", shape=("query_size", "hidden_size"))
_KEY = Weight(name="self_attn.k_proj.weight", split="key_value_rows", shape=("key_value_size", "hidden_size"))
_VALUE = Weight(name="self_attn.v_proj.weight", split="key_value_rows", shape=("key_value_size", "hidden_size"))
_GATE = Weight(name="mlp.gate_proj.weight", split="rows", shape=("ffn_hidden_size", "hidden_size"))
_UP = Weight(name="mlp.up_proj.weight", split="rows", shape=("ffn_hidden_size", "hidden_size"))

LLAMA = Family(
    model_type="llama",
    layer_prefix="model.layers.{}.",
    first=(_same(_EMBEDDING, "rows", "vocab_size", "hidden_size"),),
    qkv_apart=(
        Stored(name="self_attn.qkv_proj.weight_q", parts=(_QUERY,)),
        Stored(name="self_attn.qkv_proj.weight_k", parts=(_KEY,)),
        Stored(name="self_attn.qkv_proj.weight_v", parts=(_VALUE,)),
    ),
    qkv_fused=(Stored(name="self_attn.qkv_proj.weight_qkv", parts=(_QUERY, _KEY, _VALUE)),),
    layer=(
        _same("self_attn.o_proj.weight", "query_columns", "hidden_size", "query_size"),
        Stored(name="mlp.gate_up_proj.weight", parts=(_GATE, _UP)),
        _same("mlp.down_proj.weight", "columns", "hidden_size", "ffn_hidden_size"),
        _same("input_layernorm.weight", "whole", "hidden_size"),
        _same("post_attention_layernorm.weight", "whole", "hidden_size"),
        _same("self_attn.rotary_emb.inv_freq", "whole", "num_frequencies", is_buffer=True),
    ),
    last=(
        _same("model.norm.weight", "whole", "hidden_size"),
        _same("lm_head.weight", "rows", "vocab_size", "hidden_size", tied_to=_EMBEDDING),
    ),
)
FAMILIES = {"llama": LLAMA, "mistral": replace(LLAMA, model_type="mistral")}
_NO_SOURCE = {
    "qwen2": "how NxD stores its query, key and value biases",
    "mixtral": "how NxD stores its experts",
}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes that a model's tensors follow from."""

    family: Family
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    vocab_size: int
    is_tied: bool  # one table for input and output

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def size(self, name: Size) -> int:
        derived = {
            "query_size": self.num_attention_heads * self.head_size,
            "key_value_size": self.num_query_groups * self.head_size,
            "num_frequencies": self.head_size // 2,
        }
        return derived[name] if name in derived else int(getattr(self, name))

    def shape_of(self, weight: Weight) -> tuple[int, ...]:
        return tuple(self.size(name) for name in weight.shape)

    def to_dict(self) -> dict[str, Any]:
        """Return the sizes as JSON for a manifest."""
        return {
            "model_type": self.family.model_type,
            **{key: value for key, value in vars(self).items() if key != "family"},
        }


def parse_config(config: Mapping[str, Any]) -> tuple[ModelShape | None, list[str]]:
    """Return what a config.json says, or None and all that is wrong with it."""
    model_type = str(config.get("model_type"))
    family = FAMILIES.get(model_type)
    if family is None:
        reason = f"there is no source yet for {_NO_SOURCE[model_type]}" if model_type in _NO_SOURCE else "unknown"
        return None, [f"model_type: {model_type} is not converted ({reason}); use one of {', '.join(FAMILIES)}"]
    required = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    problems = [
        f"{key}: {config.get(key)!r} is not a number above 0" for key in required if not _is_count(config.get(key))
    ]
    if problems:
        return None, problems
    heads = config["num_attention_heads"]
    shape = ModelShape(
        family=family,
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=config.get("num_key_value_heads") or heads,
        vocab_size=config["vocab_size"],
        is_tied=bool(config.get("tie_word_embeddings", False)),
    )
    if shape.hidden_size % heads:
        problems.append(f"num_attention_heads: {heads} does not divide hidden_size={shape.hidden_size}")
    elif (config.get("head_dim") or shape.head_size) != shape.head_size:
        problems.append(
            f"head_dim: {config['head_dim']} is not hidden_size/num_attention_heads={shape.head_size}, which NxD "
            "takes it to be; such a model cannot be trained there"
        )
    if heads % shape.num_query_groups:
        problems.append(f"num_key_value_heads: {shape.num_query_groups} does not divide num_attention_heads={heads}")
    return (None if problems else shape), problems


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def name_problems(shape: ModelShape, found: Mapping[str, tuple[int, ...]], *, allow_extra: bool) -> list[str]:
    """Return what is wrong with the tensors of a Hugging Face model, given their shapes by name."""
    expected = dict(shape.family.weights(shape.num_layers))
    problems = []
    unknown = [name for name in found if name not in expected]
    if unknown and not allow_extra:
        problems.append(
            f"{shape.family.model_type} has no tensor {', '.join(unknown)}; --allow-extra copies such tensors to every "
            "rank as they are"
        )
    missing = [name for name, weight in expected.items() if name not in found and not _may_lack(shape, weight)]
    if missing:
        problems.append(f"missing: {', '.join(missing)}")
    known = {name: shape.shape_of(weight) for name, weight in expected.items() if name in found}
    problems += [
        f"{name} has shape {list(found[name])}, config.json makes it {list(due)}"
        for name, due in known.items()
        if found[name] != due
    ]
    return problems


def _may_lack(shape: ModelShape, weight: Weight) -> bool:
    return weight.is_buffer or (weight.tied_to is not None and shape.is_tied)
