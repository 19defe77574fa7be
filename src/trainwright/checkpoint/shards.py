"""Which part of which tensor lies on which rank: pure arithmetic, the same for both directions.

With T tensor-parallel ranks, K key-value heads copied m times and T = K * m, as NxD's rules for trn1 require: rank
r = j * K + i, i < K, holds key-value head i and the query heads i * (H / K) + j * g ... + g - 1, where g = H / T. So
each rank's query heads belong to the key-value head that is with them. The columns of o_proj follow the query heads.
Source: neuronx_distributed, checkpoint_converter.py (SDK 2.29); its pipeline stages: create_partitions.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from trainwright.checkpoint.naming import ModelShape, Stored, Weight

Hardware = Literal["trn1", "trn2"]


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """How a model is spread."""

    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    kv_replicator: int
    fuse_qkv: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A part of a Hugging Face tensor: positions start ... stop - 1 of one dimension."""

    tensor: str
    dimension: int | None  # None: the whole tensor
    start: int
    stop: int

    def of(self, values: Any) -> Any:
        """Return this part of the tensor `values`."""
        if self.dimension is None:
            return values
        return values[(slice(None),) * self.dimension + (slice(self.start, self.stop),)]


@dataclass(frozen=True, kw_only=True)
class ShardTensor:
    """A tensor of one shard: its slices, joined along dimension 0."""

    name: str
    slices: tuple[Slice, ...]
    group: int  # the number of its layer; -1 before the layers, num_layers after them


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What one pipeline stage holds."""

    layers: Sequence[int]
    is_first: bool
    is_last: bool


def stages(num_layers: int, pipeline: int) -> list[Stage]:
    """Return the stages of a model: equal shares of its layers, what is left over in the last ones."""
    share, left_over = divmod(num_layers, pipeline)
    sizes = [share + int(stage >= pipeline - left_over) for stage in range(pipeline)]
    starts = [sum(sizes[:stage]) for stage in range(pipeline)]
    return [
        Stage(layers=range(start, start + size), is_first=stage == 0, is_last=stage == pipeline - 1)
        for stage, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]


def degree_problems(shape: ModelShape, degrees: Degrees, hardware: Hardware) -> list[str]:
    """Return why `shape` cannot be spread like that, each with what would be right."""
    tensor, replicator = degrees.tensor_model_parallel_size, degrees.kv_replicator
    groups, heads = shape.num_query_groups, shape.num_attention_heads
    problems = []
    if tensor != groups * replicator:
        fits = f"--tp {groups * replicator}"
        if tensor % groups == 0:
            fits += f", or --kv-replicator {tensor // groups}"
        problems.append(
            f"--tp: {tensor} is not num_key_value_heads={groups} times --kv-replicator={replicator}; use {fits}"
        )
    sizes = {
        "num_attention_heads": heads,
        "vocab_size": shape.vocab_size,  # NxD pads it nowhere
        "intermediate_size": shape.ffn_hidden_size,
    }
    problems += [
        f"--tp: {tensor} does not divide {name}={size}; use a divisor" for name, size in sizes.items() if size % tensor
    ]
    if degrees.pipeline_model_parallel_size > shape.num_layers:
        problems.append(
            f"--pp: {degrees.pipeline_model_parallel_size} stages for num_hidden_layers={shape.num_layers}; "
            "use at most that"
        )
    if hardware == "trn2" and replicator > 1:
        problems.append(
            f"--hardware: trn2 with --kv-replicator={replicator}: the order of heads that trn2 needs is unverified "
            f"there; use --kv-replicator 1 with --tp {groups}, or --hardware trn1"
        )
    return problems


def stage_tensors(
    shape: ModelShape, degrees: Degrees, tp_rank: int, stage: Stage, found: Mapping[str, tuple[int, ...]]
) -> list[ShardTensor]:
    """Return the tensors of one shard in NxD's order; `found` holds the shapes of the Hugging Face model's tensors.

    A tensor that the family does not know is on all ranks of its layer's stage; one outside the layers on all ranks.
    """
    family = shape.family

    def shard_tensor(stored: Stored, group: int, prefix: str = "") -> ShardTensor:
        slices = (_slice(shape, degrees, tp_rank, part, prefix, found) for part in stored.parts)
        return ShardTensor(name=prefix + stored.name, slices=tuple(slices), group=group)

    def in_layer(stored: Sequence[Stored]) -> Iterator[ShardTensor]:
        for layer in stage.layers:
            for tensor in stored:
                prefix = family.layer_prefix.format(layer)
                if all(prefix + part.name in found or not part.is_buffer for part in tensor.parts):
                    yield shard_tensor(tensor, layer, prefix)

    tensors = [shard_tensor(stored, -1) for stored in family.first] if stage.is_first else []
    tensors += in_layer(family.layer if degrees.fuse_qkv else family.qkv_apart + family.layer)
    tensors += [shard_tensor(stored, shape.num_layers) for stored in family.last] if stage.is_last else []
    tensors += in_layer(family.qkv_fused) if degrees.fuse_qkv else []
    known = {name for name, _ in family.weights(shape.num_layers)}
    for name in (name for name in found if name not in known):
        layer = family.layer_of(name)
        if layer is None or layer in stage.layers:
            whole = Slice(tensor=name, dimension=None, start=0, stop=0)
            group = shape.num_layers if layer is None else layer
            tensors.append(ShardTensor(name=name, slices=(whole,), group=group))
    return tensors


def _slice(
    shape: ModelShape, degrees: Degrees, tp_rank: int, weight: Weight, prefix: str, found: Mapping[str, tuple[int, ...]]
) -> Slice:
    name = prefix + weight.name
    if name not in found and weight.tied_to is not None:
        name = weight.tied_to  # NxD's loader fails without the second table
    tensor = degrees.tensor_model_parallel_size
    copy, group = divmod(tp_rank, shape.num_query_groups)
    first_query = group * shape.num_attention_heads // shape.num_query_groups
    queries_here = shape.num_attention_heads // tensor
    query_start = (first_query + copy * queries_here) * shape.head_size
    query = (query_start, query_start + queries_here * shape.head_size)
    key_value = (group * shape.head_size, (group + 1) * shape.head_size)

    def share(dimension: int) -> tuple[int, int, int]:
        size = shape.shape_of(weight)[dimension] // tensor
        return dimension, tp_rank * size, (tp_rank + 1) * size

    positions: tuple[int | None, int, int]
    if weight.split == "whole":
        positions = (None, 0, 0)
    elif weight.split == "rows":
        positions = share(0)
    elif weight.split == "columns":
        positions = share(1)
    elif weight.split == "query_rows":
        positions = (0, *query)
    elif weight.split == "query_columns":
        positions = (1, *query)
    else:
        positions = (0, *key_value)
    dimension, start, stop = positions
    return Slice(tensor=name, dimension=dimension, start=start, stop=stop)


def slice_shape(piece: Slice, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of that part of a tensor of `shape`."""
    if piece.dimension is None:
        return shape
    return (*shape[: piece.dimension], piece.stop - piece.start, *shape[piece.dimension + 1 :])


def joined_shape(tensor: ShardTensor, found: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of a shard's tensor."""
    shapes = [slice_shape(piece, found[piece.tensor]) for piece in tensor.slices]
    if len(shapes) == 1:
        return shapes[0]
    return (sum(shape[0] for shape in shapes), *shapes[0][1:])


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a slice lies: rows start ... stop - 1 of a shard's tensor; start is None for all of it."""

    tp_rank: int
    name: str
    start: int | None
    stop: int
    piece: Slice

    def of(self, values: Any) -> Any:
        """Return the slice from the shard's tensor `values`."""
        return values if self.start is None else values[self.start : self.stop]


def places(tp_rank: int, tensors: Sequence[ShardTensor], found: Mapping[str, tuple[int, ...]]) -> Iterator[Place]:
    """Yield where each slice of one shard lies."""
    for tensor in tensors:
        if len(tensor.slices) == 1:
            yield Place(tp_rank=tp_rank, name=tensor.name, start=None, stop=0, piece=tensor.slices[0])
            continue
        start = 0
        for piece in tensor.slices:
            stop = start + slice_shape(piece, found[piece.tensor])[0]
            yield Place(tp_rank=tp_rank, name=tensor.name, start=start, stop=stop, piece=piece)
            start = stop
