"""What a checkpoint holds, and how all ranks write and read it: a mixin for Lightning's strategies.

A checkpoint directory holds
    .metadata, __R_N.distcp   model and optimizer state by parameter name (torch.distributed.checkpoint); each rank
                              writes a share, and any number of ranks can read it
    trainer.pt                loop counters and callback state, written by rank 0
    rng-00000.pt ...          the random generators of each rank
    commit.json               written last, by `saver`
"""

import hashlib
import io
import logging
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from trainwright.errors import RunFailedError

log = logging.getLogger(__name__)

_TRAINER_FILE = "trainer.pt"


class ShardedCheckpoints(Strategy):
    """Makes `trainer.save_checkpoint` and `trainer.fit(ckpt_path=...)` use a directory that all ranks share."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Load once the optimizer exists, since its state is read in place."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}  # save_checkpoint collects it, sharded

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {}  # save_checkpoint collects it, sharded

    def load_model_state_dict(self, checkpoint: Any, strict: bool = True) -> None:
        pass  # load_checkpoint has read it in place

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        pass  # load_checkpoint has read it in place

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        """Write this rank's share into the new directory `filepath`. Raises OSError or CheckpointException."""
        directory = Path(filepath)
        if self.is_global_zero:
            directory.mkdir(parents=True)
            _write(checkpoint, directory / _TRAINER_FILE)
        self.barrier()
        _write(_random_state(self.root_device), directory / _rng_file(self._rank))
        save(
            self._distributed_state(),
            storage_writer=FileSystemWriter(directory),
            no_dist=not torch.distributed.is_initialized(),
        )

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Read model and optimizer in place and return the loops' and callbacks' state for Lightning to restore."""
        directory = Path(checkpoint_path)
        try:
            load(
                self._distributed_state(),
                storage_reader=FileSystemReader(directory),
                no_dist=not torch.distributed.is_initialized(),
            )
        except CheckpointException as error:
            raise RunFailedError(f"{directory} could not be read: {first_failure(error)}") from error
        checkpoint: dict[str, Any] = torch.load(directory / _TRAINER_FILE, weights_only=True)
        _align_loops(checkpoint, self.lightning_module.trainer.accumulate_grad_batches)  # type: ignore[union-attr]
        return checkpoint

    @property
    def _rank(self) -> int:
        return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

    def _distributed_state(self) -> dict[str, Any]:
        """Return weights (tied ones once) and optimizer state by parameter name: the tensors in use, not copies.

        The optimizer's groups are left out: rate, decay and betas come from the config of the attempt.
        """
        network = self.lightning_module.net.network  # type: ignore[union-attr]
        assert isinstance(network, torch.nn.Module)
        own = {name for name, _ in network.named_parameters()} | {name for name, _ in network.named_buffers()}
        weights = {name: value for name, value in get_model_state_dict(network).items() if name in own}
        optimizer: dict[str, Any] = dict(get_optimizer_state_dict(network, self.optimizers[0]))
        return {"model": weights, "optimizer": optimizer["state"]}


class OneDevice(ShardedCheckpoints, SingleDeviceStrategy):
    """One process, one device."""


class Replicated(ShardedCheckpoints, DDPStrategy):
    """A whole model on each device."""


def first_failure(error: CheckpointException) -> BaseException:
    """Return what went wrong on the first rank that failed."""
    failure, _ = next(iter(error.failures.values()))
    return failure


def restore_random_state(
    directory: Path, device: torch.device, *, seed: int, step: int, rank: int, same_world: bool
) -> None:
    """Continue this rank's random streams; on another number of ranks, which has no such streams, start new ones."""
    if not same_world:
        log.warning(
            "dropout streams start anew from (seed, step, rank): the checkpoint was saved by another number of ranks"
        )
        start_random_state(seed=seed, step=step, rank=rank)
        return
    state = torch.load(directory / _rng_file(rank), weights_only=True)
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def start_random_state(*, seed: int, step: int, rank: int) -> None:
    """Seed torch for the steps after `step`, differently on each rank."""
    digest = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _write(state: dict[str, Any], path: Path) -> None:
    """Save through a buffer: writing to a path itself, torch turns a full disk into an error that does not say so."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    path.write_bytes(buffer.getvalue())


def _rng_file(rank: int) -> str:
    return f"rng-{rank:05d}.pt"


def _align_loops(checkpoint: dict[str, Any], accumulate_grad_batches: int) -> None:
    """Recount finished micro batches for this number of ranks, as of the hook in which checkpoints are saved.

    Lightning saves micro batches; another number of ranks needs another number of them for the same steps.
    """
    micro_batches = checkpoint["global_step"] * accumulate_grad_batches
    counts = {
        "ready": micro_batches,
        "started": micro_batches,
        "processed": micro_batches,
        "completed": micro_batches - 1,
    }
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    progress.update(total=counts, current=dict(counts), is_last_batch=False)
