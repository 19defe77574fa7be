"""Files of text become a pair: the same bytes however many processes, stops and starts it takes."""

import gzip
import json
import lzma
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.dataset.words import EOS, FIRST_WORD, save_words, text
from trainwright import storage
from trainwright.dataset.build import build_text
from trainwright.dataset.build_prefix import BuiltPair, build_prefix
from trainwright.dataset.documents import documents_of
from trainwright.dataset.indexed import IndexedDataset
from trainwright.dataset.part_run import BuildProgress
from trainwright.dataset.parts import PairRecipe
from trainwright.dataset.text_files import Mode, find_text_files, read_pieces
from trainwright.dataset.tokenizer import load_tokenizer
from trainwright.errors import RunFailedError, UserError
from trainwright.node.commit import verify

PIECE_BYTES = 2000

# Builds in a process of its own, and kills itself, as SIGKILL from outside would, when some parts are done.
KILLED = """
import os, sys
from pathlib import Path
from trainwright.dataset.build_prefix import build_prefix
from trainwright.dataset.parts import PairRecipe
from trainwright.dataset.text_files import find_text_files

def main():
    files, words, output, workers, parts = sys.argv[1].split(","), *sys.argv[2:]
    build_prefix(
        find_text_files(files, "file"),
        Path(output),
        PairRecipe(tokenizer_type="huggingface", tokenizer_name=words),
        workers=int(workers), skip_bad=False, overwrite=False, piece_bytes=2000,
        on_progress=lambda done: done.parts == int(parts) and os.kill(os.getpid(), 9),
    )

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_words(tmp_path_factory.mktemp("tokenizer") / "words")


@pytest.fixture
def build(tmp_path: Path, words: Path) -> Callable[..., BuiltPair]:
    """Return a function that builds `tmp_path`/NAME from files, with the tokenizer of words and small pieces."""

    def run(files: Sequence[Path], name: str = "out", *, mode: Mode = "file", **changed: Any) -> BuiltPair:
        recipe = {"tokenizer_type": "huggingface", "tokenizer_name": str(words)}
        recipe.update(
            {key: changed.pop(key) for key in ("json_key", "append_eod", "sequence_tokens") if key in changed}
        )
        fixed = {"workers": 1, "skip_bad": False, "overwrite": False, "piece_bytes": PIECE_BYTES}
        return build_prefix(
            find_text_files([str(path) for path in files], mode),
            tmp_path / name,
            PairRecipe(**recipe),  # type: ignore[arg-type]
            **{"on_progress": lambda _: None, **fixed, **changed},
        )

    return run


def write_jsonl(path: Path, num_documents: int, start: int = 0) -> Path:
    lines = [
        json.dumps({"text": text(1 + number % 20, number), "id": number}) for number in range(start, num_documents)
    ]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def bytes_of(prefix: Path) -> list[bytes]:
    return [prefix.with_name(f"{prefix.name}.{ending}").read_bytes() for ending in ("bin", "idx")]


def documents(prefix: Path) -> list[list[int]]:
    dataset = IndexedDataset(prefix)
    bounds = dataset.document_indices.tolist()
    return [dataset.span(first, stop).tolist() for first, stop in pairwise(bounds)]


def ids(*numbers: int) -> list[int]:
    return [*(FIRST_WORD + number for number in numbers), EOS]


def test_each_line_of_jsonl_is_a_document_that_ends_with_its_token(tmp_path: Path, build: Callable[..., Any]) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "w1 w2"}\n\n{"text": ""}\n{"id": 3, "text": "w3"}')
    built = build([tmp_path / "x.jsonl"])
    assert documents(tmp_path / "out") == [ids(1, 2), ids(3)]
    assert (built.documents, built.sequences, built.tokens, built.empty, built.skipped) == (2, 2, 5, 1, 0)
    assert (built.dtype, built.bytes, built.vocab_size) == ("uint16", 10, 100)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.bin", "out.bin.commit.json", "out.idx", "x.jsonl"]
    assert verify(tmp_path / "out.bin") == []


def test_options_change_what_is_stored(tmp_path: Path, build: Callable[..., Any]) -> None:
    (tmp_path / "x.jsonl").write_text('{"body": "w1 w2 w3 w4 w5"}\n{"body": "w6"}\n')
    build([tmp_path / "x.jsonl"], json_key="body", append_eod=False)
    assert documents(tmp_path / "out") == [ids(1, 2, 3, 4, 5)[:-1], ids(6)[:-1]]
    built = build([tmp_path / "x.jsonl"], "cut", json_key="body", sequence_tokens=4)
    assert built.sequences == 3
    assert IndexedDataset(tmp_path / "cut").sequence_lengths.tolist() == [4, 2, 2]
    assert documents(tmp_path / "cut") == [ids(1, 2, 3, 4, 5), ids(6)]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("file", [ids(1, 2, 3, 4, 5)]),
        ("line", [ids(1), ids(2), ids(3), ids(4), ids(5)]),
        ("blank-line", [ids(1, 2), ids(3, 4, 5)]),
        ("form-feed", [ids(1, 2, 3, 4), ids(5)]),
    ],
)
def test_what_a_document_of_a_text_is(
    tmp_path: Path, build: Callable[..., Any], mode: Mode, expected: list[list[int]]
) -> None:
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbfw1\r\nw2\n \t\n\nw3\nw4\n\fw5\n\f\n")
    build([tmp_path / "x.txt"], mode=mode)
    assert documents(tmp_path / "out") == expected


@pytest.mark.parametrize("mode", ["line", "blank-line", "form-feed"])
@pytest.mark.parametrize("piece_bytes", [1, 7, 50, 10_000])
def test_wherever_pieces_end_the_documents_are_the_same(tmp_path: Path, mode: Mode, piece_bytes: int) -> None:
    random = np.random.RandomState(piece_bytes)
    content = "".join(random.choice(["w", "\u3042", " ", "\n", "\n\n", " \n", "\f", "\r\n"], 400))
    (tmp_path / "x.txt").write_bytes(content.encode())
    files = find_text_files([str(tmp_path / "x.txt")], mode)
    whole, *more = read_pieces(files, 1 << 20)
    assert not more
    pieces = list(read_pieces(files, piece_bytes))
    assert b"".join(segment.content for piece in pieces for segment in piece.segments) == content.encode()
    assert sum(piece.read_bytes for piece in pieces) == len(content.encode())
    told = [document for piece in pieces for one in piece.segments for document in documents_of(one, "text")]
    assert told == list(documents_of(whole.segments[0], "text"))


def test_small_files_share_pieces_and_a_large_ones_are_its_own(tmp_path: Path) -> None:
    sizes = [10, 20, 900, 30, 40, 50]
    for number, size in enumerate(sizes):
        (tmp_path / f"{number}.txt").write_text("w1 w\n" * (size // 5))
    files = find_text_files([str(tmp_path / f"{number}.txt") for number in range(len(sizes))], "line")
    pieces = [[Path(segment.path).stem for segment in piece.segments] for piece in read_pieces(files, 100)]
    assert pieces == [["0", "1"], *[["2"]] * 9, ["3", "4", "5"]]


def test_the_bytes_are_the_same_however_many_processes_and_however_it_is_packed(
    tmp_path: Path, build: Callable[..., Any]
) -> None:
    plain = write_jsonl(tmp_path / "x.jsonl", 300)
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (tmp_path / "x.jsonl.xz").write_bytes(lzma.compress(plain.read_bytes()))
    one = build([plain, plain])
    assert (one.parts, one.parts_found) == (one.parts, 0)
    assert one.parts > 10
    assert build([tmp_path / "x.jsonl.gz", tmp_path / "x.jsonl.xz"], "packed", workers=2) == one
    assert bytes_of(tmp_path / "packed") == bytes_of(tmp_path / "out")
    assert documents(tmp_path / "out")[299:301] == [ids(*((299 + i) % 97 for i in range(20))), ids(0)]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_build_goes_on_to_the_same_bytes(
    tmp_path: Path, build: Callable[..., Any], words: Path, workers: int
) -> None:
    files = [write_jsonl(tmp_path / "x.jsonl", 300), write_jsonl(tmp_path / "y.jsonl", 400, 300)]
    whole = build(files, "whole")
    command = [sys.executable, "-c", KILLED, ",".join(map(str, files)), str(words), str(tmp_path / "out")]
    if workers == 2:  # a process of its own imports the program anew, so that must be a file
        (tmp_path / "killed.py").write_text(KILLED)
        command[1:3] = [str(tmp_path / "killed.py")]
    for parts in (3, 7):
        # Its pipes end with the last process that has them, so this waits for the tokenizing ones to end, too.
        killed = subprocess.run([*command, str(workers), str(parts)], check=False, capture_output=True, timeout=120)
        assert killed.returncode == -signal.SIGKILL
        assert not (tmp_path / "out.bin").exists()
        assert not (tmp_path / "out.idx").exists()
    built = build(files)
    assert 7 <= built.parts_found < built.parts
    assert bytes_of(tmp_path / "out") == bytes_of(tmp_path / "whole")
    assert built.crc32 == whole.crc32
    assert not (tmp_path / "out.building").exists()


def test_a_process_that_is_killed_ends_the_build_and_what_is_done_counts(
    tmp_path: Path, build: Callable[..., Any]
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", 300)

    def kill_one(done: BuildProgress) -> None:
        if done.parts == 3:
            os.kill(next(one.pid for one in multiprocessing.active_children() if one.pid is not None), signal.SIGKILL)

    with pytest.raises(RunFailedError, match="was killed, perhaps for want of memory; start again with fewer"):
        build([path], workers=2, on_progress=kill_one)
    assert build([path]).parts_found >= 3


def test_an_interrupted_build_ends_its_processes(tmp_path: Path, build: Callable[..., Any]) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", 300)

    def interrupt(done: BuildProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build([path], workers=2, on_progress=interrupt)
    assert multiprocessing.active_children() == []
    assert build([path]).parts_found >= 1


def test_parts_of_other_options_or_a_changed_file_are_not_taken(tmp_path: Path, build: Callable[..., Any]) -> None:
    files = [write_jsonl(tmp_path / "x.jsonl", 300), write_jsonl(tmp_path / "y.jsonl", 500, 300)]

    class StopError(Exception):
        pass

    def stop(done: BuildProgress) -> None:
        if done.read_bytes == done.total_bytes:
            raise StopError

    with pytest.raises(StopError):
        build(files, on_progress=stop)
    content = files[0].read_text()
    files[0].write_text(content.replace('"id": 250', '"id": 251'))
    seen: list[BuildProgress] = []
    built = build(files, on_progress=seen.append)
    assert built.parts - built.parts_found == 1, "the part of the line that changed"
    assert seen[-1].counts.tokens == built.tokens
    with pytest.raises(StopError):
        build(files, "other", on_progress=stop)
    assert build(files, "other", append_eod=False).parts_found == 0


def test_a_pair_that_is_there_is_found_if_it_is_the_same(tmp_path: Path, build: Callable[..., Any]) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", 100)
    first = build([path])
    before = (tmp_path / "out.idx").stat().st_mtime_ns
    again = build([path])
    assert (again.was_there, again.crc32, (tmp_path / "out.idx").stat().st_mtime_ns) == (True, first.crc32, before)
    with pytest.raises(UserError, match=r"another pair is there already; .* give --overwrite"):
        build([path], append_eod=False)
    built = build([path], append_eod=False, overwrite=True)
    assert built.tokens == first.tokens - 100
    assert verify(tmp_path / "out.bin") == []
    (tmp_path / "alien.bin").write_text("no pair of ours")
    with pytest.raises(UserError, match=r"alien\.bin is there already"):
        build([path], "alien")


def test_faults_are_told_all_at_once_with_file_and_line(tmp_path: Path, build: Callable[..., Any]) -> None:
    good = json.dumps({"text": text(15)})
    lines = [good] * 60
    for number, bad in enumerate(
        [b"{", b"[1]", b'{"txt": ""}', b'{"text": 7}', b'{"text": null}', b'{"text": "\xff"}', b'{"text": "\\ud800"}']
    ):
        lines[number * 9] = bad.decode("latin1")
    (tmp_path / "x.jsonl").write_bytes("\n".join(lines).encode("latin1"))
    (tmp_path / "y.txt").write_bytes(b"w1\nw2\xfe\n")
    files = [tmp_path / "x.jsonl", tmp_path / "y.txt"]
    with pytest.raises(UserError) as caught:
        build(files, mode="line")
    told = str(caught.value).splitlines()
    assert told[0].startswith("INPUT: 8 documents have faults; correct or remove what is named, or give --skip-bad")
    x, y = files
    assert told[1:] == [
        f"  {x} line 1: is not JSON: Expecting property name enclosed in double quotes, at column 2",
        f"  {x} line 10: is a list, not an object with the field 'text'",
        f"  {x} line 19: field 'text' is missing",
        f"  {x} line 28: field 'text' is a number, not a text",
        f"  {x} line 37: field 'text' is null, not a text",
        f"  {x} line 46: is not UTF-8: invalid start byte at byte 10 of it",
        f"  {x} line 55: field 'text' holds half a character (a lone surrogate)",
        f"  {y} line 2: is not UTF-8: invalid start byte at byte 2 of it",
    ]
    built = build(files, mode="line", skip_bad=True)
    assert (built.skipped, built.documents) == (8, 54)


def test_of_many_faults_the_first_are_shown_also_from_several_processes(
    tmp_path: Path, build: Callable[..., Any]
) -> None:
    (tmp_path / "x.jsonl").write_text("no JSON in this line\n" * 500)
    with pytest.raises(UserError) as caught:
        build([tmp_path / "x.jsonl"], workers=2)
    told = str(caught.value).splitlines()
    assert told[0].startswith("INPUT: 500 documents have faults")
    assert [line.split(":")[0].split()[-1] for line in told[1:-1]] == [str(number) for number in range(1, 21)]
    assert told[-1] == "  ... and 480 more"
    with pytest.raises(UserError, match="hold no document with any text"):
        build([tmp_path / "x.jsonl"], skip_bad=True)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("x.jsonl", None, "x.jsonl does not exist"),
        ("x.parquet", b"PAR1", "neither jsonl nor text by its name; rename it to end in one of .jsonl"),
        ("x.txt.zst", b"", "only Python 3.14 and later reads .zst; run `zstd -d"),
        ("x.txt.gz", gzip.compress(b"cut short")[:-4], "x.txt.gz cannot be read"),
        ("x.txt.xz", b"no xz", "x.txt.xz cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, build: Callable[..., Any], name: str, content: bytes | None, reason: str
) -> None:
    if name.endswith(".zst") and sys.version_info >= (3, 14):
        pytest.skip("this Python reads .zst")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        build([tmp_path / name])
    assert reason in str(caught.value)


def test_a_second_build_of_the_same_prefix_is_refused(tmp_path: Path, build: Callable[..., Any]) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", 100)
    refused: list[str] = []

    def second(_: BuildProgress) -> None:
        if not refused:
            with pytest.raises(UserError) as caught:
                build([path])
            refused.append(str(caught.value))

    build([path], on_progress=second)
    assert "another process is building in" in refused[0]


def test_a_disk_that_is_full_is_told_and_what_is_done_counts(
    tmp_path: Path, build: Callable[..., Any], words: Path
) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", 300)
    # The limit makes the system refuse the write, as a full disk does; the joined pair is larger than any part.
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))\n{KILLED}"
    command = [sys.executable, "-c", limited, str(path), str(words), str(tmp_path / "out"), "1", "999"]
    failed = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"})
    assert "cannot write: File too large; what is done so far stays" in failed.stderr
    assert not (tmp_path / "out.idx").exists()
    built = build([path])
    assert built.parts_found == built.parts


def test_files_are_read_from_where_fsspec_reaches(tmp_path: Path, build: Callable[..., Any], words: Path) -> None:
    content = write_jsonl(tmp_path / "x.jsonl", 300).read_bytes()
    storage.write_all({storage.at("memory://build/x.jsonl.gz"): gzip.compress(content)})
    recipe = PairRecipe(tokenizer_type="huggingface", tokenizer_name=str(words))
    options: dict[str, Any] = {"workers": 1, "skip_bad": False, "overwrite": False, "piece_bytes": PIECE_BYTES}
    files = find_text_files(["memory://build/x.jsonl.gz"], "file")
    build_prefix(files, tmp_path / "far", recipe, on_progress=lambda _: None, **options)
    build([tmp_path / "x.jsonl"])
    assert bytes_of(tmp_path / "far") == bytes_of(tmp_path / "out")


def test_it_stores_the_tokens_that_the_build_of_a_runs_text_stores(tmp_path: Path) -> None:
    play = "KING.\nNow is the winter of our discontent\nMade glorious summer 's sun,\n\n"
    (tmp_path / "x.txt").write_text(f"{play * 300}\f{play * 2}")
    ours = build_text(str(tmp_path / "x.txt"), load_tokenizer("gpt2_bpe"), tmp_path / "cache", lambda _: None)
    options: dict[str, Any] = {"workers": 1, "skip_bad": False, "overwrite": False, "on_progress": lambda _: None}
    recipe = PairRecipe(tokenizer_type="gpt2_bpe", tokenizer_name=None)
    build_prefix(find_text_files([str(tmp_path / "x.txt")], "form-feed"), tmp_path / "out", recipe, **options)
    assert documents(ours) == documents(tmp_path / "out")
