"""TensorBoard's event files of a run; those of a killed attempt are cut back to the step that is resumed from."""

import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from trainwright.config import RunConfig
from trainwright.config_exp_manager import WRITER_KEYS
from trainwright.node.run_paths import RunPaths

_EVENT_FILES = "events.out.tfevents.*"
# Where Vertex AI shows a job's event files while it runs, it sets this to that folder of the run directory, as gs://.
_ON_SHOW, _WATCHED = "AIP_TENSORBOARD_LOG_DIR", "logs"
_HPARAMS_TAG = "_hparams_/session_start_info"
# A record is its length, a checksum of the length, the event and a checksum of the event.
# Source: tensorflow/core/lib/io/record_writer.h
_LENGTH = struct.Struct("<Q4x")
_CHECKSUM_BYTES = 4


class TensorBoardLogger:
    """Writes scalars into an event file of the run, and one entry for the HParams page of the run."""

    def __init__(self, config: RunConfig, paths: RunPaths, first_step: int) -> None:
        has_hparams = cut_event_files(paths.run_dir, first_step, in_place=paths.scratch is None)
        given = config.exp_manager.summary_writer_kwargs or {}
        options: dict[str, Any] = {key: given[key] for key in WRITER_KEYS if given.get(key) is not None}
        # The files no longer hold the steps to come; purging makes a TensorBoard that has read them forget them too.
        folder = str(paths.growing / _WATCHED if os.environ.get(_ON_SHOW) else paths.growing)
        self._writer = SummaryWriter(folder, purge_step=first_step + 1 if first_step else None, **options)
        if not has_hparams:
            self._add_hparams(config)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _add_hparams(self, config: RunConfig) -> None:
        # add_hparams would start a run of its own in a directory below; this puts the entry into this run's file.
        metrics = {"train_loss": None, "val_loss": None}
        for summary in hparams(hyperparameters(config), metrics):  # type: ignore[no-untyped-call]
            self._writer._get_file_writer().add_summary(summary)  # type: ignore[no-untyped-call]


def cut_event_files(run_dir: Path, last_step: int, *, in_place: bool = True) -> bool:
    """Cut what was logged after `last_step`, and half-written ends, off all event files; return whether HParams stay.

    A killed attempt has logged steps that the next one logs again, and readers of files would see both. Where files
    cannot be cut `in_place`, on a bucket, they are written anew; nobody else writes them any more.
    """
    has_hparams = False
    for path in sorted([*run_dir.glob(_EVENT_FILES), *run_dir.glob(f"{_WATCHED}/{_EVENT_FILES}")]):
        end = 0
        with path.open("rb") as stream:
            for end_of_record, event in _records(stream):
                if event.step > last_step:
                    break
                end = end_of_record
                has_hparams |= any(value.tag == _HPARAMS_TAG for value in event.summary.value)
        if end < path.stat().st_size:
            if in_place:
                os.truncate(path, end)
            else:
                path.write_bytes(path.read_bytes()[:end])
    return has_hparams


def hyperparameters(config: RunConfig) -> dict[str, Any]:
    """Return what makes one run differ from another, with dots in the keys."""
    sections = ("model", "data", "optim", "trainer", "parallelism", "hardware")
    tree = config.to_dict()
    return {"seed": config.seed, **dict(_flat({section: tree[section] for section in sections}, ""))}


def _records(stream: BinaryIO) -> Iterator[tuple[int, Event]]:
    """Yield each whole event with the offset behind it."""
    while len(header := stream.read(_LENGTH.size)) == _LENGTH.size:
        (length,) = _LENGTH.unpack(header)
        body = stream.read(length + _CHECKSUM_BYTES)
        if length == 0 or len(body) < length + _CHECKSUM_BYTES:
            return
        try:
            event = Event.FromString(body[:length])
        except DecodeError:
            return
        yield stream.tell(), event


def _flat(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value if isinstance(value, (bool, int, float, str)) else str(value)
