"""Files of instruction data: records, faults with their lines, tokens."""

import json
from pathlib import Path

import pytest

from tests.dataset.words import BOS, EOS, FIRST_WORD, save_words, words, write_records
from trainwright.dataset.sft import IGNORE, Record, read_records, tokenize, unit_of
from trainwright.dataset.tokenizer import load_tokenizer
from trainwright.errors import UserError

KEY = "data.train_path"


def read(path: Path) -> list[Record]:
    return list(read_records(path, key=KEY))


def test_records_keep_their_lines_whatever_stands_between_and_beside(tmp_path: Path) -> None:
    path = tmp_path / "x.JSONL"
    path.write_text(
        '\n{"category": ["qa"], "input": "a\\nb", "output": "c"}\n \n{"output": "\u65e5\u672c", "input": ""}'
    )
    assert read(path) == [Record(number=2, input="a\nb", output="c"), Record(number=4, input="", output="\u65e5\u672c")]


def test_a_file_that_is_one_array_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps([{"input": "a", "output": "b"}, {"input": "c", "output": "d"}], indent=1))
    assert unit_of(path) == "record"
    assert read(path) == [Record(number=1, input="a", output="b"), Record(number=2, input="c", output="d")]


def test_the_bytes_read_are_told(tmp_path: Path) -> None:
    path = write_records(tmp_path / "x.jsonl", [("a", "b")] * 3)
    told: list[int] = []
    list(read_records(path, key=KEY, on_bytes=told.append))
    assert told[-1] == path.stat().st_size
    assert told == sorted(told)


def test_all_faults_are_told_at_once_with_their_lines(tmp_path: Path) -> None:
    lines = [
        '{"input": "a", "output": "b"}',
        '{"input": "a", "output": "b"',
        '{"input": "a"}',
        '{"input": null, "output": 7}',
        '{"input": "a", "output": ""}',
        '"input output"',
        '{"input": "a", "output": "b", "output": "c"}',
        "[1]",
    ]
    path = tmp_path / "x.jsonl"
    path.write_bytes("\n".join(lines).encode() + b'\n{"input": "\xff", "output": "b"}\n')
    with pytest.raises(UserError) as refused:
        read(path)
    assert str(refused.value).splitlines() == [
        f"data.train_path: {path} has 9 faults; correct or remove what is named",
        "  line 2: is not JSON: Expecting ',' delimiter, at column 29",
        "  line 3: field 'output' is missing",
        "  line 4: field 'input' is null, not a text",
        "  line 4: field 'output' is a number, not a text",
        "  line 5: field 'output' is empty, so there is nothing to learn",
        "  line 6: is a text, not an object with the fields 'input' and 'output'",
        "  line 7: is not JSON: field 'output' stands twice in an object",
        "  line 8: is a list, not an object with the fields 'input' and 'output'",
        "  line 9: is not UTF-8: invalid start byte at byte 11 of it",
    ]


def test_of_many_faults_twenty_are_shown_and_all_counted(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("{}\n" * 30)
    with pytest.raises(UserError) as refused:
        read(path)
    lines = str(refused.value).splitlines()
    assert "has 60 faults" in lines[0]
    assert len(lines) == 22
    assert lines[-1] == "  ... and 40 more"


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("x.jsonl", "\n\n", "holds no record"),
        ("x.json", "[]", "holds no record"),
        ("x.json", '[{"input": "a"', "record 1: is not JSON"),
        ("x.json", '[{"input": "a", "output": "b"}, 3]', "record 2: is a number"),
        ("x.txt", "{}", r"x\.txt is no \.jsonl or \.json file"),
        ("x.jsonl", None, "cannot be read: No such file"),
    ],
)
def test_a_file_that_holds_none_says_why(tmp_path: Path, name: str, content: str | None, told: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=rf"data\.train_path: (.|\n)*{told}"):
        read(tmp_path / name)


def test_a_record_is_bos_input_output_eos_with_the_prompt_masked(tmp_path: Path) -> None:
    path = write_records(tmp_path / "x.jsonl", [("w0 w1", "w2"), ("", "w3 w4")])
    first, second = tokenize(read_records(path, key=KEY), words(tmp_path / "words"))
    w = FIRST_WORD
    assert first.ids.tolist() == [BOS, w, w + 1, w + 2, EOS]
    assert first.labels.tolist() == [IGNORE, IGNORE, IGNORE, w + 2, EOS]
    assert (second.ids.tolist(), second.labels.tolist()) == ([BOS, w + 3, w + 4, EOS], [IGNORE, w + 3, w + 4, EOS])


def test_gpt2_begins_and_ends_with_its_one_special_token(tmp_path: Path) -> None:
    path = write_records(tmp_path / "x.jsonl", [("Hello", " world")])
    (record,) = tokenize(read_records(path, key=KEY), load_tokenizer("gpt2_bpe"))
    assert record.ids.tolist() == [50_256, 15_496, 995, 50_256]


def test_a_tokenizer_without_bos_is_refused(tmp_path: Path) -> None:
    path = write_records(tmp_path / "x.jsonl", [("w0", "w1")])
    tokenizer = load_tokenizer("huggingface", str(save_words(tmp_path / "words", bos_token=None)))
    with pytest.raises(UserError, match=r"NxDT would put None among the token ids; set bos_token"):
        list(tokenize(read_records(path, key=KEY), tokenizer))
