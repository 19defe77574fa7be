"""From a Hugging Face model to NxD's shards."""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from trainwright.checkpoint import convert
from trainwright.checkpoint.bits import Bits, Dtype, DtypeChoice, TensorSpec, cast, chosen
from trainwright.checkpoint.containers import TorchArchive, file_bytes
from trainwright.checkpoint.convert import Report, ReportBytes, Source, Span, Target
from trainwright.checkpoint.hf_model import HfModel
from trainwright.checkpoint.manifest import Manifest
from trainwright.checkpoint.naming import name_problems
from trainwright.checkpoint.nxd_checkpoint import DONE, MARKER_TEXT, STARTED, shard_name
from trainwright.checkpoint.output import claimed, space_problems, standing
from trainwright.checkpoint.references import write_references
from trainwright.checkpoint.shards import (
    Degrees,
    Hardware,
    ShardTensor,
    Slice,
    degree_problems,
    joined_shape,
    slice_shape,
    stage_tensors,
    stages,
)
from trainwright.checkpoint.tensor_file import TensorFile
from trainwright.errors import UserError

Layout = Literal["inline", "xser"]
_CACHED_BYTES = 1 << 22  # rows are cut up a few at a time, so that they come from memory once and not once a rank


def hf_to_nxd(
    source: Path,
    output: Path,
    *,
    tensor_model_parallel_size: int,
    pipeline_model_parallel_size: int = 1,
    kv_replicator: int | None = None,
    fuse_qkv: bool = True,
    layout: Layout = "inline",
    dtype: DtypeChoice = "keep",
    hardware: Hardware = "trn1",
    allow_extra: bool = False,
    workers: int | None = None,
    report: ReportBytes | None = None,
) -> Report:
    """Write the shards of the model in `source` to the new directory `output`.

    `kv_replicator` None: what fits, tensor_model_parallel_size / key-value heads. `workers` None: the cores, 4 at most.
    Raises UserError with all that is wrong before anything is written. A complete `output` is left alone.
    """
    started = time.perf_counter()
    model = HfModel(source, "--input")
    degrees = Degrees(
        tensor_model_parallel_size=tensor_model_parallel_size,
        pipeline_model_parallel_size=pipeline_model_parallel_size,
        kv_replicator=kv_replicator or max(1, tensor_model_parallel_size // model.shape.num_query_groups),
        fuse_qkv=fuse_qkv,
    )
    state, problems = standing(output)
    problems += [f"--input {source}: {p}" for p in name_problems(model.shape, model.shapes, allow_extra=allow_extra)]
    problems += degree_problems(model.shape, degrees, hardware) + _path_problems(output)
    if problems:
        raise UserError("\n".join(problems))
    work = _Work(model, output, degrees, layout, dtype)
    problems = work.problems + ([] if state == "complete" else space_problems(output, work.needed_bytes))
    if problems:
        raise UserError("\n".join(problems))
    manifest = Manifest(
        kind="hf-to-nxd",
        source=source.absolute(),
        source_files=model.files(),
        options={"layout": layout, "dtype": dtype, "hardware": hardware},
        degrees=degrees.to_dict(),
        model=model.shape.to_dict(),
    )
    groups = work.groups()
    if state == "complete":
        manifest.check_complete(output, groups)
    else:
        with claimed(output, manifest.request()):
            (output / STARTED).write_text(MARKER_TEXT)
            work.prepare()
            crc32s = convert.stream(groups, workers=workers or convert.default_workers(), report=report)
            (output / DONE).write_text(MARKER_TEXT)
            manifest.commit(output, groups, crc32s, work.notes)
    wall_s = time.perf_counter() - started
    return manifest.report(output, groups, work.notes, was_complete=state == "complete", wall_s=wall_s)


class _Work:
    """The shards to write, and from what."""

    def __init__(self, model: HfModel, output: Path, degrees: Degrees, layout: Layout, dtype: DtypeChoice) -> None:
        self._model, self._layout, self._dtype = model, layout, dtype
        self._buffers = {
            name for name, weight in model.shape.family.weights(model.shape.num_layers) if weight.is_buffer
        }
        self.problems: list[str] = []
        self._cuts: dict[Slice, Bits] = {}  # what was cut out across rows and is not written yet
        self._shards: dict[Path, list[ShardTensor]] = {}
        found = model.shapes
        for pp_rank, stage in enumerate(stages(model.shape.num_layers, degrees.pipeline_model_parallel_size)):
            for tp_rank in range(degrees.tensor_model_parallel_size):
                path = output / "model" / shard_name(tp_rank, pp_rank)
                self._shards[path] = stage_tensors(model.shape, degrees, tp_rank, stage, found)
                if tp_rank == 0:  # the types are the same on all ranks
                    self.problems += [p for tensor in self._shards[path] for p in self._type_problems(tensor)]
        self.notes = [
            f"{name} is a copy of {weight.tied_to}, to which the model ties it"
            for name, weight in model.shape.family.weights(model.shape.num_layers)
            if weight.tied_to is not None and name not in found
        ]
        self._specs = {
            path: {tensor.name: self._spec(tensor, found) for tensor in tensors}
            for path, tensors in self._shards.items()
        }
        self._files = {path: self._containers(path) for path in self._shards}

    @property
    def needed_bytes(self) -> int:
        return sum(file_bytes(archive) for files in self._files.values() for _, archive in files)

    def prepare(self) -> None:
        """Make the directories, and the small files that only the xser layout has."""
        for path, specs in self._specs.items():
            path.parent.mkdir(exist_ok=True)
            if self._layout == "xser":
                path.with_name(path.name + ".tensors").mkdir()
                write_references(path, specs)

    def groups(self) -> list[convert.Group]:
        targets: dict[int, list[tuple[int, Target]]] = defaultdict(list)
        pieces: dict[str, list[tuple[int, Slice]]] = defaultdict(list)
        for path, tensors in self._shards.items():
            files = [TensorFile(file_path, archive) for file_path, archive in self._files[path]]
            for index, tensor in enumerate(tensors):
                file, position = (files[0], index) if self._layout == "inline" else (files[index], 0)
                target = Target(
                    file=file,
                    index=position,
                    num_bytes=self._specs[path][tensor.name].num_bytes,
                    blocks=partial(self._blocks, tensor),
                    spans=[self._span(piece) for piece in tensor.slices],
                )
                targets[tensor.group].append((index, target))
                for piece in tensor.slices:
                    pieces[piece.tensor].append((tensor.group, piece))
        sources: dict[int, list[Source]] = defaultdict(list)
        for name, uses in pieces.items():
            prepare = partial(self._prepare, name, [piece for _, piece in uses])
            source = Source(name=name, values=partial(self._model.values, name), prepare=prepare)
            sources[min(group for group, _ in uses)].append(source)
        # One tensor after the other rather than one shard: read in order, and writers are in files of their own.
        by_tensor = {
            group: [target for _, target in sorted(held, key=lambda item: item[0])] for group, held in targets.items()
        }
        return convert.in_groups(sources, by_tensor)

    def _span(self, piece: Slice) -> Span | None:
        """Return the bytes of the source that `piece` is, None where it is cut across rows or cast."""
        spec = self._model.specs[piece.tensor]
        if piece.dimension not in (None, 0) or self._chosen(piece.tensor) != spec.dtype:
            return None
        if piece.dimension is None:
            return Span(source=piece.tensor, start=0, num_bytes=spec.num_bytes)
        row_bytes = spec.num_bytes // spec.shape[0]
        return Span(
            source=piece.tensor, start=piece.start * row_bytes, num_bytes=(piece.stop - piece.start) * row_bytes
        )

    def _prepare(self, name: str, pieces: Sequence[Slice]) -> int | None:
        """Have a tensor read, cut it up where that goes across its rows, and sum it up unless its spans will do."""
        self._model.read_ahead(name)
        values = self._model.values(name)
        if all(self._span(piece) is not None for piece in pieces):
            return None
        if any(piece.dimension != 1 for piece in pieces):
            return convert.crc32_of(values)
        cuts = {piece: np.empty(slice_shape(piece, values.shape), values.dtype) for piece in pieces}
        crc32 = 0
        rows = max(1, _CACHED_BYTES // values[:1].nbytes)
        for start in range(0, len(values), rows):
            block = values[start : start + rows]
            crc32 = convert.crc32_of(block, crc32)
            for piece, cut in cuts.items():
                cut[start : start + rows] = piece.of(block)
        self._cuts |= cuts
        return crc32

    def _blocks(self, tensor: ShardTensor) -> list[Bits]:
        blocks = []
        for piece in tensor.slices:
            values = self._cuts.pop(piece) if piece in self._cuts else piece.of(self._model.values(piece.tensor))
            blocks.append(cast(values, self._model.specs[piece.tensor].dtype, self._chosen(piece.tensor)))
        return blocks

    def _chosen(self, name: str) -> Dtype:
        dtype = self._model.specs[name].dtype
        return dtype if name in self._buffers else chosen(dtype, self._dtype)

    def _spec(self, tensor: ShardTensor, found: Mapping[str, tuple[int, ...]]) -> TensorSpec:
        return TensorSpec(dtype=self._chosen(tensor.slices[0].tensor), shape=joined_shape(tensor, found))

    def _type_problems(self, tensor: ShardTensor) -> list[str]:
        types = {piece.tensor: self._chosen(piece.tensor).torch_name for piece in tensor.slices}
        if len(set(types.values())) == 1:
            return []
        listed = ", ".join(f"{name} {dtype}" for name, dtype in types.items())
        return [f"--dtype: keep, but {tensor.name} joins tensors of several types ({listed}); use bf16 or fp32"]

    def _containers(self, path: Path) -> list[tuple[Path, TorchArchive]]:
        specs = self._specs[path]
        if self._layout == "inline":
            return [(path, TorchArchive(specs))]
        folder = path.with_name(path.name + ".tensors")
        return [(folder / f"tensor_{tid}.pt", TorchArchive(spec)) for tid, spec in enumerate(specs.values())]


def _path_problems(output: Path) -> list[str]:
    path = str(output.absolute())
    if "-v" not in path:
        return []
    return [
        f"--output {path}: NxDT cuts a checkpoint's path at the first '-v', to {path.split('-v')[0]}; "
        "use a path without it"
    ]
