"""What a file of instruction data holds, and what NxDT and the native backend would make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

from trainwright.dataset.finding import DataFinding
from trainwright.dataset.sft import TokenizedRecord, ignore_bytes, read_records, tokenize, unit_of
from trainwright.dataset.sft_counts import count_records, spread
from trainwright.dataset.sft_epoch import NxdtSamples, Recipe, Samples, native_samples, nxdt_samples
from trainwright.dataset.sft_findings import find
from trainwright.dataset.sft_packing import DROPPED, Packer, Sample, packed_sample, padded_sample
from trainwright.dataset.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class SftReport:
    """All that `trainwright data inspect` tells of a file of instruction data."""

    path: Path
    unit: str  # what numbers of records count: "line" or "record"
    num_records: int
    tokenizer: Tokenizer
    recipe: Recipe
    tokens: dict[str, dict[str, float]]  # of input, output, and record with both ends; see `spread`
    nxdt: NxdtSamples
    native: Samples
    findings: tuple[DataFinding, ...]

    @property
    def has_errors(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON takes it."""
        tokenizer = self.tokenizer
        return {
            "path": str(self.path),
            "unit": self.unit,
            "num_records": self.num_records,
            "tokenizer": {
                "identity": tokenizer.identity,
                "vocab_size": tokenizer.vocab_size,
                "bos": tokenizer.bos,
                "eos": tokenizer.eod,
            },
            "recipe": asdict(self.recipe),
            "tokens": self.tokens,
            "nxdt": asdict(self.nxdt),
            "native": asdict(self.native),
            "findings": [asdict(finding) for finding in self.findings],
        }


def inspect_sft(
    path: Path,
    tokenizer: Tokenizer,
    recipe: Recipe,
    *,
    key: str,
    on_bytes: Callable[[int], None] = ignore_bytes,
) -> SftReport:
    """Return the report of a file; its records stream, some 50 bytes of each are kept.

    Raises UserError as `read_records` and `tokenize` do. `key` is the configuration key or option that named the file.
    """
    records = read_records(path, key=key, on_bytes=on_bytes)
    counts = count_records(tokenize(islice(records, recipe.num_records), tokenizer), tokenizer)
    unit = unit_of(path)
    nxdt = nxdt_samples(counts, recipe)
    return SftReport(
        path=path,
        unit=unit,
        num_records=len(counts.numbers),
        tokenizer=tokenizer,
        recipe=recipe,
        tokens={
            "input": spread(counts.prompts - 1),
            "output": spread(counts.responses - 1),
            "record": spread(counts.lengths),
        },
        nxdt=nxdt,
        native=native_samples(counts, recipe),
        findings=tuple(find(counts, unit, recipe, nxdt)),
    )


def first_samples(
    path: Path, tokenizer: Tokenizer, recipe: Recipe, num_samples: int, *, key: str
) -> list[tuple[list[TokenizedRecord], Sample]]:
    """Return the first samples that NxDT makes of a file, each with its records; the rest is not read."""
    packer, numbers = Packer(recipe.seq_length), count()
    groups: dict[int, list[TokenizedRecord]] = {}
    for record in tokenize(islice(read_records(path, key=key), recipe.num_records), tokenizer):
        sample = packer.place(len(record.ids)) if recipe.packing else next(numbers)
        if sample >= num_samples:
            break
        if sample != DROPPED:
            groups.setdefault(sample, []).append(record)
    return [
        (
            records,
            packed_sample(records, recipe.seq_length, tokenizer.eod)
            if recipe.packing
            else padded_sample(records[0], recipe.seq_length),
        )
        for records in groups.values()
    ]
