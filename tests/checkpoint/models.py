"""Small models that tests convert, and what tests read of the results."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from trainwright.checkpoint import hf_to_nxd, nxd_to_hf
from trainwright.checkpoint.nxd_checkpoint import shard_name

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A model that tp = key_value_heads * replicator fits."""

    key_value_heads: int = 2
    replicator: int = 2
    queries_per_rank: int = 1
    head_size: int = 4
    layers: int = 2
    ffn_per_rank: int = 2
    vocab_per_rank: int = 2
    is_tied: bool = False
    has_inv_freq: bool = False
    model_type: str = "llama"

    @property
    def tp(self) -> int:
        return self.key_value_heads * self.replicator

    @property
    def heads(self) -> int:
        return self.tp * self.queries_per_rank

    def config(self) -> dict[str, Any]:
        name = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}[self.model_type]
        return {
            "architectures": [name],
            "model_type": self.model_type,
            "hidden_size": self.heads * self.head_size,
            "intermediate_size": self.tp * self.ffn_per_rank,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "num_hidden_layers": self.layers,
            "vocab_size": self.tp * self.vocab_per_rank,
            "tie_word_embeddings": self.is_tied,
            "max_position_embeddings": 64,
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the tensors of the model as transformers names them, written down here a second time."""
        config = self.config()
        hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
        key_value = self.key_value_heads * self.head_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            shapes |= {
                f"{prefix}.self_attn.q_proj.weight": (hidden, hidden),
                f"{prefix}.self_attn.k_proj.weight": (key_value, hidden),
                f"{prefix}.self_attn.v_proj.weight": (key_value, hidden),
                f"{prefix}.self_attn.o_proj.weight": (hidden, hidden),
                f"{prefix}.mlp.gate_proj.weight": (ffn, hidden),
                f"{prefix}.mlp.up_proj.weight": (ffn, hidden),
                f"{prefix}.mlp.down_proj.weight": (hidden, ffn),
                f"{prefix}.input_layernorm.weight": (hidden,),
                f"{prefix}.post_attention_layernorm.weight": (hidden,),
            }
            if self.has_inv_freq:
                shapes[f"{prefix}.self_attn.rotary_emb.inv_freq"] = (self.head_size // 2,)
        shapes["model.norm.weight"] = (hidden,)
        if not self.is_tied:
            shapes["lm_head.weight"] = (vocab, hidden)
        return shapes


def random_tensors(sizes: Sizes, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensors:
    """Return tensors of random bits, NaNs included; buffers are always fp32."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in sizes.shapes().items():
        kept = torch.float32 if name.endswith("inv_freq") else dtype
        signed = {2: torch.int16, 4: torch.int32}[kept.itemsize]
        limits = torch.iinfo(signed)
        tensors[name] = torch.randint(limits.min, limits.max, shape, dtype=signed, generator=generator).view(kept)
    return tensors


def write_model(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], files: int = 2
) -> Path:
    """Write a Hugging Face model whose tensors are dealt out to `files` files in turn."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    weight_map: dict[str, str] = {}
    names = [f"model-{index:05d}-of-{files:05d}.safetensors" for index in range(1, files + 1)]
    for name, file in zip(tensors, itertools.cycle(names), strict=False):
        weight_map[name] = file
    for file in names:
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def read_model(directory: Path) -> Tensors:
    """Return the tensors of a Hugging Face model, read by the safetensors library."""
    tensors: Tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def read_shards(checkpoint: Path, tp: int, pp: int = 1) -> list[list[Tensors]]:
    """Return the inline shards as [pp][tp], read by torch."""
    return [[read_shard(checkpoint, tp_rank, pp_rank) for tp_rank in range(tp)] for pp_rank in range(pp)]


def read_shard(checkpoint: Path, tp_rank: int, pp_rank: int = 0) -> Tensors:
    tensors: Tensors = torch.load(checkpoint / "model" / shard_name(tp_rank, pp_rank), weights_only=True)
    return tensors


def edit_shard(checkpoint: Path, tp_rank: int, pp_rank: int = 0, **changed: torch.Tensor | None) -> None:
    """Store other tensors in a shard, as training does; None removes one."""
    tensors: dict[str, torch.Tensor | None] = {**read_shard(checkpoint, tp_rank, pp_rank), **changed}
    disown(checkpoint)
    kept = {name: value for name, value in tensors.items() if value is not None}
    torch.save(kept, checkpoint / "model" / shard_name(tp_rank, pp_rank))


def disown(checkpoint: Path) -> None:
    """Take from a converted directory what NxD would not have written, so that it may be changed."""
    for name in ("commit.json", "conversion.json"):
        (checkpoint / name).unlink(missing_ok=True)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors are equal in type, shape and every bit; NaN equals itself here."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))


def differing(first: Tensors, second: Tensors) -> list[str]:
    """Return the names that only one has, or that differ."""
    both = first.keys() & second.keys()
    return sorted((first.keys() ^ second.keys()) | {name for name in both if not same_bits(first[name], second[name])})


def tree(directory: Path) -> dict[str, bytes]:
    """Return the content of all files below `directory`."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def convert_and_tell(connection: Connection, kind: str, source: Path, output: Path, options: Mapping[str, Any]) -> None:
    """Convert in a process of its own; tell after each tensor how much anonymous memory this process holds, in KiB."""

    def tell(done: int, total: int) -> None:
        connection.send(anonymous_kib())

    connection.send(anonymous_kib())
    {"hf-to-nxd": hf_to_nxd, "nxd-to-hf": nxd_to_hf}[kind](source, output, report=tell, **options)


def anonymous_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def received(connection: Connection) -> Sequence[int]:
    """Return all that `convert_and_tell` told until it ended."""
    told = []
    try:
        while True:
            told.append(connection.recv())
    except EOFError:
        return told
