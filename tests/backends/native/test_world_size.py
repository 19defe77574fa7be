"""The same run on other numbers of ranks, replicated or sharded."""

import functools
import re
from pathlib import Path

import pytest
from torch import distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from tests.backends.native.ranks import join, start_ranks
from tests.backends.native.resave import resave, tensors
from tests.backends.native.runs import MakeConfig, forget_after, losses
from trainwright.backends.native.module import Pretraining, shard
from trainwright.backends.native.retention import saved_checkpoints
from trainwright.backends.native.train import train
from trainwright.errors import UserError

SHARDED = {"parallelism__strategy": "fsdp"}
GPT2 = {"model__architecture": "gpt2", "model__num_query_groups": None, "data__global_batch_size": 8}


def _numbers(run_dir: Path, attempt: int = 1) -> list[float]:
    return [float.fromhex(loss) for loss in losses(run_dir, attempt).values()]


@pytest.mark.parametrize("changes", [{}, GPT2], ids=["llama", "gpt2"])
def test_two_sharded_ranks_give_the_losses_of_two_replicated_ones(
    make_config: MakeConfig, tmp_path: Path, changes: dict[str, object]
) -> None:
    replicated = start_ranks(make_config(**changes), tmp_path / "ddp")
    sharded = start_ranks(make_config(**SHARDED, **changes), tmp_path / "fsdp")
    assert join(replicated) == join(sharded) == [0, 0], (tmp_path / "fsdp" / "rank0.log").read_text()
    # Rounding in float32, which eight steps of Adam multiply.
    assert _numbers(tmp_path / "fsdp") == pytest.approx(_numbers(tmp_path / "ddp"), rel=1e-5)
    validations = [
        saved_checkpoints(tmp_path / name / "checkpoints")[-1].metrics["val_loss"] for name in ("ddp", "fsdp")
    ]
    assert validations[1] == pytest.approx(validations[0], rel=1e-5)


def test_each_rank_holds_a_share_of_every_parameter_and_moment(make_config: MakeConfig, tmp_path: Path) -> None:
    assert join(start_ranks(make_config(**SHARDED, trainer__max_steps=1), tmp_path)) == [0, 0]
    (saved,) = saved_checkpoints(tmp_path / "checkpoints")
    stored = FileSystemReader(saved.path).read_metadata().state_dict_metadata
    chunks = {name: entry.chunks for name, entry in stored.items() if name.endswith((".weight", ".exp_avg"))}  # type: ignore[union-attr]
    assert {name.split(".")[0] for name in chunks} == {"model", "optimizer"}
    assert {len(shares) for shares in chunks.values()} == {2}


@pytest.mark.parametrize("changes", [{}, GPT2], ids=["llama", "gpt2"])
def test_blocks_are_gathered_one_at_a_time(make_config: MakeConfig, changes: dict[str, object]) -> None:
    model = Pretraining(make_config(**changes)).net
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        shard(model, init_device_mesh("cpu", (1,)), "32-true")
    finally:
        dist.destroy_process_group()
    blocks = [module for name, module in model.named_modules() if re.fullmatch(r".*\.(h|layers)\.\d+", name)]
    assert len(blocks) == make_config().model.num_layers
    assert all(isinstance(module, FSDPModule) for module in [model, *blocks])


def test_sharded_ranks_train_in_mixed_precision(make_config: MakeConfig, tmp_path: Path) -> None:
    mixed = make_config(**SHARDED, trainer__precision="bf16-mixed", trainer__recompute="full")
    ranks = start_ranks(mixed, tmp_path / "fsdp")
    train(make_config(), tmp_path / "whole", 1)
    assert join(ranks) == [0, 0], (tmp_path / "fsdp" / "rank0.log").read_text()
    assert _numbers(tmp_path / "fsdp") == pytest.approx(_numbers(tmp_path / "whole"), rel=2e-2)  # 8 bits of mantissa


def test_sharding_refuses_a_gradient_scaler(make_config: MakeConfig, tmp_path: Path) -> None:
    config = make_config(**SHARDED, trainer__precision="16-mixed", hardware__accelerator="gpu")
    with pytest.raises(UserError, match=r"16-mixed cannot be used with parallelism.strategy=fsdp; use bf16-mixed"):
        train(config, tmp_path, 1)


def test_sharding_on_one_rank_is_the_same_as_none(make_config: MakeConfig, tmp_path: Path) -> None:
    train(make_config(trainer__max_steps=2), tmp_path / "ddp", 1)
    train(make_config(trainer__max_steps=2, **SHARDED), tmp_path / "fsdp", 1)
    assert losses(tmp_path / "fsdp") == losses(tmp_path / "ddp")


def test_weights_and_optimizer_survive_other_numbers_of_ranks_bit_for_bit(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Trained sharded on 2 ranks, then loaded and saved on 1, on 4, and on 2, replicated and sharded."""
    config = make_config(**SHARDED, data__micro_batch_size=1, trainer__max_steps=3)
    assert join(start_ranks(config, tmp_path / "run")) == [0, 0]
    (saved,) = saved_checkpoints(tmp_path / "run" / "checkpoints")
    expected = tensors(saved.path, tmp_path / "expected.pt")
    assert {name.split("/")[1] for name in expected} == {"model", "optimizer"}
    for strategy, devices in (("ddp", 1), ("fsdp", 4), ("ddp", 2)):
        target = tmp_path / f"{strategy}-{devices}"
        run = functools.partial(
            resave, config=make_config(parallelism__strategy=strategy, data__micro_batch_size=1), target=target
        )
        ranks = start_ranks(config, tmp_path / "run", devices=devices, run=run)
        assert set(join(ranks)) == {0}, (tmp_path / "run" / "rank0.log").read_text()
        assert tensors(target, tmp_path / "found.pt") == expected


@pytest.mark.parametrize(
    ("before", "after"), [(("fsdp", 2), ("ddp", 1)), (("ddp", 2), ("fsdp", 4)), (("ddp", 1), ("ddp", 2))]
)
def test_another_number_of_ranks_continues_with_the_same_losses(
    make_config: MakeConfig, tmp_path: Path, before: tuple[str, int], after: tuple[str, int]
) -> None:
    saves = {"exp_manager__checkpoint_callback_params__every_n_train_steps": 4, "data__micro_batch_size": 1}
    whole = make_config(**saves, parallelism__strategy=before[0])
    cut = make_config(**saves, parallelism__strategy=after[0])
    assert set(join(start_ranks(whole, tmp_path, devices=before[1]))) == {0}
    forget_after(tmp_path, 4)
    assert set(join(start_ranks(cut, tmp_path, attempt=2, devices=after[1]))) == {0}
    assert list(losses(tmp_path, attempt=2)) == [5, 6, 7, 8]
    # Additions in another order.
    assert _numbers(tmp_path, attempt=2) == pytest.approx(_numbers(tmp_path)[4:], rel=1e-5)
    assert saved_checkpoints(tmp_path / "checkpoints")[-1].consumed_samples == 32
    assert "dropout streams start anew from (seed, step, rank)" in (tmp_path / "rank0.log").read_text()
