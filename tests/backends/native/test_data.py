"""How global batches are cut into micro batches."""

import numpy as np
import pytest

from trainwright.backends.native.data import BatchLoader, MicroBatchSampler, plan_batches
from trainwright.errors import UserError


def _micro_batches(micro: int, world_size: int, consumed: int = 0) -> list[list[list[int]]]:
    plan = plan_batches(micro, 8, world_size)
    samplers = [MicroBatchSampler(plan, rank, 3) for rank in range(world_size)]
    for sampler in samplers:
        sampler.consumed_samples = consumed
    return [list(sampler) for sampler in samplers]


@pytest.mark.parametrize(("micro", "world_size"), [(1, 1), (2, 1), (2, 2), (1, 4), (2, 4), (1, 8)])
def test_any_number_of_ranks_sees_the_same_global_batches(micro: int, world_size: int) -> None:
    ranks = _micro_batches(micro, world_size)
    for step in range(3):
        each = len(ranks[0]) // 3
        seen = [sample for rank in ranks for batch in rank[step * each : (step + 1) * each] for sample in batch]
        assert sorted(seen) == list(range(step * 8, (step + 1) * 8))


def test_micro_batches_are_contiguous_and_in_megatrons_order() -> None:
    assert _micro_batches(2, 2)[1][:3] == [[2, 3], [6, 7], [10, 11]]


def test_consumed_samples_are_left_out() -> None:
    assert _micro_batches(2, 2, consumed=16)[0] == [[16, 17], [20, 21]]


@pytest.mark.parametrize(
    ("sizes", "fits"), [((2, 6, 2), "use 4 or 8"), ((3, 8, 1), "use 6 or 9"), ((4, 6, 2), "use 8$")]
)
def test_a_remainder_is_an_error_that_names_what_fits(sizes: tuple[int, int, int], fits: str) -> None:
    with pytest.raises(UserError, match=f"data.global_batch_size={sizes[1]} .*{fits}"):
        plan_batches(*sizes)


def test_a_loader_continues_where_its_state_was_taken_even_with_other_ranks() -> None:
    samples = [np.full(5, index) for index in range(24)]
    first = BatchLoader(samples, MicroBatchSampler(plan_batches(2, 8, 1), 0, 3), num_workers=0, pin_memory=False)  # type: ignore[arg-type]
    batches = iter(first)
    for _ in range(4):
        next(batches)
    second = BatchLoader(samples, MicroBatchSampler(plan_batches(2, 8, 2), 1, 3), num_workers=0, pin_memory=False)  # type: ignore[arg-type]
    second.load_state_dict(first.state_dict())
    tokens, labels = next(iter(second))
    assert tokens[:, 0].tolist() == [10, 11]
    assert tokens.shape == labels.shape == (2, 4)
