"""The unigram loss against a sum by hand, and on uniform data."""

import math

import numpy as np
import pytest

from trainwright.dataset.unigram import unigram_cross_entropy
from trainwright.errors import UserError


def test_add_one_by_hand() -> None:
    # counts 3, 1, 0 become 4/7, 2/7, 1/7
    loss = unigram_cross_entropy([np.array([0, 0]), np.array([0, 1])], [np.array([0, 2], dtype=np.uint16)], 3)
    assert loss == pytest.approx(-(math.log(4 / 7) + math.log(1 / 7)) / 2, abs=1e-12)


def test_uniform_tokens_cost_the_logarithm_of_the_vocabulary() -> None:
    tokens = np.random.RandomState(0).randint(0, 50, 200_000)
    assert unigram_cross_entropy([tokens], [tokens[:1000]], 50) == pytest.approx(math.log(50), abs=0.01)


def test_a_token_beyond_the_vocabulary_names_the_key() -> None:
    with pytest.raises(UserError, match=r"model\.vocab_size=3 is too small: the data holds token 7"):
        unigram_cross_entropy([np.array([0, 7])], [np.array([0])], 3)
