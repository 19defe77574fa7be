"""Trains one run, in each of its ranks: `python -m trainwright.backends.native.train RUN_DIR --attempt N`."""

import argparse
import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import yaml
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch.strategies import Strategy

from trainwright.backends.native.callbacks import DivergedError, PreemptedError, StepBoundary
from trainwright.backends.native.checkpoint import OneDevice, Replicated, Sharded
from trainwright.backends.native.copied_files import copy_files
from trainwright.backends.native.data import (
    BatchLoader,
    BatchPlan,
    MicroBatchSampler,
    SampleRequests,
    find_prefixes,
    open_samples,
    plan_batches,
)
from trainwright.backends.native.module import Pretraining
from trainwright.backends.native.ranks import Ranks, decide_together, process_group, ranks_from_environment
from trainwright.backends.native.results import StopReason, collect_results, versions
from trainwright.backends.native.retention import SavedCheckpoint, choose_resume
from trainwright.backends.native.run_log import RunLog
from trainwright.backends.native.saver import CheckpointSaver
from trainwright.backends.native.signals import StopRequest, keep_own_handlers
from trainwright.config import RunConfig
from trainwright.dataset.samples import GptData, Samples
from trainwright.errors import RunFailedError, UserError
from trainwright.node.growing import scratch_of
from trainwright.node.results import read as read_results
from trainwright.node.results import write as write_results
from trainwright.node.run_paths import RunPaths


