"""Recorded runs of a tiny model, for the programs of the stages that are not NxDT's own."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.checkpoint.models import Sizes, disown, write_model
from trainwright.checkpoint import hf_to_nxd
from trainwright.config import RunConfig
from trainwright.node.run_paths import RunPaths

SIZES = Sizes()  # tp 4, kv_replicator 2
CONFIG = {**SIZES.config(), "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
_HIDDEN = CONFIG["hidden_size"]


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A run that was recorded and not submitted."""

    config: RunConfig
    paths: RunPaths

    def stage(self, main: Callable[[list[str]], int]) -> int:
        """Run the program of a stage here and return its exit code."""
        return main([str(self.paths.run_dir), "--attempt", "1"])


Record = Callable[..., Recorded]


@pytest.fixture
def record(tmp_path: Path, parsed: Callable[..., RunConfig]) -> Record:
    """Return a function from further overrides to a recorded run of the tiny model."""

    def make(*overrides: str) -> Recorded:
        sizes = (
            f"model.num_layers={CONFIG['num_hidden_layers']}",
            f"model.hidden_size={_HIDDEN}",
            f"model.ffn_hidden_size={CONFIG['intermediate_size']}",
            f"model.num_attention_heads={CONFIG['num_attention_heads']}",
            f"model.num_query_groups={CONFIG['num_key_value_heads']}",
            f"model.vocab_size={CONFIG['vocab_size']}",
            "model.max_position_embeddings=64",
            "data.seq_length=64",
            f"parallelism.tensor_model_parallel_size={SIZES.tp}",
            f"parallelism.kv_replicator={SIZES.replicator}",
            f"site.slurm.shared_dir={tmp_path}/fsx",
        )
        config = parsed("model=tanuki_8b", "hardware=trn1", *sizes, *overrides)
        paths = RunPaths(tmp_path / "run")
        paths.own.mkdir(parents=True, exist_ok=True)
        paths.record(1).write_text(yaml.safe_dump({"config": config.to_dict()}))
        return Recorded(config=config, paths=paths)

    return make


def tiny_tensors(dtype: torch.dtype = torch.bfloat16, seed: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SIZES.shapes().items()}


def tiny_model(directory: Path, *, seed: int = 3, **config: object) -> Path:
    """Write a model that transformers loads, bf16, in two files, with tokenizer, template and generation config."""
    write_model(directory, {**CONFIG, "dtype": "bfloat16", **config}, tiny_tensors(seed=seed))
    vocabulary = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2, "[S]": 3}, unk_token="[UNK]"))
    vocabulary.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "[UNK]", "bos_token": "[S]", "eos_token": "[S]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, chat_template="old", **special)
    tokenizer.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"max_new_tokens": 7}))
    return directory


def trained(run: Recorded, step: int, tensors: dict[str, torch.Tensor], *, is_done: bool = True) -> Path:
    """Write what NxDT saves with mixed_precision: fp32 shards of weights that are bf16."""
    scratch = run.paths.run_dir / f"trained-{step}"
    checkpoint = run.paths.checkpoint(f"hf_tanuki--step={step}-consumed_samples={step * 8}.0.ckpt")
    hf_to_nxd(
        write_model(scratch, CONFIG, tensors),
        checkpoint,
        tensor_model_parallel_size=SIZES.tp,
        dtype="fp32",
        layout="xser",
    )
    shutil.rmtree(scratch)
    disown(checkpoint)
    (checkpoint / "user_content.pt").write_bytes(b"never read")
    if not is_done:
        (checkpoint / "done").unlink()
    return checkpoint
