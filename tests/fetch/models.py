"""A small model as the hub has it: file contents by name."""

import json
from pathlib import Path

from tests.checkpoint.models import Sizes, random_tensors, write_model

SIZES = Sizes()


def model_files(scratch: Path, seed: int = 0) -> dict[str, bytes]:
    """Return a model of two weight files with its tokenizer, and what of a model's repository nobody needs."""
    folder = write_model(scratch, SIZES.config(), random_tensors(SIZES, seed=seed))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 7}}, "added_tokens": []}))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "README.md").write_text("A model.")
    (folder / "model.fp32.safetensors").write_bytes(b"a second copy, which the index does not list")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    return {**files, "pytorch_model.bin": b"a pickle", "pytorch_model.bin.index.json": b"{}", "onnx/model.onnx": b"x"}


def write(folder: Path, files: dict[str, bytes]) -> Path:
    """Write the files that a model's directory has."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        if "/" not in name:
            (folder / name).write_bytes(content)
    return folder
