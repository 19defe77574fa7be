"""What `data inspect` finds in instruction data, counted by hand."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.dataset.words import text, words, write_lengths, write_records
from trainwright.dataset.sft_epoch import Recipe
from trainwright.dataset.sft_report import SftReport, inspect_sft


def inspect(path: Path, recipe: Recipe) -> SftReport:
    return inspect_sft(path, words(path.parent / "words"), recipe, key="FILE")


def told(report: SftReport) -> dict[str, str]:
    return {finding.id: str(finding) for finding in report.findings}


def test_the_samples_of_packing_are_counted(tmp_path: Path) -> None:
    path = write_lengths(tmp_path / "x.jsonl", [4, 4, 10, 11, 5, 8])
    report = inspect(path, Recipe(seq_length=10, global_batch_size=2, max_steps=3))
    # Samples: records 1 and 2 (4 + 1 + 4 + 1), none of 3 and 4, record 5 (5 + 1), record 6 (8 + 1).
    assert asdict(report.nxdt) == {
        "samples": 3,
        "tokens": 30,
        "steps_per_epoch": 1,
        "epochs": 3.0,
        "records": 4,
        "samples_of_several_records": 1,
        "padding_tokens": 0 + 4 + 1,
        "separator_tokens": 4,
        "prompt_tokens": 8,
        "dropped_records": 2,
        "dropped_tokens": 21,
        "exact_length_records": 1,
        "failing_samples": 0,
        "lost_samples_per_epoch": 1,
    }
    assert asdict(report.native) == {"samples": 4, "tokens": 40, "steps_per_epoch": 2, "epochs": 1.5}
    assert report.tokens["record"] == {"min": 4, "p50": 5, "p90": 11, "p99": 11, "max": 11, "mean": 7.0, "sum": 42}
    assert report.tokens["input"]["sum"] == 6
    assert report.tokens["output"]["max"] == 8
    found = told(report)
    assert list(found) == ["dropped", "prompt-trained", "cross-record", "masked-in-loss"]
    assert found["dropped"] == (
        "error [dropped] 2 records (lines 3, 4) with 10 tokens or more, 1 of them of just that many: NxDT drops what "
        "is that long without a word (21 tokens, 50.0% of the file); shorten or split them, or use data.seq_length=12 "
        "or more"
    )
    assert "8 tokens of 30 (26.7%) are of prompts" in found["prompt-trained"]
    assert "1 of 3 samples hold several records" in found["cross-record"]
    assert "9 tokens of 30 (30.0%) are masked with label -100, but" in found["masked-in-loss"]


def test_the_samples_of_padding_are_counted(tmp_path: Path) -> None:
    path = write_lengths(tmp_path / "x.jsonl", [4, 10, 11, 5])
    report = inspect(path, Recipe(seq_length=10, packing=False, global_batch_size=4))
    nxdt = report.nxdt
    assert (nxdt.samples, nxdt.failing_samples, nxdt.records, nxdt.steps_per_epoch) == (4, 2, 2, 1)
    assert (nxdt.tokens, nxdt.padding_tokens, nxdt.prompt_tokens, nxdt.exact_length_records) == (20, 11, 4, 1)
    found = told(report)
    assert list(found) == ["too-long", "masked-in-loss"]
    assert "2 records (lines 2, 3) with 10 tokens or more" in found["too-long"]
    assert "15 tokens of 20 (75.0%) are masked with label -100" in found["masked-in-loss"]


def test_what_each_record_is_worth_a_word_for(tmp_path: Path) -> None:
    path = write_records(
        tmp_path / "x.jsonl",
        [("w1", "w2"), ("", "w3"), ("w4", " \t"), ("w5 </s>", "w6"), ("w1", "w2"), ("w1", "w2"), ("w7", "w90")],
    )
    report = inspect(path, Recipe(seq_length=10, vocab_size=93))
    found = told(report)
    assert next(iter(found)) == "vocabulary"
    assert "1 record (line 7) with a token of 93 or above, up to 93, where the model has 93" in found["vocabulary"]
    assert "model.vocab_size=94 or more" in found["vocabulary"]
    assert "1 record (line 2) with an input that becomes no token" in found["no-prompt"]
    assert "1 record (line 3) with an output that becomes no token" in found["no-tokens"]
    assert "1 record (line 4) with a text that spells" in found["special-token"]
    assert "2 records (lines 5, 6) that repeat an earlier one" in found["duplicate"]
    assert report.has_errors


def test_too_few_samples_for_a_batch_is_an_error(tmp_path: Path) -> None:
    path = write_lengths(tmp_path / "x.jsonl", [5, 5, 5])
    report = inspect(path, Recipe(seq_length=10, global_batch_size=4, data_parallel_size=2, max_steps=1))
    assert report.nxdt.epochs is None
    assert "3 samples fill no batch of 4 over 2 data parallel ranks" in told(report)["no-batch"]


def test_a_choice_of_more_records_than_there_are_is_an_error(tmp_path: Path) -> None:
    path = write_lengths(tmp_path / "x.jsonl", [5, 5, 20])
    assert inspect(path, Recipe(seq_length=10, num_records=2)).num_records == 2
    too_few = inspect(path, Recipe(seq_length=30, num_records=4))
    assert "backend.dev_choose_samples=4 is more than the 3 records" in told(too_few)["too-few"]


def test_the_native_backend_drops_and_masks_nothing(tmp_path: Path) -> None:
    path = write_lengths(tmp_path / "x.jsonl", [5, 50, 20])
    report = inspect(path, Recipe(seq_length=10, backend="native", global_batch_size=400))
    assert report.findings == ()
    assert report.native.samples == 7


def test_a_fault_free_file_of_one_long_prompt_has_no_error(tmp_path: Path) -> None:
    path = write_records(tmp_path / "x.jsonl", [(text(20), "w1")])
    report = inspect(path, Recipe(seq_length=24))
    assert not report.has_errors
    assert report.nxdt.padding_tokens == 0
    assert json.loads(json.dumps(report.to_dict()))["nxdt"]["prompt_tokens"] == 21


@pytest.mark.parametrize("packing", [True, False])
def test_a_file_of_which_nothing_can_be_trained_on_is_told_of(tmp_path: Path, packing: bool) -> None:
    path = write_lengths(tmp_path / "x.jsonl", [10, 12])
    report = inspect(path, Recipe(seq_length=10, packing=packing))
    assert (report.nxdt.tokens, report.has_errors) == (0, True)
