"""A tokenizer whose tokens are words, so that tests can count them: w0 is token 3, w1 is token 4 and so on."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

from trainwright.dataset.tokenizer import Tokenizer as OurTokenizer
from trainwright.dataset.tokenizer import load_tokenizer

UNKNOWN, BOS, EOS = 0, 1, 2
FIRST_WORD = 3


def save_words(directory: Path, *, num_words: int = 97, bos_token: object = "<s>", eos_token: object = "</s>") -> Path:
    """Write the tokenizer as a Hugging Face directory and return that."""
    words = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(num_words))]
    tokenizer = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos_token, "eos_token": eos_token}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def words(directory: Path) -> OurTokenizer:
    return load_tokenizer("huggingface", str(save_words(directory)))


def text(num_words: int, start: int = 0) -> str:
    return " ".join(f"w{(start + number) % 97}" for number in range(num_words))


def write_records(path: Path, records: Iterable[tuple[str, str]]) -> Path:
    """Write a jsonl file of (input, output), each with a field more, as the article's data has it."""
    lines = [json.dumps({"input": given, "output": wanted, "category": "qa"}) for given, wanted in records]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def write_lengths(path: Path, lengths: Iterable[int]) -> Path:
    """Write records of so many tokens, 4 at least: bos, a word of input, words of output, eos. No two are the same."""
    return write_records(path, ((f"w{number % 97}", text(length - 3, number)) for number, length in enumerate(lengths)))