def train(config: RunConfig, run_dir: Path, attempt: int) -> dict[str, Any]:
    """Train from the newest checkpoint in `run_dir`, or from the start, and return what results.json then holds.

    Runs as one rank of those that torchrun started, or as the only one. Raises UserError for input that cannot work,
    RunFailedError when training fails, PreemptedError when a stop was asked for.
    """
    ranks = ranks_from_environment()
    _silence()
    _refuse_impossible(config)
    plan = plan_batches(config.data.micro_batch_size, config.data.global_batch_size, ranks.world_size)
    torch.set_num_threads(config.trainer.num_threads or max(1, len(os.sched_getaffinity(0)) // ranks.local_world_size))
    with StopRequest() as stop, process_group(ranks, config.hardware.accelerator):
        paths = RunPaths(run_dir, scratch_of(os.environ))
        resumed, results = decide_together(ranks, lambda: _look_back(config, paths))
        if results is not None:
            return results
        return _prepare(config, paths, attempt, ranks, plan, stop, resumed).fit()


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    """One attempt at a run, all parts built."""

    config: RunConfig
    paths: RunPaths
    number: int
    started: datetime
    plan: BatchPlan
    data: GptData
    module: Pretraining
    boundary: StepBoundary
    saver: CheckpointSaver | None  # None: the run saves nothing
    trainer: pl.Trainer
    loader: BatchLoader
    resumed: SavedCheckpoint | None
    log: RunLog | None

    def fit(self) -> dict[str, Any]:
        try:
            self.trainer.fit(self.module, self.loader, ckpt_path=self.resumed.path if self.resumed else None)
        except PreemptedError as stopped:
            self._finish(stopped.reason, str(stopped))
            raise
        except RunFailedError as failed:
            with contextlib.suppress(OSError):  # a full disk may be what failed
                self._write_results("diverged" if isinstance(failed, DivergedError) else "failed", str(failed))
            raise
        finally:
            if self.saver is not None:
                self.saver.close()
            if self.log is not None:
                self.log.close()
        early_stopping = self.boundary.early_stopping
        if early_stopping is not None and early_stopping.reason is not None:
            return self._finish("early_stopping", early_stopping.reason)
        return self._finish("max_steps", None)

    def _finish(self, stop_reason: StopReason, stop_message: str | None) -> dict[str, Any]:
        """Write the results on rank 0; no rank ends before that, since the others may be stopped when one has ended."""
        if self.saver is not None:
            self.saver.settle(self.trainer)
        results = self._write_results(stop_reason, stop_message)
        if dist.is_initialized():
            dist.barrier()
        return results

    def _write_results(self, stop_reason: StopReason, stop_message: str | None) -> dict[str, Any]:
        results: dict[str, Any] = {}
        if self.log is not None:
            results = collect_results(
                config=self.config,
                paths=self.paths,
                plan=self.plan,
                data=self.data,
                boundary=self.boundary,
                parameters=sum(weight.numel() for weight in self.module.parameters()),
                step=self.trainer.global_step,
                attempt=self.number,
                started=self.started,
                ended=datetime.now(timezone.utc),
                stop_reason=stop_reason,
                stop_message=stop_message,
            )
            write_results(self.paths.results, results, by_rename=self.paths.scratch is None)
        return results


def _prepare(
    config: RunConfig,
    paths: RunPaths,
    attempt: int,
    ranks: Ranks,
    plan: BatchPlan,
    stop: StopRequest,
    resumed: SavedCheckpoint | None,
) -> _Attempt:
    started = datetime.now(timezone.utc)
    decide_together(ranks, lambda: copy_files(config, paths, attempt))
    data, sample_requests = _open_data(config, ranks, resumed)
    torch.manual_seed(config.seed)
    module = Pretraining(config)
    first_step = resumed.step if resumed else 0
    log = RunLog(config=config, paths=paths, attempt=attempt, first_step=first_step) if ranks.is_first else None
    saver = _saver(config, paths, attempt, ranks, resumed, sample_requests)
    boundary = StepBoundary(
        config=config,
        validation=_validation_loader(config, data, plan, ranks),
        saver=saver,
        log=log,
        stop=stop,
        resumed=resumed,
    )
    return _Attempt(
        config=config,
        paths=paths,
        number=attempt,
        started=started,
        plan=plan,
        data=data,
        module=module,
        boundary=boundary,
        saver=saver,
        trainer=_trainer(config, ranks, plan, boundary, paths),
        loader=_loader(config, data.train, plan, ranks, config.trainer.max_steps),
        resumed=resumed,
        log=log,
    )


def _look_back(config: RunConfig, paths: RunPaths) -> tuple[SavedCheckpoint | None, dict[str, Any] | None]:
    """Return the checkpoint to continue from, and the results of a run that has nothing left to do."""
    resumed = _choose_resume(config, paths)
    if resumed is None or resumed.step < config.trainer.max_steps:
        return resumed, None
    print(
        f"nothing to do: trainer.max_steps={config.trainer.max_steps} and step {resumed.step} is saved; "
        "raise trainer.max_steps to train on",
        flush=True,
    )
    results = read_results(paths.results)
    # Where the attempt that came this far was killed before it wrote its results, this one does.
    return resumed, results if results is not None and results["steps"] == resumed.step else None


def _choose_resume(config: RunConfig, paths: RunPaths) -> SavedCheckpoint | None:
    manager = config.exp_manager
    resumed = choose_resume(
        paths.checkpoints,
        may_be_none=manager.resume_ignore_no_checkpoint,
        may_ignore_damaged=manager.resume_ignore_damaged,
    )
    if resumed is not None and not manager.resume_if_exists:
        raise UserError(
            f"exp_manager.resume_if_exists=false, but {paths.checkpoints} holds checkpoints; "
            f"set it to true to continue from step {resumed.step}, or leave run_id out to start a new run"
        )
    if resumed is not None:
        print(f"resuming from step {resumed.step}: {resumed.path}", flush=True)
    return resumed


def _open_data(config: RunConfig, ranks: Ranks, resumed: SavedCheckpoint | None) -> tuple[GptData, SampleRequests]:
    """Rank 0 tokenizes and builds the sample indices, then all open them."""
    before = resumed.sample_requests if resumed is not None else ()

    def build() -> Any:
        blend = find_prefixes(config)
        open_samples(config, blend, before)
        return blend

    return open_samples(config, decide_together(ranks, build), before)


def _loader(config: RunConfig, samples: Samples, plan: BatchPlan, ranks: Ranks, num_global_batches: int) -> BatchLoader:
    sampler = MicroBatchSampler(plan, ranks.rank, num_global_batches)
    on_gpu = config.hardware.accelerator == "gpu"
    return BatchLoader(samples, sampler, num_workers=config.data.num_workers, pin_memory=on_gpu)


def _validation_loader(config: RunConfig, data: GptData, plan: BatchPlan, ranks: Ranks) -> BatchLoader | None:
    if data.validation is None or config.trainer.limit_val_batches == 0:
        return None
    return _loader(config, data.validation, plan, ranks, config.trainer.limit_val_batches)


def _saver(
    config: RunConfig,
    paths: RunPaths,
    attempt: int,
    ranks: Ranks,
    resumed: SavedCheckpoint | None,
    sample_requests: SampleRequests,
) -> CheckpointSaver | None:
    if not config.exp_manager.create_checkpoint_callback:
        return None
    metadata = {
        "attempt": attempt,
        "world_size": ranks.world_size,
        "sample_requests": sample_requests,
        "versions": versions(),
    }
    return CheckpointSaver(config=config, checkpoints=paths.checkpoints, resumed=resumed, metadata=metadata)


def _trainer(config: RunConfig, ranks: Ranks, plan: BatchPlan, boundary: StepBoundary, paths: RunPaths) -> pl.Trainer:
    strategy, environment = _strategy(config, ranks)
    trainer = pl.Trainer(
        accelerator=config.hardware.accelerator,
        devices=ranks.local_world_size,
        num_nodes=ranks.num_nodes,
        strategy=strategy,
        plugins=[environment],
        precision=config.trainer.precision,
        max_steps=config.trainer.max_steps,
        max_epochs=-1,
        accumulate_grad_batches=plan.accumulate_grad_batches,
        callbacks=[boundary],
        default_root_dir=paths.run_dir,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    keep_own_handlers(trainer)
    return trainer


def _strategy(config: RunConfig, ranks: Ranks) -> tuple[Strategy, ClusterEnvironment]:
    """Return the strategy and an explicit environment: Lightning shall not follow a scheduler's variables it finds."""
    if ranks.world_size == 1:  # where fsdp has nothing to share out
        return OneDevice("cuda:0" if config.hardware.accelerator == "gpu" else "cpu"), LightningEnvironment()
    if config.parallelism.strategy == "fsdp":
        return Sharded(data_parallel_size=ranks.world_size, tensor_parallel_size=1), TorchElasticEnvironment()
    return Replicated(gradient_as_bucket_view=True), TorchElasticEnvironment()


def _refuse_impossible(config: RunConfig) -> None:
    """Refuse what the plan's rules leave to the rank: a rank may be started by hand."""
    if config.trainer.precision == "16-mixed" and config.hardware.accelerator != "gpu":
        raise UserError("trainer.precision=16-mixed needs a GPU; use 32-true")
    if config.trainer.precision == "16-mixed" and config.parallelism.strategy == "fsdp":
        # Lightning's gradient scaler looks for overflows on each rank alone, so ranks would skip different steps.
        raise UserError("trainer.precision=16-mixed cannot be used with parallelism.strategy=fsdp; use bf16-mixed")


def _silence() -> None:
    """Keep the frameworks' banners and advice off the run's log; each filter says why it is right to ignore it."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)  # banners: devices found, tips, "max_steps reached"
    # The loaders read a memory-mapped file; workers are the user's choice (data.num_workers).
    warnings.filterwarnings("ignore", message=".*does not have many workers which may be a bottleneck")
    # Ranks are started by trainwright, under Slurm too.
    warnings.filterwarnings("ignore", message="The `srun` command is available on your system but is not used")
    # Lightning 2.6 uses a name that torch 2.13 deprecates.
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.. is deprecated")
    # torch.distributed.checkpoint says so although it was told to (no_dist).
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one rank and return its exit code: 0 done, 1 failed, 2 the user's input, 75 preempted."""
    parser = argparse.ArgumentParser(prog="python -m trainwright.backends.native.train", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, default=1)
    arguments = parser.parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        record = yaml.safe_load(RunPaths(arguments.run_dir).record(arguments.attempt).read_text(encoding="utf-8"))
        train(RunConfig.from_dict(record["config"]), arguments.run_dir, arguments.attempt)
    except PreemptedError as stopped:
        print(stopped, flush=True)
        return stopped.exit_code
    except UserError as error:
        # Ranks of a node find the same mistakes; each node tells its own, since files may be missing on one of them.
        if ranks_from_environment().local_rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
