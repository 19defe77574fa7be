"""Where a run continues: its data, its random streams, its end."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.backends.native.ranks import join, start_ranks
from tests.backends.native.resave import tensors
from tests.backends.native.runs import MakeConfig, forget_after, losses
from trainwright.backends.native.checkpoint import restore_random_state
from trainwright.backends.native.data import SampleRequests, find_prefixes, open_samples
from trainwright.backends.native.retention import saved_checkpoints
from trainwright.backends.native.train import train
from trainwright.config import RunConfig
from trainwright.dataset.indexed import IndexedWriter
from trainwright.dataset.samples import JoinedSamples
from trainwright.node.run_paths import RunPaths

# All that has a state: dropout, accumulation, an average of the weights, warm-up, validations off the saves.
EVERYTHING = {
    "model__attention_dropout": 0.1,
    "exp_manager__ema__enable": True,
    "exp_manager__ema__every_n_steps": 2,
    "optim__sched__warmup_steps": 4,
    "trainer__val_check_interval": 2,
    "exp_manager__checkpoint_callback_params__every_n_train_steps": 3,
    "exp_manager__checkpoint_callback_params__save_top_k": -1,
}


@pytest.fixture(scope="session")
def small_prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five batches of four samples of 32 tokens, so that an epoch ends between the fifth and the sixth step."""
    prefix = tmp_path_factory.mktemp("small") / "text"
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for number in range(20):
            writer.add_sequence((np.arange(36) * 7 + number) % 500)
            writer.end_document()
    return prefix


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("epochs", ["inside an epoch", "across epochs"])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    make_config: MakeConfig, tmp_path: Path, small_prefix: Path, epochs: str, num_ranks: int
) -> None:
    changes: dict[str, Any] = {"data__micro_batch_size": 2 // num_ranks}  # two micro batches a step on each rank
    if epochs == "across epochs":
        changes["data__data_prefix"] = [str(small_prefix)]
    config = make_config(**EVERYTHING, **changes)
    assert set(join(start_ranks(config, tmp_path, devices=num_ranks))) == {0}, (tmp_path / "rank0.log").read_text()
    uninterrupted = losses(tmp_path)
    assert list(uninterrupted) == list(range(1, 9))
    end = _content(tmp_path)
    forget_after(tmp_path, 3)
    assert set(join(start_ranks(config, tmp_path, attempt=2, devices=num_ranks))) == {0}
    assert losses(tmp_path, attempt=2) == {step: uninterrupted[step] for step in range(4, 9)}
    assert _content(tmp_path) == end


def _content(run_dir: Path) -> tuple[object, ...]:
    """Return what the newest checkpoint holds: tensors of the model, the average, the optimizer, the callbacks, RNG."""
    newest = saved_checkpoints(RunPaths(run_dir).checkpoints)[-1]
    trainer = torch.load(newest.path / "trainer.pt", weights_only=True)
    streams = [torch.load(path, weights_only=True)["cpu"].tolist() for path in sorted(newest.path.glob("rng-*"))]
    held = tensors(newest.path, run_dir / "content.pt")
    assert {name.split("/")[1] for name in held} == {"model", "optimizer", "average"}
    return newest.step, dict(newest.metrics), held, trainer["callbacks"], streams


def test_training_draws_from_no_stream_but_torchs(make_config: MakeConfig, tmp_path: Path) -> None:
    """So only torch's streams are saved."""
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    train(make_config(model__attention_dropout=0.1), tmp_path, 1)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index, union-attr]


def test_streams_for_another_number_of_ranks_depend_on_seed_step_and_rank_only(tmp_path: Path) -> None:
    def draw(seed: int, step: int, rank: int) -> list[float]:
        torch.manual_seed(0)
        restore_random_state(tmp_path, torch.device("cpu"), seed=seed, step=step, rank=rank, same_world=False)
        numbers: list[float] = torch.rand(4).tolist()
        return numbers

    places = [(1, 8, 0), (1, 8, 1), (1, 9, 0), (2, 8, 0)]
    first = [draw(*place) for place in places]
    assert [draw(*place) for place in places] == first
    assert len({tuple(numbers) for numbers in first}) == 4


