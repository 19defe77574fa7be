"""Two files of instruction data become one committed Megatron data set, once: training records, then validation.

CACHE_DIR/<stem>-<tokenizer>-<hash>/<unique>/records.{bin,idx}; each record is a document of one sequence, bos + input +
output + eos. No mask is kept, so whatever reads it trains on all tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainwright.dataset.blend import Blend
from trainwright.dataset.indexed import IndexedWriter, token_dtype
from trainwright.dataset.sft import read_records, tokenize
from trainwright.dataset.store import find_or_build
from trainwright.dataset.tokenizer import Tokenizer
from trainwright.errors import UserError
from trainwright.node.commit import read_commit

_FORMAT = "1"  # part of the name: raise it when the same records would be stored otherwise
_STEM = "records"
_CHUNK_BYTES = 1 << 20


def build_sft(
    train_path: Path, val_path: Path, tokenizer: Tokenizer, cache_dir: Path, report: Callable[[str], None]
) -> Blend:
    """Return the data set made of two files of records, its splits being the files; built where it is not there yet.

    Goes by the content of the files, not by their paths. Raises UserError naming data.train_path or data.val_path with
    all faults of both, and data.cache_dir when that cannot be written.
    """
    files = {"data.train_path": train_path, "data.val_path": val_path}
    digests = [_digest(path, key) for key, path in files.items()]
    key = hashlib.sha256(" ".join([*digests, tokenizer.identity, _FORMAT]).encode()).hexdigest()[:10]

    def build(directory: Path) -> dict[str, Any]:
        report(f"tokenizing {train_path} and {val_path} with {tokenizer.name} into {directory}")
        counts = _write(directory / _STEM, files, tokenizer, report)
        sources = {"train": str(train_path), "validation": str(val_path)}
        return {"sources": sources, "tokenizer": tokenizer.identity, "num_records": counts}

    entry = cache_dir / f"{train_path.stem}-{tokenizer.name}-{key}"
    directory = find_or_build(entry, build, key="data.cache_dir")
    metadata = read_commit(directory)
    assert metadata is not None
    num_train, num_validation = metadata["num_records"]
    return Blend(
        prefixes=(directory / _STEM,),
        weights=None,
        bounds={"train": (0, num_train), "validation": (num_train, num_train + num_validation), "test": None},
    )


def _digest(path: Path, key: str) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                digest.update(chunk)
    except OSError as error:
        raise UserError(f"{key}: {path} cannot be read: {error.strerror or error}") from error
    return digest.hexdigest()


def _write(prefix: Path, files: dict[str, Path], tokenizer: Tokenizer, report: Callable[[str], None]) -> list[int]:
    """Write the pair; return the number of records of each file."""
    counts, problems = [], []
    with IndexedWriter(prefix, token_dtype(tokenizer.vocab_size)) as writer:
        for key, path in files.items():
            num_records = num_tokens = 0
            try:
                for record in tokenize(read_records(path, key=key), tokenizer):
                    writer.add_sequence(record.ids)
                    writer.end_document()
                    num_records, num_tokens = num_records + 1, num_tokens + len(record.ids)
            except UserError as error:
                problems.append(str(error))
            counts.append(num_records)
            report(f"tokenized {num_tokens:,} tokens in {num_records:,} records of {path}")
        if problems:
            raise UserError("\n".join(dict.fromkeys(problems)))
    return counts
