"""data.data_prefix: one path or weighted paths. The order of a blend is compared in test_megatron_goldens."""

from pathlib import Path

import pytest

from trainwright.dataset.blend import parse_data_prefix
from trainwright.errors import UserError


def test_one_path_is_read_as_it_is() -> None:
    blend = parse_data_prefix(["/data/a"])
    assert (blend.prefixes, blend.weights) == ((Path("/data/a"),), None)
    assert blend.sizes_with_surplus(12_800) == blend.sizes(12_800) == [12_800]


def test_weights_are_normalised_and_each_source_has_a_surplus() -> None:
    blend = parse_data_prefix([3, "/data/a", "1.0", "/data/b"])
    assert blend.prefixes == (Path("/data/a"), Path("/data/b"))
    assert blend.weights == (0.75, 0.25)
    assert blend.sizes(1001) == [751, 251]
    assert blend.sizes_with_surplus(1001) == [755, 253]


def test_a_weighted_single_path_takes_the_blend_route_as_in_megatron() -> None:
    assert parse_data_prefix([1.0, "/data/a"]).sizes_with_surplus(12_800) == [12_864]


@pytest.mark.parametrize(
    ("data_prefix", "reason"),
    [
        ([], "has 0 elements"),
        (["/a", "/b", "/c"], "has 3 elements"),
        (["/a", "/b"], "'/a' stands where a weight belongs"),
        ([0, "/a", 1, "/b"], "weight 0 is not a positive number"),
        (["nan", "/a"], "weight 'nan' is not a positive number"),
        ([-1, "/a", 2, "/b"], "weight -1 is not a positive number"),
    ],
)
def test_anything_else_is_refused_with_what_would_be_right(data_prefix: list[str | float], reason: str) -> None:
    with pytest.raises(UserError) as error:
        parse_data_prefix(data_prefix)
    assert reason in str(error.value)
    assert "data.data_prefix" in str(error.value)
    assert "[0.7, PATH, 0.3, PATH]" in str(error.value)
