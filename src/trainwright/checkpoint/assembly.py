"""NxD's shards against the names of a Hugging Face model: where each tensor's slices and their copies lie."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainwright.checkpoint.bits import Bits, Dtype, TensorSpec
from trainwright.checkpoint.naming import ModelShape
from trainwright.checkpoint.nxd_checkpoint import NxdCheckpoint
from trainwright.checkpoint.shards import (
    Degrees,
    Place,
    ShardTensor,
    Slice,
    Stage,
    degree_problems,
    joined_shape,
    places,
    stage_tensors,
)


@dataclass(frozen=True, kw_only=True)
class Copy:
    """One of the ranks that hold a slice."""

    pp_rank: int
    place: Place

    def __str__(self) -> str:
        return f"tp rank {self.place.tp_rank}, pp rank {self.pp_rank}, {self.place.name}"


@dataclass(frozen=True, kw_only=True)
class Block:
    """One slice of a Hugging Face tensor with all its copies, which should be equal."""

    piece: Slice
    copies: Sequence[Copy]


class Assembly:
    """How the tensors of a Hugging Face model are put together from shards. `problems` says why they cannot be."""

    def __init__(
        self, checkpoint: NxdCheckpoint, shape: ModelShape, found: Mapping[str, tuple[int, ...]], *, allow_extra: bool
    ) -> None:
        """`found` holds the shapes of the Hugging Face model's tensors; others are left out or refused."""
        self._checkpoint = checkpoint
        self._stored = {(tp, pp, name): spec for tp, pp, name, spec in checkpoint.tensors()}
        self.degrees = _degrees(checkpoint, shape)
        self.problems = degree_problems(shape, self.degrees, "trn1")
        self.notes: list[str] = []
        self._blocks: dict[str, list[Block]] = defaultdict(list)
        if self.problems:  # what follows would tell of every tensor
            return
        everything = Stage(layers=range(shape.num_layers), is_first=True, is_last=True)
        copies: dict[Slice, list[Copy]] = defaultdict(list)
        expected: set[str] = set()
        absent: set[str] = set()
        for tp_rank in range(self.degrees.tensor_model_parallel_size):
            tensors = stage_tensors(shape, self.degrees, tp_rank, everything, found)
            expected |= {tensor.name for tensor in tensors}
            for tensor in tensors:
                holders = self._holders(tp_rank, tensor, found)
                absent |= set() if holders else {tensor.name}
                for place in places(tp_rank, [tensor], found):
                    copies[place.piece] += [Copy(pp_rank=pp_rank, place=place) for pp_rank in holders]
        for piece in sorted((piece for piece in copies if copies[piece]), key=lambda piece: piece.start):
            self._blocks[piece.tensor].append(Block(piece=piece, copies=copies[piece]))
        self._check_complete(shape, found, absent, allow_extra=allow_extra)
        self._check_left_over(shape, checkpoint.names - expected, allow_extra=allow_extra)

    def blocks(self, name: str) -> list[Block]:
        """Return the slices of a tensor in the order in which they make it up; empty: no shard has it."""
        return self._blocks.get(name, [])

    def values(self, copy: Copy) -> Bits:
        """Return a view of one copy of a slice."""
        stored: Bits = copy.place.of(self._checkpoint.values(copy.place.tp_rank, copy.pp_rank, copy.place.name))
        return stored

    def dtype(self, name: str) -> Dtype:
        """Return the type of a tensor that shards have."""
        copy = self.blocks(name)[0].copies[0]
        return self._stored[copy.place.tp_rank, copy.pp_rank, copy.place.name].dtype

    def _holders(self, tp_rank: int, tensor: ShardTensor, found: Mapping[str, tuple[int, ...]]) -> list[int]:
        """Return the pipeline ranks that hold `tensor`, and note a wrong shape."""
        due = joined_shape(tensor, found)
        ranks = range(self.degrees.pipeline_model_parallel_size)
        holders = [rank for rank in ranks if (tp_rank, rank, tensor.name) in self._stored]
        for rank in holders:
            spec: TensorSpec = self._stored[tp_rank, rank, tensor.name]
            if spec.shape != due:
                self.problems.append(
                    f"{tensor.name} of tp rank {tp_rank} has shape {list(spec.shape)}, the model makes it {list(due)}"
                )
        return holders

    def _check_complete(
        self, shape: ModelShape, found: Mapping[str, tuple[int, ...]], absent: set[str], *, allow_extra: bool
    ) -> None:
        weights = dict(shape.family.weights(shape.num_layers))
        may_lack = {name for name, weight in weights.items() if weight.is_buffer}
        may_lack |= {name for name, weight in weights.items() if weight.tied_to is not None and name not in found}
        may_lack |= found.keys() - weights.keys() if allow_extra else set()
        missing = sorted(absent - may_lack)
        if missing:
            self.problems.append(f"missing on some rank: {', '.join(missing)}")
        for name, blocks in self._blocks.items():
            places_of = [
                (copy.place.tp_rank, copy.pp_rank, copy.place.name) for block in blocks for copy in block.copies
            ]
            types = {self._stored[place].dtype.torch_name for place in places_of}
            if len(types) > 1:
                self.problems.append(f"{name} is of several types: {', '.join(sorted(types))}")

    def _check_left_over(self, shape: ModelShape, left_over: set[str], *, allow_extra: bool) -> None:
        buffers = {name for name, weight in shape.family.weights(shape.num_layers) if weight.is_buffer}
        unknown = sorted(left_over - buffers)
        if left_over & buffers:
            self.notes.append(f"{len(left_over & buffers)} buffers that the base model does not store were left out")
        if unknown and allow_extra:
            self.notes.append(f"not in the base model, left out: {', '.join(unknown)}")
        elif unknown:
            self.problems.append(f"the base model has no place for {', '.join(unknown)}; --allow-extra leaves them out")


def _degrees(checkpoint: NxdCheckpoint, shape: ModelShape) -> Degrees:
    tensor = checkpoint.tensor_model_parallel_size
    fused = {f"{shape.family.layer_prefix.format(0)}{stored.name}" for stored in shape.family.qkv_fused}
    return Degrees(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=checkpoint.pipeline_model_parallel_size,
        kv_replicator=max(1, tensor // shape.num_query_groups),
        fuse_qkv=fused <= checkpoint.names,
    )
