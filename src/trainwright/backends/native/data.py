"""Batches for a rank: Megatron's order of samples, the same global batches for any number of ranks.

Instruction data (data.kind=sft) is read like plain text, record after record: samples are cut across records, and every
token is trained on, those of prompts too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from trainwright.config import RunConfig
from trainwright.dataset.blend import Blend
from trainwright.dataset.samples import (
    GptData,
    JoinedSamples,
    Samples,
    open_dataset,
    prepare_prefixes,
    requested_samples,
)
from trainwright.dataset.sft_build import build_sft
from trainwright.dataset.tokenizer import load_tokenizer
from trainwright.errors import UserError
from trainwright.plan import multiples_around

Batch = tuple[Tensor, Tensor]  # tokens and labels, both [micro_batch_size, seq_length]
SampleRequests = tuple[tuple[int, int], ...]  # training and validation samples asked for: at first, then at each resume


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """How a global batch is cut: into micro batches, of which each rank takes `accumulate_grad_batches`."""

    micro_batch_size: int
    global_batch_size: int
    data_parallel_size: int

    @property
    def accumulate_grad_batches(self) -> int:
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)


def plan_batches(micro_batch_size: int, global_batch_size: int, data_parallel_size: int) -> BatchPlan:
    """Return the cut of `global_batch_size`; raise UserError where it leaves a remainder."""
    at_once = micro_batch_size * data_parallel_size
    if global_batch_size % at_once:
        raise UserError(
            f"data.global_batch_size={global_batch_size} is not a multiple of data.micro_batch_size={micro_batch_size} "
            f"* {data_parallel_size} data parallel ranks; "
            f"use {multiples_around(global_batch_size, at_once)}"
        )
    return BatchPlan(
        micro_batch_size=micro_batch_size, global_batch_size=global_batch_size, data_parallel_size=data_parallel_size
    )


class MicroBatchSampler(Sampler[list[int]]):
    """The micro batches of one rank: global batch k is samples k * size to (k + 1) * size, for any number of ranks.

    Of each micro_batch_size * ranks samples in a row, a rank takes its own micro_batch_size in a row.
    Source: Megatron's `single` data loader, nemo MegatronPretrainingSampler.
    """

    def __init__(self, plan: BatchPlan, rank: int, num_global_batches: int) -> None:
        self.plan = plan
        self.rank = rank
        self.num_global_batches = num_global_batches
        self.consumed_samples = 0  # where the next iteration starts

    def __len__(self) -> int:
        """Return the micro batches of all global batches, consumed ones too, since a resumed loop counts those."""
        return self.num_global_batches * self.plan.accumulate_grad_batches

    def __iter__(self) -> Iterator[list[int]]:
        at_once = self.plan.micro_batch_size * self.plan.data_parallel_size
        for start in range(self.consumed_samples, self.num_global_batches * self.plan.global_batch_size, at_once):
            own = start + self.rank * self.plan.micro_batch_size
            yield list(range(own, own + self.plan.micro_batch_size))


class BatchLoader(DataLoader[Batch]):
    """Loads a rank's micro batches and, as Lightning's stateful loaders do, remembers how far it came.

    The state is a number of samples, so it holds on another number of ranks.
    """

    def __init__(self, samples: Samples, sampler: MicroBatchSampler, num_workers: int, pin_memory: bool) -> None:
        super().__init__(
            samples,  # type: ignore[arg-type]  # torch asks for its own Dataset class, but only indexes
            batch_sampler=sampler,
            collate_fn=_collate,
            num_workers=num_workers,
            pin_memory=pin_memory,
            # Its own generator: a loader draws a seed when it starts, which must not shift the dropout stream.
            generator=torch.Generator(),
        )
        self._micro_batches = sampler
        self._consumed_samples = 0

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # torch names its own iterator class
        plan = self._micro_batches.plan
        self._consumed_samples = self._micro_batches.consumed_samples
        for batch in super().__iter__():
            self._consumed_samples += plan.micro_batch_size * plan.data_parallel_size
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"consumed_samples": self._consumed_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._micro_batches.consumed_samples = state["consumed_samples"]


def _collate(rows: Sequence[npt.NDArray[np.int64]]) -> Batch:
    tokens = torch.from_numpy(np.stack(rows))
    return tokens[:, :-1], tokens[:, 1:]


def find_prefixes(config: RunConfig) -> Blend:
    """Return the data sets of a run, texts and records tokenized first where that was not done yet."""
    data = config.data
    if data.kind == "sft":
        return _find_records(config)
    if data.text is None and data.data_prefix is None:
        raise UserError(
            f"data.kind={data.kind} cannot be trained by backend=native; use a data group of kind gpt or sft"
        )
    return prepare_prefixes(
        text=data.text or "",
        data_prefix=data.data_prefix,
        splits_string=data.splits_string,
        cache_dir=Path(data.cache_dir),
        tokenizer_type=data.tokenizer.type,
        shuffle_tokens=data.shuffle_tokens,
        seed=config.seed,
        report=lambda line: print(line, flush=True),
    )


def _find_records(config: RunConfig) -> Blend:
    data = config.data
    if data.shuffle_tokens:
        raise UserError("data.shuffle_tokens=true permutes the data set made of data.text; set it to false")
    assert data.train_path is not None
    assert data.val_path is not None
    tokenizer = load_tokenizer(data.tokenizer.type, data.tokenizer.name)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(
            f"model.vocab_size={config.model.vocab_size} is too small: {tokenizer.name} has tokens up to "
            f"{tokenizer.vocab_size - 1}; set model.vocab_size and data.tokenizer.vocab_size to {tokenizer.vocab_size}"
        )
    return build_sft(
        Path(data.train_path),
        Path(data.val_path),
        tokenizer,
        Path(data.cache_dir),
        report=lambda line: print(line, flush=True),
    )


def open_samples(config: RunConfig, blend: Blend, before: SampleRequests) -> tuple[GptData, SampleRequests]:
    """Return the samples of a run and the requests they come from; the first process to call it builds the indices.

    The order of samples depends on how many are asked for. So a resumed run asks as it first did (`before`, from its
    checkpoint, empty for a new run), and one that then goes further continues with a request for what is missing,
    shuffled by the next seed: no raised max_steps changes which samples were seen or were due.
    """
    requests = before or (_first_request(config),)
    parts = [_open_part(config, blend, number, request) for number, request in enumerate(requests)]
    data = _join(parts)
    missing = _missing_samples(config, data)
    if missing != (0, 0):
        requests = (*requests, missing)
        data = _join([*parts, _open_part(config, blend, len(parts), missing)])
    return data, requests


def _first_request(config: RunConfig) -> tuple[int, int]:
    return requested_samples(
        max_steps=config.trainer.max_steps,
        global_batch_size=config.data.global_batch_size,
        val_check_interval=config.trainer.val_check_interval,
        limit_val_batches=config.trainer.limit_val_batches,
    )


def _missing_samples(config: RunConfig, data: GptData) -> tuple[int, int]:
    batch, trainer = config.data.global_batch_size, config.trainer
    validation = trainer.limit_val_batches * batch - len(data.validation) if data.validation is not None else 0
    return max(0, trainer.max_steps * batch - len(data.train)), max(0, validation)


def _open_part(config: RunConfig, blend: Blend, number: int, request: tuple[int, int]) -> GptData:
    data = config.data
    return open_dataset(
        blend,
        splits_string=data.splits_string,
        seq_length=data.seq_length,
        vocab_size=config.model.vocab_size,
        seed=(config.seed + number) % 2**32,
        index_mapping_dir=None if data.index_mapping_dir is None else Path(data.index_mapping_dir),
        num_train_samples=request[0],
        num_validation_samples=request[1],
    )


def _join(parts: Sequence[GptData]) -> GptData:
    first = parts[0]
    if len(parts) == 1:
        return first
    validations = [part.validation for part in parts if part.validation is not None]
    return replace(
        first,
        train=JoinedSamples(parts=[part.train for part in parts]),
        validation=JoinedSamples(parts=validations) if validations else None,
    )
