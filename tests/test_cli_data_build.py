"""`trainwright data build`, and `data inspect` of what it makes, as a user types them."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Result
from tests.dataset.words import save_words, text
from trainwright.cli import main
from trainwright.cli_data_build import _DOCUMENTS
from trainwright.dataset.indexed import IndexedDataset, IndexedWriter
from trainwright.dataset.text_files import TEXT_MODES

WORDS = ("--tokenizer", "words")


@pytest.fixture
def data(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Return `trainwright data` as a function, run in `tmp_path`, which holds a tokenizer and a text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # as the command sets it, and put back at the end
    save_words(tmp_path / "words")
    lines = [json.dumps({"text": text(4 + number % 3, number)}) for number in range(100)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))

    def run(*arguments: str) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["data", *arguments])
        return Result(int(ended.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def pair(data: Callable[..., Result], tmp_path: Path) -> Path:
    assert data("build", "x.jsonl", "--output", "pair", *WORDS, "--workers", "1").code == 0
    return tmp_path / "pair"


def test_a_build_reports_what_it_made(data: Callable[..., Result], tmp_path: Path) -> None:
    built = data("build", "x.jsonl", "--output", "sub/out", *WORDS, "--workers", "1", "--json")
    assert built.code == 0
    report = json.loads(built.out)
    assert {key: report[key] for key in ("schema_version", "prefix", "documents", "tokens", "dtype", "skipped")} == {
        "schema_version": 1,
        "prefix": "sub/out",
        "documents": 100,
        "tokens": 599,
        "dtype": "uint16",
        "skipped": 0,
    }
    assert report["bytes"] == (tmp_path / "sub" / "out.bin").stat().st_size == 2 * 599
    assert report["seconds"] > 0
    size = (tmp_path / "x.jsonl").stat().st_size / 2**20
    assert built.err.startswith(f"out: {size:.1f} of {size:.1f} MiB, 100 documents, 599 tokens, ")
    again = data("build", "x.jsonl", "--output", "sub/out", *WORDS)
    assert again.code == 0
    assert again.out.splitlines() == [
        "sub/out: 100 documents, 100 sequences, 599 uint16 tokens (0.0 MB)",
        "it was there already, made of the same",
    ]


def test_what_a_user_has_to_mend_is_exit_code_2(data: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "w1"}\n{}\n')
    one = ("--workers", "1", *WORDS)
    bad = data("build", "bad.jsonl", "--output", "bad", *one)
    assert bad.code == 2
    assert bad.err.splitlines()[-2:] == [
        "error: INPUT: a document has a fault; correct or remove what is named, or give --skip-bad to go without",
        "  bad.jsonl line 2: field 'text' is missing",
    ]
    assert not (tmp_path / "bad.idx").exists()
    skipped = data("build", "bad.jsonl", "--output", "bad", *one, "--skip-bad")
    assert skipped.code == 0
    assert "1 documents with faults are left out" in skipped.out
    missing = data("build", "no.jsonl", "x.csv", "--output", "y", *one)
    assert (missing.code, len(missing.err.splitlines())) == (2, 2)
    bucket = data("build", "x.jsonl", "--output", "gs://b/x", *one)
    assert (bucket.code, "copy it to its bucket afterwards" in bucket.err) == (2, True)
    assert "holds no tokenizer.json" in data("build", "x.jsonl", "--output", "y", "--tokenizer", str(tmp_path)).err


def test_the_kinds_of_documents_are_those_that_can_be_read() -> None:
    assert _DOCUMENTS == TEXT_MODES


def test_a_data_set_is_told_of_with_its_splits_and_samples(data: Callable[..., Result], pair: Path) -> None:
    use = ("--splits", "90,9,1", "--seq-length", "16", "--num-samples", "100", "--vocab-size", "100", *WORDS)
    shown = data("inspect", "pair", *use, "--samples", "1")
    assert shown.code == 0
    assert shown.out.splitlines()[0] == "pair: 100 sequences in 100 documents, 599 uint16 tokens (0.0 MB) from 2 to 99"
    assert shown.out.splitlines()[1].startswith("built by trainwright with huggingface:")
    assert shown.out.splitlines()[2:8] == [
        "tokens    min  p50  p90  p99  max  mean  sum",
        "sequence  5    6    7    7    7    6.0   599",
        "split       sequences  tokens  samples an epoch  asked for  epochs",
        "train       90         540     33                100        3",
        "validation  9          54      3",
        "test        1          5       0",
    ]
    assert shown.out.splitlines()[8] == (
        "warning [short-split] test has 5 tokens of pair, fewer than the 17 of one sample, which then repeats them; "
        "give that split a larger weight"
    )
    assert shown.out.splitlines()[10] == "sample 1: 17 tokens"
    found = json.loads(data("inspect", "pair.idx", *use, "--samples", "2", "--json").out)["files"][0]
    assert (found["data_prefix"], found["pairs"][0]["num_tokens"]) == (["pair"], 599)
    assert [len(sample) for sample in found["first_samples"]] == [17, 17]


def test_an_empty_split_is_an_error(data: Callable[..., Result], pair: Path) -> None:
    found = data("inspect", "pair", "--splits", "999,1")
    assert found.code == 1
    assert found.out.splitlines()[-1] == (
        "error [empty-split] data.splits_string='999,1' leaves no sequence for validation: the 100 sequences of "
        "pair.idx become train 100, validation 0, test 0; give a larger weight, or weight 0 to go without that split"
    )


def test_a_blend_is_told_of_with_what_is_drawn_of_each(data: Callable[..., Result], pair: Path) -> None:
    use = ("--splits", "90,10", "--seq-length", "16", "--num-samples", "1000", "--json")
    found = json.loads(data("inspect", "3", "pair", "1", "pair", *use).out)["files"][0]
    assert [one["share"] for one in found["pairs"]] == [0.75, 0.25]
    assert [one["splits"]["train"]["num_samples"] for one in found["pairs"]] == [754, 252]
    assert [one["splits"]["train"]["epochs"] for one in found["pairs"]] == [23, 8]
    wrong = data("inspect", "3", "pair", "pair")
    assert wrong.code == 2
    assert wrong.err.startswith("error: PREFIX has 3 elements, neither one path nor pairs of weight and path")


def test_a_run_brings_its_data_sets_and_what_it_asks_of_them(data: Callable[..., Result], pair: Path) -> None:
    run = ("model=llama_tiny", "data.text=null", "data.data_prefix=[pair]", "trainer.max_steps=10", "~local")
    found = json.loads(data("inspect", *run, "model.vocab_size=96", "--json").out)["files"][0]["pairs"][0]
    assert found["splits"]["train"]["num_samples"] == 10 * 8
    assert found["splits"]["test"] is None
    assert [one["id"] for one in found["findings"] if one["severity"] == "error"] == ["vocabulary"]
    site = data("inspect", "model=gpt_small", "hardware=t4", "data.data_prefix=['/fsx/<site.x>']", "~local")
    assert (site.code, "needs a fact of the site" in site.err) == (2, True)


def test_the_wrong_tokenizer_is_an_error_and_ends_that_lack_are_a_warning(
    data: Callable[..., Result], pair: Path, tmp_path: Path
) -> None:
    other = str(save_words(tmp_path / "other", num_words=98))
    found = data("inspect", "pair", "--tokenizer", other)
    assert (found.code, "error [tokenizer] pair was built with huggingface:" in found.out) == (1, True)
    with IndexedWriter(tmp_path / "alien", np.dtype(np.int32)) as writer:
        for sequence in ([5, 2], [], [5, 6], [-1, 2]):
            writer.add_sequence(np.array(sequence))
            writer.end_document()
    alien = data("inspect", "alien", *WORDS)
    assert alien.code == 1
    assert [line.split("]")[0] for line in alien.out.splitlines()[3:]] == [
        "error [vocabulary",
        "warning [empty-sequences",
        "warning [no-end",
    ]
    assert "1 of 4 documents of alien do not end with the end-of-document token 2" in alien.out


@pytest.mark.parametrize(
    ("ending", "damage", "told"),
    [
        ("bin", lambda content: content[:-2], "it has 1196 bytes, but pair.idx describes 1198"),
        ("idx", lambda content: content[:-8], "but 100 sequences and 101 bounds take"),
        ("idx", lambda content: content[:-8] + bytes(8), "its documents do not end at its 100 sequences"),
        (
            "idx",
            lambda content: content[:434] + (1 << 40).to_bytes(8, "little") + content[442:],
            "1 sequences do not begin where the one before ends; the first is 0, at byte 1,099,511,627,776 of 1,198",
        ),
        ("idx", lambda content: content[:1250] + b"\xff" + content[1251:], "document bounds do not rise from 0 to 100"),
    ],
)
def test_damage_of_files_is_exit_code_2(
    data: Callable[..., Result], pair: Path, ending: str, damage: Callable[[bytes], bytes], told: str
) -> None:
    path = pair.with_name(f"pair.{ending}")
    path.write_bytes(damage(path.read_bytes()))
    found = data("inspect", "pair")
    assert found.code == 2
    assert found.out.startswith("error [damaged] ")
    assert told in found.out
    (one,) = json.loads(data("inspect", "pair", "--json").out)["files"][0]["pairs"]
    assert (one["is_damaged"], one["num_tokens"]) == (True, None)


def test_sequences_are_shown_without_a_length(data: Callable[..., Result], pair: Path) -> None:
    shown = data("inspect", "pair", "--samples", "1", *WORDS)
    assert shown.out.splitlines()[-2:] == ["sequence 1: 5 tokens", "w0 w1 w2 w3 </s>"]
    assert IndexedDataset(pair)[0].tolist() == [3, 4, 5, 6, 2]
    assert "give --tokenizer" in data("inspect", "pair", "--samples", "1").err
