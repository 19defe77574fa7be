"""Whether a directory holds what it should: checksums, structure, and the values of a Hugging Face model."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainwright.checkpoint.assembly import Assembly
from trainwright.checkpoint.bits import Bits, Dtype, cast
from trainwright.checkpoint.differences import differences, structure_problems
from trainwright.checkpoint.hf_model import HfModel
from trainwright.checkpoint.naming import name_problems
from trainwright.checkpoint.nxd_checkpoint import NxdCheckpoint
from trainwright.node import commit


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was checked, and what is wrong."""

    directory: str
    checks: tuple[str, ...]
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {"schema_version": 1, **asdict(self)}


def verify(directory: Path, *, against: Path | None = None) -> Verdict:
    """Check a directory of either format; with `against`, that it holds exactly that model's values.

    Where types differ, the model's values are compared as the directory's type stores them.
    Raises UserError where the files of one of the two cannot be read at all.
    """
    checks, problems = [], []
    is_committed = (directory / commit.COMMIT_FILE).exists()
    checks.append("checksums" if is_committed else f"no checksums: no {commit.COMMIT_FILE}")
    problems += commit.verify(directory) if is_committed else []
    if not problems:
        is_nxd = not (directory / "config.json").exists()
        found = list(_nxd_problems(directory, against) if is_nxd else _hf_problems(directory, against))
        problems += found
        checks += [f"structure of {'NxD shards' if is_nxd else 'a Hugging Face model'}"]
        checks += [] if against is None else [f"values against {against}"]
    return Verdict(directory=str(directory), checks=tuple(checks), problems=tuple(problems))


def _nxd_problems(directory: Path, against: Path | None) -> Iterator[str]:
    checkpoint = NxdCheckpoint(directory, "verify")
    if against is None:
        return
    model = HfModel(against, "--against")
    assembly = Assembly(checkpoint, model.shape, model.shapes, allow_extra=False)
    yield from assembly.problems
    if assembly.problems:
        return
    for name, spec in model.specs.items():
        for block in assembly.blocks(name):
            expected = block.piece.of(model.values(name))
            for copy in block.copies:
                if not _equal(expected, spec.dtype, assembly.values(copy), assembly.dtype(name)):
                    yield f"{copy}: not the values of {name}"


def _hf_problems(directory: Path, against: Path | None) -> Iterator[str]:
    model = HfModel(directory, "verify")
    yield from name_problems(model.shape, model.shapes, allow_extra=True)
    if against is None:
        return
    other = HfModel(against, "--against")
    yield from structure_problems(model, other)
    for found in differences(model, other):
        if found.num_differing:
            yield (
                f"{found.name} has other values: {found.num_differing} of {found.num_values} differ, by up to "
                f"{found.largest:.3g}"
            )
    for name, mine in model.specs.items():
        theirs = other.specs.get(name, mine)
        is_of_other_type = mine.shape == theirs.shape and mine.dtype != theirs.dtype
        if is_of_other_type and not _equal(other.values(name), theirs.dtype, model.values(name), mine.dtype):
            yield f"{name} has other values"


def _equal(expected: Bits, expected_dtype: Dtype, found: Bits, found_dtype: Dtype) -> bool:
    return np.array_equal(cast(expected, expected_dtype, found_dtype), found)
