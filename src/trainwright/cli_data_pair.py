"""`trainwright data inspect` of Megatron data sets, alone and blended."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from trainwright.cli_data_options import Inspected, number_text, reading_shown, tokenizer_of
from trainwright.errors import EXIT_FAILED, UserError

if TYPE_CHECKING:
    from trainwright.config import RunConfig
    from trainwright.dataset.pair_report import PairReport, PairUse
    from trainwright.dataset.tokenizer import Tokenizer

_SHOWN_CHARACTERS = 600  # of a sample's text


def inspect_pairs(
    data_prefix: Sequence[float | str], key: str, options: argparse.Namespace, config: "RunConfig | None"
) -> Inspected:
    """Return what data sets hold. Raises UserError for a blend or splits that are none, and for missing options."""
    from trainwright.dataset.blend import parse_data_prefix
    from trainwright.dataset.indexed import bin_path
    from trainwright.dataset.pair_report import first_samples, inspect_blend

    if options.samples and options.tokenizer is None and config is None:
        raise UserError(f"{key}: --samples shows text: give --tokenizer, or name a run's model=NAME")
    try:
        blend = parse_data_prefix(data_prefix)
    except UserError as error:
        raise UserError(str(error).replace("data.data_prefix", key)) from error
    wants_tokenizer = options.tokenizer is not None or options.samples
    tokenizer = tokenizer_of(options, config) if wants_tokenizer else None
    use = _use(options, config)
    with ExitStack() as bars:
        reports = inspect_blend(
            blend, use, tokenizer, watched=lambda prefix: bars.enter_context(reading_shown(bin_path(prefix)))
        )
    samples: list[list[int]] = []
    if options.samples and not any(report.has_errors for report in reports):
        samples = [sample.tolist() for sample in first_samples(blend, use, options.samples)]

    def show() -> None:
        for number, report in enumerate(reports):
            print(end="\n" if number else "")
            _show(report, is_blended=blend.weights is not None)
        for number, sample in enumerate(samples, 1):
            _show_sample(number, sample, tokenizer, "sequence" if use.seq_length is None else "sample")

    content = {
        "data_prefix": list(data_prefix),
        "pairs": [report.to_dict() for report in reports],
        **({"first_samples": samples} if options.samples else {}),
    }
    is_damaged, has_errors = (any(getattr(one, name) for one in reports) for name in ("is_damaged", "has_errors"))
    code = UserError.exit_code if is_damaged else EXIT_FAILED if has_errors else 0
    return Inspected(content=content, exit_code=code, show=show)


def _use(options: argparse.Namespace, config: "RunConfig | None") -> "PairUse":
    from trainwright.dataset.pair_report import PairUse
    from trainwright.dataset.samples import requested_samples

    chosen: dict[str, Any] = {}
    if config is not None:
        train, validation = requested_samples(
            max_steps=config.trainer.max_steps,
            global_batch_size=config.data.global_batch_size,
            val_check_interval=config.trainer.val_check_interval,
            limit_val_batches=config.trainer.limit_val_batches,
        )
        chosen = {
            "splits_string": config.data.splits_string,
            "seq_length": config.data.seq_length,
            "num_samples": {"train": train, "validation": validation},
            "vocab_size": config.model.vocab_size,
            "seed": config.seed,
        }
    given = {
        "splits_string": options.splits,
        "seq_length": options.seq_length,
        "num_samples": options.num_samples and {"train": options.num_samples},
        "vocab_size": options.vocab_size,
        "seed": options.seed,
    }
    return PairUse(**{**chosen, **{name: value for name, value in given.items() if value is not None}})


def _show(report: "PairReport", *, is_blended: bool) -> None:
    from trainwright.follow import tables

    if not report.is_damaged:
        share = f"{report.share:.1%} of the blend; " if is_blended else ""
        print(
            f"{report.prefix}: {share}{report.num_sequences:,} sequences in {report.num_documents:,} documents, "
            f"{report.num_tokens:,} {report.dtype} tokens ({(report.bin_bytes or 0) / 1e6:.1f} MB) from "
            f"{report.smallest_token:,} to {report.largest_token:,}"
        )
        if report.built is not None:
            print(f"built by trainwright with {report.built['tokenizer']}")
        assert report.lengths is not None
        tables.show([{"tokens": "sequence", **{name: number_text(value) for name, value in report.lengths.items()}}])
        if report.splits is not None:
            tables.show(list(_split_rows(report)))
    for finding in report.findings:
        print(finding)


def _split_rows(report: "PairReport") -> Iterator[dict[str, str]]:
    assert report.splits is not None
    columns = ("sequences", "tokens", "samples_per_epoch", "num_samples", "epochs")
    for name, split in report.splits.items():
        values = [None if split is None else getattr(split, column) for column in columns]
        texts = ["" if value is None else number_text(value) for value in values]
        titles = ("sequences", "tokens", "samples an epoch", "asked for", "epochs")
        yield {"split": name if split is not None else f"{name} (none)", **dict(zip(titles, texts, strict=True))}


def _show_sample(number: int, sample: list[int], tokenizer: "Tokenizer | None", what: str) -> None:
    import numpy as np

    assert tokenizer is not None
    print(f"\n{what} {number}: {len(sample):,} tokens")
    text = tokenizer.decode(np.array(sample))
    half = _SHOWN_CHARACTERS // 2
    print(text if len(text) <= _SHOWN_CHARACTERS else f"{text[:half]}\n ... \n{text[-half:]}")
