"""`trainwright data inspect` of instruction data: jsonl of {"input", "output"}."""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.cli_data_options import Inspected, number_text, reading_shown, tokenizer_of
from trainwright.errors import EXIT_FAILED, UserError

if TYPE_CHECKING:
    from trainwright.config import RunConfig
    from trainwright.dataset.sft_epoch import Recipe
    from trainwright.dataset.sft_report import SftReport

_SHOWN_CHARACTERS = 600  # of a sample's text


def inspect_file(path: Path, key: str, options: argparse.Namespace, config: "RunConfig | None") -> Inspected:
    """Return what a file of instruction data holds. Raises UserError for faults of it and for missing options."""
    from trainwright.dataset.sft_report import first_samples, inspect_sft

    _require(options, config)
    tokenizer = tokenizer_of(options, config)
    recipe = _recipe(options, config)
    with reading_shown(path) as on_bytes:
        report = inspect_sft(path, tokenizer, recipe, key=key, on_bytes=on_bytes)
    samples = first_samples(path, tokenizer, recipe, options.samples, key=key) if options.samples else []
    columns = [
        {
            "records": [one.record.number for one in records],
            "input_ids": sample.input_ids.tolist(),
            "labels": sample.labels.tolist(),
            "attention_mask": sample.attention_mask.tolist(),
        }
        for records, sample in samples
    ]

    def show() -> None:
        _show_sft(report)
        for number, sample in enumerate(columns, 1):
            _show_sample(number, sample, report)

    content = {**report.to_dict(), **({"first_samples": columns} if options.samples else {})}
    return Inspected(content=content, exit_code=EXIT_FAILED if report.has_errors else 0, show=show)


def _require(options: argparse.Namespace, config: "RunConfig | None") -> None:
    wanted = {
        "--tokenizer": (options.tokenizer, "gpt2_bpe, a directory with tokenizer.json, or a hub id"),
        "--seq-length": (options.seq_length, "the tokens a sample"),
    }
    missing = [
        f"{name}: give {what}; or name a run's model=NAME" for name, (given, what) in wanted.items() if not given
    ]
    if config is None and missing:
        raise UserError("\n".join(missing))


def _recipe(options: argparse.Namespace, config: "RunConfig | None") -> "Recipe":
    from trainwright.dataset.sft_epoch import Recipe

    chosen: dict[str, Any] = {}
    if config is not None:
        from trainwright.plan import data_parallel_size

        chosen = {
            "seq_length": config.data.seq_length,
            "global_batch_size": config.data.global_batch_size,
            "data_parallel_size": data_parallel_size(config),
            "max_steps": config.trainer.max_steps,
            "vocab_size": config.model.vocab_size,
        }
        backend = config.backend
        if backend.kind == "native":
            chosen["backend"] = "native"
        elif backend.kind == "nxdt":
            chosen.update(packing=backend.packing, num_records=backend.dev_choose_samples)
    given = ("seq_length", "backend", "packing", "global_batch_size", "data_parallel_size", "max_steps", "vocab_size")
    chosen.update({name: value for name in given if (value := getattr(options, name)) is not None})
    return Recipe(**chosen)


def _show_sft(report: "SftReport") -> None:
    from trainwright.follow import tables

    recipe, tokenizer = report.recipe, report.tokenizer
    reader = "native" if recipe.backend == "native" else f"NxDT, {'with' if recipe.packing else 'without'} packing"
    print(
        f"{report.path}: {report.num_records:,} records; tokenizer {tokenizer.name}, {tokenizer.vocab_size:,} entries; "
        f"{reader}, {recipe.seq_length:,} tokens a sample"
    )
    tables.show(
        [
            {"tokens": name, **{column: number_text(value) for column, value in spread.items()}}
            for name, spread in report.tokens.items()
        ]
    )
    for name, value in _figures(report):
        print(f"{name:<22} {value}")
    for finding in report.findings:
        print(finding)


def _figures(report: "SftReport") -> Iterator[tuple[str, str]]:
    samples = report.native if report.recipe.backend == "native" else report.nxdt
    yield "samples", f"{samples.samples:,}"
    if samples.steps_per_epoch is not None:
        yield "steps an epoch", f"{samples.steps_per_epoch:,} of {report.recipe.global_batch_size:,} samples"
    if samples.epochs is not None:
        yield "epochs", f"{samples.epochs:.2f} in {report.recipe.max_steps:,} steps"
    if report.recipe.backend == "native":
        return
    nxdt = report.nxdt
    if nxdt.lost_samples_per_epoch is not None:
        yield "left out an epoch", f"{nxdt.lost_samples_per_epoch:,} samples that fill no batch"
    yield "records in samples", f"{nxdt.records:,}, {nxdt.records / max(1, nxdt.samples):.1f} a sample"
    for name, tokens in (
        ("prompt tokens", nxdt.prompt_tokens),
        ("separators", nxdt.separator_tokens),
        ("padding tokens", nxdt.padding_tokens),
    ):
        yield name, f"{tokens:,} of {nxdt.tokens:,} ({tokens / max(1, nxdt.tokens):.1%})"


def _show_sample(number: int, sample: Mapping[str, Any], report: "SftReport") -> None:
    import numpy as np

    from trainwright.dataset.sft import IGNORE

    masked = sample["labels"].count(IGNORE)
    length, records = len(sample["labels"]), ", ".join(map(str, sample["records"]))
    print(f"\nsample {number}: {report.unit} {records}; {length:,} tokens, {masked:,} of them with label {IGNORE}")
    text = report.tokenizer.decode(np.array(sample["input_ids"]))
    half = _SHOWN_CHARACTERS // 2
    print(text if len(text) <= _SHOWN_CHARACTERS else f"{text[:half]}\n ... \n{text[-half:]}")
