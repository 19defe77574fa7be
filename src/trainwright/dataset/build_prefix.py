"""Files of text become a pair at a prefix of the user's: in several processes, in parts that outlive a kill.

The bytes depend on the texts, the tokenizer and the options only. While it is built all lies in PREFIX.building/. At
the end PREFIX.bin takes its place, with its commit beside it, and then PREFIX.idx: no reader of Megatron's opens a pair
without that, and ours sees that it describes the whole .bin.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trainwright.dataset.indexed import IndexedWriter, bin_path, idx_path, token_dtype
from trainwright.dataset.part_run import BuildProgress, PartRun
from trainwright.dataset.parts import PairRecipe, PartBuilder
from trainwright.dataset.text_files import TextFile, read_pieces
from trainwright.errors import UserError
from trainwright.node.commit import commit_file, read_commit, write_commit

PIECE_BYTES = 8 << 20  # of text: some seconds of work
_MOST_BYTES_A_TOKEN = 8  # of text, seldom more in any language; so the disk must hold at least what this makes
_PUBLISHING = "publishing"  # a file in the folder: PREFIX.bin may be ours, though nothing beside it says so
_FOLDER = ".building"


@dataclass(frozen=True, kw_only=True)
class BuiltPair:
    """What was built; the names are those of the report."""

    documents: int
    sequences: int
    tokens: int
    bytes: int  # of .bin
    dtype: str
    vocab_size: int
    tokenizer: str  # identity
    skipped: int  # faulty documents
    empty: int  # documents without any token
    crc32: str  # of .bin, hexadecimal
    parts: int
    parts_found: int = 0  # made by an earlier, interrupted build
    was_there: bool = False  # the same pair was there, and nothing was done


def build_prefix(
    files: Sequence[TextFile],
    prefix: Path,
    recipe: PairRecipe,
    *,
    workers: int,
    skip_bad: bool,
    overwrite: bool,
    on_progress: Callable[[BuildProgress], None],
    piece_bytes: int = PIECE_BYTES,
) -> BuiltPair:
    """Write the documents of `files` in order as the pair `prefix`, and go on where an interrupted build was.

    `workers` processes tokenize, one is this one. Raises UserError with all faulty documents unless `skip_bad`, for a
    pair that is there unless it is the same or may be overwritten, and for a disk that is full.
    """
    folder = prefix.with_name(prefix.name + _FOLDER)
    builder = PartBuilder(folder, recipe)
    try:
        _refuse_others(prefix, folder, overwrite)
        if idx_path(prefix).exists() and not overwrite:
            return _same(files, prefix, folder, builder, piece_bytes)
        _check_space(prefix, sum(file.num_bytes for file in files) // _MOST_BYTES_A_TOKEN, builder)
        with _locked(folder):
            run = PartRun(files, builder, skip_bad=skip_bad, on_progress=on_progress)
            if workers == 1:
                run.here(read_pieces(files, piece_bytes))
            else:
                run.in_processes(read_pieces(files, piece_bytes), workers, folder, recipe)
            run.refuse_faults()
            built = _publish(prefix, folder, builder, run)
            shutil.rmtree(folder)
            return built
    except OSError as error:
        raise UserError(
            f"--output {prefix}: cannot write: {error.strerror or error}; what is done so far stays"
        ) from error


def _publish(prefix: Path, folder: Path, builder: PartBuilder, run: PartRun) -> BuiltPair:
    """Join the parts in order and put the pair in its place, the index last."""
    parts = [run.parts[number] for number in sorted(run.parts) if run.parts[number].counts.tokens]
    dtype = token_dtype(builder.tokenizer.vocab_size)
    _check_space(prefix, run.counts.tokens, builder)
    whole = folder / "whole"
    with IndexedWriter(whole, dtype) as writer:
        for part in parts:
            writer.add_index(part.prefix)
    built = BuiltPair(
        **asdict(run.counts),
        bytes=run.counts.tokens * dtype.itemsize,
        dtype=dtype.name,
        vocab_size=builder.tokenizer.vocab_size,
        tokenizer=builder.tokenizer.identity,
        skipped=run.num_faults,
        crc32=f"{writer.bin_crc32:08x}",
        parts=len(run.parts),
    )
    (folder / _PUBLISHING).touch()
    _flush(folder)
    for old in (idx_path(prefix), _commit_of(prefix)):
        old.unlink(missing_ok=True)
    os.replace(bin_path(whole), bin_path(prefix))
    metadata = {"kind": "pair", "made_of": run.digest.hexdigest(), "built": asdict(built)}
    write_commit(bin_path(prefix), metadata, known_crc32s={bin_path(prefix).name: writer.bin_crc32})
    _flush(idx_path(whole))
    os.replace(idx_path(whole), idx_path(prefix))
    _flush(prefix.parent)
    return replace(built, parts_found=run.parts_found)


def _refuse_others(prefix: Path, folder: Path, overwrite: bool) -> None:
    """Raise UserError where a file is in the way that no build of ours left half-made."""
    is_half = bin_path(prefix).exists() and not idx_path(prefix).exists()
    is_ours = _commit_of(prefix).exists() or (folder / _PUBLISHING).exists()
    if is_half and not is_ours and not overwrite:
        raise UserError(f"--output {prefix}: {bin_path(prefix)} is there already; choose another, or give --overwrite")
    prefix.parent.mkdir(parents=True, exist_ok=True)


def _same(files: Sequence[TextFile], prefix: Path, folder: Path, builder: PartBuilder, piece_bytes: int) -> BuiltPair:
    """Return what is there, if a build of the same made it. Raises UserError otherwise."""
    found = read_commit(bin_path(prefix))
    digest = hashlib.sha256()
    for piece in read_pieces(files, piece_bytes) if found is not None else ():
        digest.update(builder.key(piece).encode())
    if found is None or found.get("made_of") != digest.hexdigest():
        raise UserError(f"--output {prefix}: another pair is there already; choose another prefix, or give --overwrite")
    if folder.exists():  # of a build that was killed after its last step
        with _locked(folder):
            shutil.rmtree(folder)
    return replace(BuiltPair(**found["built"]), was_there=True)


def built_by(prefix: Path) -> dict[str, Any] | None:
    """Return what a build of ours says of its pair (see BuiltPair), None for a pair that has none or that changed."""
    metadata = read_commit(bin_path(prefix)) if bin_path(prefix).is_file() else None
    return None if metadata is None else metadata.get("built")


def _commit_of(prefix: Path) -> Path:
    path = bin_path(prefix)
    return commit_file(path) if path.exists() else path.with_name(f"{path.name}.commit.json")


def _check_space(prefix: Path, num_tokens: int, builder: PartBuilder) -> None:
    needed = num_tokens * token_dtype(builder.tokenizer.vocab_size).itemsize
    existing = next(path for path in prefix.absolute().parents if path.is_dir())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise UserError(
            f"--output {prefix}: the tokens take {needed:,} bytes at least, {free:,} are free there; free some or "
            "choose another disk"
        )


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder against other builds on this machine. Raises UserError where one is at work."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise UserError(f"--output: another process is building in {folder}; wait for it or stop it") from error
            if error.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL):  # a mount without locks
                raise
        yield


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):  # a mount that keeps no directories
            raise
    finally:
        os.close(descriptor)