def _order(config: RunConfig, requests: SampleRequests = ()) -> tuple[list[list[int]], SampleRequests]:
    data, asked = open_samples(config, find_prefixes(config), requests)
    return [data.train[number].tolist() for number in range(config.trainer.max_steps * 4)], asked


def test_raised_max_steps_change_neither_the_samples_seen_nor_those_due(
    make_config: MakeConfig, small_prefix: Path
) -> None:
    small = {"data__data_prefix": [str(small_prefix)]}
    first, requests = _order(make_config(**small, trainer__max_steps=8))
    afresh, _ = _order(make_config(**small, trainer__max_steps=24))
    longer, twice = _order(make_config(**small, trainer__max_steps=24), requests)
    assert longer[:32] == first
    assert afresh[:32] != first  # asking for more at once shuffles otherwise
    assert len(longer) == 96
    longest, _ = _order(make_config(**small, trainer__max_steps=40), twice)
    assert longest[:96] == longer
    shorter, _ = _order(make_config(**small, trainer__max_steps=5), requests)
    assert shorter == first[:20]


def test_a_continued_order_is_shuffled_anew_and_repeats_no_sample_more_than_another(
    make_config: MakeConfig, small_prefix: Path
) -> None:
    config = make_config(data__data_prefix=[str(small_prefix)], trainer__max_steps=8)
    data, requests = open_samples(config, find_prefixes(config), ())
    longer = make_config(data__data_prefix=[str(small_prefix)], trainer__max_steps=40)
    joined = open_samples(longer, find_prefixes(longer), requests)[0].train
    assert isinstance(joined, JoinedSamples)
    first, second = ([part[number].tolist() for number in range(20)] for part in joined.parts)
    assert first == [data.train[number].tolist() for number in range(20)]
    assert second != first


def test_a_longer_run_validates_with_the_same_samples(make_config: MakeConfig, token_prefix: Path) -> None:
    def order(config: RunConfig, requests: SampleRequests) -> tuple[list[list[int]], SampleRequests]:
        data, asked = open_samples(config, find_prefixes(config), requests)
        assert data.validation is not None
        return [data.validation[number].tolist() for number in range(8)], asked

    first, requests = order(make_config(trainer__max_steps=8), ())
    longer = make_config(trainer__max_steps=200)
    assert order(longer, requests)[0] == first
    assert order(longer, ())[0] != first


def test_a_finished_run_has_nothing_to_do_says_so_and_succeeds(
    make_config: MakeConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config()
    results = train(config, tmp_path, 1)
    saved = RunPaths(tmp_path).results.read_bytes()
    assert train(config, tmp_path, 2) == results
    assert "nothing to do: trainer.max_steps=8 and step 8 is saved; raise trainer.max_steps" in capsys.readouterr().out
    assert RunPaths(tmp_path).results.read_bytes() == saved
    assert sorted(losses(tmp_path)) == list(range(1, 9))


def test_a_run_killed_before_its_results_writes_them_when_resumed(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config()
    first = train(config, tmp_path, 1)
    RunPaths(tmp_path).results.unlink()
    second = train(config, tmp_path, 2)
    same = ("steps", "consumed_samples", "train_loss", "val_loss", "best_val_loss", "checkpoints", "stop_reason")
    assert {key: second[key] for key in same} == {key: first[key] for key in same}


def test_raised_max_steps_continue_a_finished_run(make_config: MakeConfig, tmp_path: Path) -> None:
    constant = {"optim__sched__name": "constant", "model__attention_dropout": 0.1}
    train(make_config(**constant, trainer__max_steps=4), tmp_path / "cut", 1)
    train(make_config(**constant), tmp_path / "cut", 2)
    train(make_config(**constant), tmp_path / "whole", 1)
    # The tokens fill more than an epoch in neither case, so both orders are the same, and the rate is constant.
    assert losses(tmp_path / "cut") | losses(tmp_path / "cut", 2) == losses(tmp_path / "whole")
