"""What a checkpoint holds, and how all ranks write and read it: a mixin for Lightning's strategies.

A checkpoint directory holds
    .metadata, __R_N.distcp   weights, their average and optimizer state by parameter name
                              (torch.distributed.checkpoint); each rank writes a share, and any number of ranks can
                              read it
    trainer.pt                loop counters and callback state, written by rank 0
    rng-00000.pt ...          the random generators of each rank
    commit.json               written last, by `saver`
"""

import hashlib
import io
import logging
import os
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from trainwright.backends.native.module import Pretraining
from trainwright.errors import RunFailedError

log = logging.getLogger(__name__)

_TRAINER_FILE = "trainer.pt"
_AVERAGE = "average"  # of the weights, in a checkpoint of a run that keeps one


class _NewFiles(FileSystem):
    """Writes each file under its own name, in a new directory: mounted buckets do not rename.

    torch writes its metadata beside its place and then moves it there. To us a directory without a commit is none.
    """

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        with super().create_stream(Path(path).with_suffix("") if Path(path).suffix == ".tmp" else path, mode) as stream:
            yield stream

    def exists(self, path: str | os.PathLike[str]) -> bool:
        return False

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        pass


class _ShardWriter(FileSystemWriter):
    """Raises the system's own error, say of a full disk, where torch tells of a wrong position in its file only."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.fs = _NewFiles()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            before: BaseException | None = error
            while before is not None and not isinstance(before, OSError):
                before = before.__context__
            raise before or error from None


class BackgroundWriter:
    """Writes shards while training goes on, from a copy in host memory: for one save at a time, the state once more.

    All ranks build one. Its process group is its own, since on the group of the training their calls would mix.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.written: Future[Any] | None = None  # of the last save: done when all ranks have written

    def start(self, state: dict[str, Any], directory: Path) -> None:
        """Copy `state` and begin to write the copy. The one before must have been written."""
        written = async_save(
            state, storage_writer=_ShardWriter(directory), process_group=self._group, no_dist=self._group is None
        )
        assert isinstance(written, Future)  # another answer is for copies that are made in the background
        self.written = written


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
        """Write this rank's share into the new directory `filepath`, all ranks or none with success.

        A BackgroundWriter as `storage_options` is left with the tensors. Raises OSError or CheckpointException.
        """
        directory = Path(filepath)

        def write_trainer() -> None:
            directory.mkdir(parents=True)
            _write(checkpoint, directory / _TRAINER_FILE)

        _raise_together(write_trainer if self.is_global_zero else lambda: None)
        _raise_together(lambda: _write(_random_state(self.root_device), directory / _rng_file(self._rank)))
        state = self._distributed_state()
        if isinstance(storage_options, BackgroundWriter):
            storage_options.start(state, directory)
        else:
            save(state, storage_writer=_ShardWriter(directory), no_dist=not dist.is_initialized())

    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Read model and optimizer in place and return the loops' and callbacks' state for Lightning to restore."""
        directory = Path(checkpoint_path)
        reader, state = FileSystemReader(directory), self._distributed_state()
        saved = {key.split(".")[0] for key in reader.read_metadata().state_dict_metadata}
        try:
            load(
                {part: tensors for part, tensors in state.items() if part != _AVERAGE or part in saved},
                storage_reader=reader,
                no_dist=not dist.is_initialized(),
            )
        except CheckpointException as error:
            raise RunFailedError(f"{directory} could not be read: {first_failure(error)}") from error
        average = self._module.average
        if average is not None and _AVERAGE not in saved:
            average.restart()
        checkpoint: dict[str, Any] = torch.load(directory / _TRAINER_FILE, weights_only=True)
        _align_loops(checkpoint, self.lightning_module.trainer.accumulate_grad_batches)  # type: ignore[union-attr]
        return checkpoint

    @property
    def _module(self) -> Pretraining:
        assert isinstance(self.lightning_module, Pretraining)
        return self.lightning_module

    @property
    def _rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    def _distributed_state(self) -> dict[str, Any]:
        """Return weights (tied ones once), optimizer state and averaged weights by parameter name: tensors in use.

        The optimizer's groups are left out: rate, decay and betas come from the config of the attempt.
        """
        network = self._module.net.network
        own = {name for name, _ in network.named_parameters()} | {name for name, _ in network.named_buffers()}
        weights = {name: value for name, value in get_model_state_dict(network).items() if name in own}
        optimizer: dict[str, Any] = dict(get_optimizer_state_dict(network, self.optimizers[0]))
        average = self._module.average
        return {
            "model": weights,
            "optimizer": optimizer["state"],
            **({} if average is None else {_AVERAGE: average.weights}),
        }


class OneDevice(ShardedCheckpoints, SingleDeviceStrategy):
    """One process, one device."""


class Replicated(ShardedCheckpoints, DDPStrategy):
    """A whole model on each device."""


class Sharded(ShardedCheckpoints, ModelParallelStrategy):
    """Each device holds its share of every parameter; the model cuts itself in `configure_model`."""


def _raise_together(write: Callable[[], None]) -> None:
    """Write, and raise the OSError of the first rank that has one on all of them."""
    errors: list[OSError | None] = [None]
    try:
        write()
    except OSError as error:
        errors = [error]
    if dist.is_initialized():
        mine, errors = errors[0], [None] * dist.get_world_size()
        dist.all_gather_object(errors, mine)
    failed = next((error for error in errors if error is not None), None)
    if failed is not None:
        raise failed


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
