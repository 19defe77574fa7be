"""A text becomes a data set once, whole or not at all."""

import gzip
import lzma
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trainwright import places
from trainwright.dataset.build import build_text, shuffle_tokens
from trainwright.dataset.indexed import IndexedDataset
from trainwright.dataset.tokenizer import Tokenizer, load_tokenizer
from trainwright.errors import UserError

PARAGRAPH = "KING.\nNow is the winter of our discontent\nMade glorious summer 's sun,\n\n"

BUILD = """
import pathlib, sys
from trainwright.errors import UserError
from trainwright.dataset import build, tokenizer
try:
    bpe = tokenizer.load_tokenizer("gpt2_bpe")
    print(build.build_text(sys.argv[1], bpe, pathlib.Path(sys.argv[2]), lambda line: None))
except UserError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("gpt2_bpe")


@pytest.fixture(scope="module")
def shakespeare(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    return build_text("shakespeare", tokenizer, tmp_path_factory.mktemp("cache"), lambda line: None)


def build(text: Path, cache_dir: Path) -> Path:
    return build_text(str(text), load_tokenizer("gpt2_bpe"), cache_dir, lambda line: None)


def test_the_shipped_text_is_37_plays_in_sequences_fine_enough_to_split(shakespeare: Path) -> None:
    dataset = IndexedDataset(shakespeare)
    assert dataset.num_tokens == 1_504_656
    assert len(dataset.document_indices) - 1 == 37
    assert 1000 < dataset.sequence_lengths.min() <= dataset.sequence_lengths.max() < 4000


def test_the_shipped_text_is_free_of_the_notices_of_its_collection() -> None:
    path = places.corpus("shakespeare")
    assert path is not None
    assert path.stat().st_size < 2_000_000
    text = lzma.decompress(path.read_bytes()).decode("ascii")
    notices = r"gutenberg|\be-?texts?\b|copyright|public domain|http|[\r\t]| \n|\n\n\n"
    assert re.findall(notices, text, re.IGNORECASE) == []
    assert [play.splitlines()[0] for play in text.split("\f")][::36] == [
        "ALL'S WELL THAT ENDS WELL",
        "THE WINTER'S TALE",
    ]


def test_cutting_into_sequences_changes_no_token_of_a_document(shakespeare: Path, tokenizer: Tokenizer) -> None:
    path = places.corpus("shakespeare")
    assert path is not None
    plays = lzma.decompress(path.read_bytes()).decode("ascii").split("\f")
    whole = np.concatenate([np.append(tokens, tokenizer.eod) for tokens in tokenizer.encode(plays)])
    np.testing.assert_array_equal(IndexedDataset(shakespeare).tokens, whole)


@pytest.mark.parametrize(
    "document",
    [
        PARAGRAPH * 400,
        "one line after the other, never a blank one\n" * 1000,
        "no line ends here but there are blanks " * 1000,
        "a run of blanks    before    every word " * 1000,
        "tabs\tand   \n \n  blanks in\n\n   odd places 's\n\n\n\nhere\n" * 800,
        "\u65e5\u672c\u8a9e\u306e\u6587\u3002\n\n" * 3000,
    ],
)
def test_documents_of_any_form_keep_their_tokens(tmp_path: Path, tokenizer: Tokenizer, document: str) -> None:
    (tmp_path / "x.txt").write_text(document, encoding="utf-8")
    dataset = IndexedDataset(build(tmp_path / "x.txt", tmp_path / "cache"))
    (whole,) = tokenizer.encode([document])
    assert len(dataset) > 1
    np.testing.assert_array_equal(dataset.tokens, np.append(whole, tokenizer.eod))


def test_a_text_without_any_blank_is_kept_too(tmp_path: Path, tokenizer: Tokenizer) -> None:
    document = "x1" * 30_000
    (tmp_path / "x.txt").write_text(document)
    dataset = IndexedDataset(build(tmp_path / "x.txt", tmp_path / "cache"))
    assert tokenizer.decode(dataset.tokens[:-1]) == document


def test_each_document_ends_with_the_end_of_document_token(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "x.txt").write_text(f"first\n\f\n\fsecond\n{PARAGRAPH * 200}\fthird")
    dataset = IndexedDataset(build(tmp_path / "x.txt", tmp_path / "cache"))
    bounds = dataset.document_indices.tolist()
    assert len(bounds) - 1 == 3, "the blank document is left out"
    assert [dataset[bound - 1][-1] for bound in bounds[1:]] == [tokenizer.eod] * 3
    assert (dataset.tokens == tokenizer.eod).sum() == 3


def test_the_same_text_is_built_once_however_it_is_packed(tmp_path: Path) -> None:
    content = (PARAGRAPH * 50).encode()
    (tmp_path / "x.txt").write_bytes(content)
    (tmp_path / "x.txt.gz").write_bytes(gzip.compress(content))
    (tmp_path / "x.txt.xz").write_bytes(lzma.compress(content))
    prefixes = {build(tmp_path / name, tmp_path / "cache") for name in ("x.txt", "x.txt.gz", "x.txt.xz")}
    (prefix,) = prefixes
    assert prefix.parent.parent.name.startswith("x-gpt2_bpe-")


def test_a_changed_text_gets_a_data_set_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("one")
    one = build(tmp_path / "x.txt", tmp_path / "cache")
    (tmp_path / "x.txt").write_text("two")
    assert build(tmp_path / "x.txt", tmp_path / "cache").parent.parent != one.parent.parent


def test_two_processes_build_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILD, "shakespeare", str(tmp_path)]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    prefixes = [Path(builder.communicate()[0].strip()) for builder in builders]
    assert [builder.returncode for builder in builders] == [0, 0]
    np.testing.assert_array_equal(IndexedDataset(prefixes[0]).tokens, IndexedDataset(prefixes[1]).tokens)


def test_shuffled_tokens_keep_each_splits_counts_and_every_length(shakespeare: Path, tmp_path: Path) -> None:
    plain, shuffled = IndexedDataset(shakespeare), IndexedDataset(shuffle_tokens(shakespeare, "95,5,0", 1, tmp_path))
    np.testing.assert_array_equal(plain.sequence_lengths, shuffled.sequence_lengths)
    np.testing.assert_array_equal(plain.document_indices, shuffled.document_indices)
    edge = round(0.95 * len(plain))
    for span in ((0, edge), (edge, len(plain))):
        np.testing.assert_array_equal(np.bincount(plain.span(*span)), np.bincount(shuffled.span(*span)))
    assert (plain.tokens == shuffled.tokens).mean() < 0.1
    assert shuffle_tokens(shakespeare, "95,5,0", 1, tmp_path) == shuffled.prefix
    assert shuffle_tokens(shakespeare, "95,5,0", 2, tmp_path) != shuffled.prefix


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("x.txt", None, "neither a file nor a text shipped with trainwright (shakespeare)"),
        ("x.txt", b" \n\f \n", "holds no text"),
        ("x.txt", b"", "holds no text"),
        ("x.txt", b"good\xff\xfebad", "is not UTF-8: invalid start byte at byte 4"),
        ("x.txt.gz", b"no gzip", "cannot be read"),
        ("x.txt.gz", gzip.compress(b"cut short")[:-4], "cannot be read"),
        ("x.txt.gz", gzip.compress(b"damaged")[:10] + b"\xff" * 20, "cannot be read"),
        ("x.txt.xz", lzma.compress(b"cut short")[:-4], "cannot be read"),
    ],
)
def test_a_text_that_cannot_be_used_is_refused(tmp_path: Path, name: str, content: bytes | None, reason: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        build(tmp_path / name, tmp_path / "cache")
    assert "data.text" in str(error.value)
    assert reason in str(error.value)
    assert not (tmp_path / "cache").exists()


def test_a_full_disk_is_told_by_key_and_leaves_nothing(tmp_path: Path) -> None:
    # The limit makes the system refuse the write, as a full disk does, without a disk of our own to fill.
    result = subprocess.run(
        [sys.executable, "-c", BUILD, "shakespeare", str(tmp_path / "cache")],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
    )
    assert "data.cache_dir: cannot write" in result.stdout
    assert "File too large" in result.stdout
    assert list((tmp_path / "cache").iterdir()) == []
