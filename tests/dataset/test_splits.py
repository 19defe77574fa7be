"""data.splits_string: what it may be. What it means is compared with megatron-core in test_megatron_goldens."""

import pytest

from trainwright.dataset.splits import split_bounds
from trainwright.errors import UserError


@pytest.mark.parametrize("text", ["", "none", "0,0,0", "1,2,3,4", "1.2.3,1", "."])
def test_no_list_of_weights_is_refused_with_a_right_one(text: str) -> None:
    with pytest.raises(UserError, match=r"data\.splits_string.*right would be '95,5,0'"):
        split_bounds(text, 100, "x.idx")


def test_an_empty_weighted_split_is_refused_with_the_counts() -> None:
    with pytest.raises(UserError) as error:
        split_bounds("99990,8,2", 1000, "/data/x.idx")
    assert "no sequence for validation and test" in str(error.value)
    assert "the 1000 sequences of /data/x.idx become train 1000, validation 0, test 0" in str(error.value)


def test_a_split_of_weight_zero_is_none() -> None:
    assert split_bounds("100,0,0", 10, "x.idx") == {"train": (0, 10), "validation": None, "test": None}
