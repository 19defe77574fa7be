"""Tokenizers of Hugging Face's layout, from a directory and from the hub's cache."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.dataset.words import BOS, EOS, FIRST_WORD, save_words, words
from trainwright.dataset.tokenizer import load_tokenizer
from trainwright.errors import UserError


def test_a_directory_is_read(tmp_path: Path) -> None:
    tokenizer = words(tmp_path / "my words")
    assert (tokenizer.name, tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == ("my_words", 100, BOS, EOS)
    assert [ids.tolist() for ids in tokenizer.encode(["w0 w1", "", "?"])] == [[FIRST_WORD, FIRST_WORD + 1], [], [0]]


def test_special_tokens_in_a_text_are_themselves_as_in_transformers(tmp_path: Path) -> None:
    (ids,) = words(tmp_path).encode(["w0 </s>w1"])
    assert ids.tolist() == [FIRST_WORD, EOS, FIRST_WORD + 1]


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    backend = Tokenizer.from_file(str(save_words(tmp_path) / "tokenizer.json"))
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    (ids,) = load_tokenizer("huggingface", str(tmp_path)).encode(["w0 w1 w2 w3"])
    assert len(ids) == 4


@pytest.mark.parametrize(
    ("settings", "bos"),
    [
        ({"bos_token": "<s>", "eos_token": "</s>"}, BOS),
        ({"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": {"content": "</s>"}}, BOS),
        ({"tokenizer_class": "LlamaTokenizer"}, BOS),
        ({"tokenizer_class": "LlamaTokenizer", "bos_token": None}, None),
        ({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "</s>"}, None),
        ({"bos_token": "<absent>", "eos_token": "</s>"}, None),
    ],
)
def test_the_ends_of_a_text_come_from_its_settings(tmp_path: Path, settings: dict[str, object], bos: int) -> None:
    save_words(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer("huggingface", str(tmp_path))
    assert (tokenizer.bos, tokenizer.eod) == (bos, EOS)


def test_the_identity_goes_by_content_and_not_by_path(tmp_path: Path) -> None:
    first, again = words(tmp_path / "a"), words(tmp_path / "b")
    other = load_tokenizer("huggingface", str(save_words(tmp_path / "c", bos_token="</s>")))
    assert first.identity == again.identity != other.identity


def test_a_directory_that_cannot_be_used_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no tokenizer\.json; make one with `transformers\.AutoTokenizer"):
        load_tokenizer("huggingface", str(tmp_path))
    with pytest.raises(UserError, match=r"/absent is no directory; give one that holds tokenizer\.json, or a hub id"):
        load_tokenizer("huggingface", str(tmp_path / "absent"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json is no usable tokenizer"):
        load_tokenizer("huggingface", str(tmp_path))
    with pytest.raises(UserError, match=r"has no end-of-text token \(eos_token=None\).*set eos_token in"):
        load_tokenizer("huggingface", str(save_words(tmp_path, eos_token=None)))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json cannot be read"):
        load_tokenizer("huggingface", str(tmp_path))
    with pytest.raises(UserError, match=r"data\.tokenizer\.name=null"):
        load_tokenizer("huggingface")


def test_a_hub_id_is_read_from_the_cache_and_offline_says_the_remedy(tmp_path: Path) -> None:
    model = tmp_path / "hub" / "models--me--words"
    save_words(model / "snapshots" / "abc")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("abc")
    script = (
        "from trainwright.dataset.tokenizer import load_tokenizer\n"
        "from trainwright.errors import UserError\n"
        "found = load_tokenizer('huggingface', 'me/words')\n"
        "print(found.name, found.vocab_size, found.bos, found.eod)\n"
        "try: load_tokenizer('huggingface', 'me/others')\n"
        "except UserError as error: print(error)\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    asked = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    found, refused = asked.stdout.splitlines()
    assert found == "words 100 1 2"
    assert refused.startswith("data.tokenizer.name=me/others is no directory here")
    assert "hf download me/others --include 'tokenizer*' --local-dir DIR" in refused


def test_tokens_are_those_of_transformers_as_nxdt_asks_it(tmp_path: Path) -> None:
    # NxDT also gives max_length, which cuts each text to seq_length: see trainwright.dataset.sft.
    from transformers import AutoTokenizer

    texts = ["w0 w1", "", " w2\n\tw3  ", "<s>w4 </s>", "\u65e5\u672c w5"]
    theirs = AutoTokenizer.from_pretrained(str(save_words(tmp_path)))
    ours = load_tokenizer("huggingface", str(tmp_path))
    assert [ids.tolist() for ids in ours.encode(texts)] == theirs(texts, add_special_tokens=False)["input_ids"]
    assert (ours.bos, ours.eod, theirs.pad_token_type_id) == (theirs.bos_token_id, theirs.eos_token_id, 0)
