"""Which process of how many this is, and how the processes agree."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from trainwright.errors import UserError

Decision = TypeVar("Decision")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among all of a run."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.local_world_size


def ranks_from_environment() -> Ranks:
    """Return what torchrun says; without torchrun, the only process."""
    environ = os.environ
    return Ranks(
        rank=int(environ.get("RANK", "0")),
        world_size=int(environ.get("WORLD_SIZE", "1")),
        local_rank=int(environ.get("LOCAL_RANK", "0")),
        local_world_size=int(environ.get("LOCAL_WORLD_SIZE", "1")),
    )


@contextmanager
def process_group(ranks: Ranks, accelerator: str) -> Iterator[None]:
    """Connect the ranks, earlier than Lightning would, so that they can agree on a checkpoint; one needs no group."""
    if ranks.world_size == 1:
        yield
        return
    if accelerator == "gpu":
        device = torch.device("cuda", ranks.local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def decide_together(ranks: Ranks, decide: Callable[[], Decision]) -> Decision:
    """Return on all ranks what `decide` returns on rank 0; a UserError of rank 0 is raised on all."""
    if ranks.world_size == 1:
        return decide()
    box: list[Decision | UserError | None] = [None]
    if ranks.is_first:
        try:
            box[0] = decide()
        except UserError as error:
            box[0] = error
    dist.broadcast_object_list(box)
    if isinstance(box[0], UserError):
        raise box[0]
    return box[0]  # type: ignore[return-value]  # a Decision, which may be None
