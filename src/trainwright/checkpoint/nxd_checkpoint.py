"""NxD's checkpoint directories: their files, and reading them. A pickle is read as plain tensors or refused."""

import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainwright.checkpoint.bits import TORCH_DTYPES, Bits, TensorSpec, from_torch
from trainwright.checkpoint.output import unfinished_problems
from trainwright.errors import UserError

REFERENCE_MODULE, REFERENCE_CLASS = "torch_xla.utils.serialization", "TensorReference"
STARTED, DONE = "checkpoint", "done"  # NxD's markers: the first and the last file that it writes
MARKER_TEXT = "1"
_SHARD = re.compile(r"dp_rank_(\d+)_tp_rank_(\d+)_pp_rank_(\d+)\.pt")


def shard_name(tp_rank: int, pp_rank: int) -> str:
    """Return the name of a shard's file."""
    return f"dp_rank_00_tp_rank_{tp_rank:02d}_pp_rank_{pp_rank:02d}.pt"


class TensorReference:
    """Stands for torch_xla's class of that name: `tid` is the number of the file that holds the tensor."""

    tid: int


@dataclass(frozen=True, kw_only=True)
class _Stored:
    spec: TensorSpec
    content: Any  # a mapped torch tensor, or the path of the file that holds it alone


class NxdCheckpoint:
    """All shards of a checkpoint. Raises UserError with all that is wrong with its files."""

    def __init__(self, directory: Path, key: str) -> None:
        """`directory` is the checkpoint or its model/; `key` is the option that named it."""
        is_root = (directory / "model").is_dir()
        self.root = directory if is_root or directory.name != "model" else directory.parent
        self.model = directory / "model" if is_root else directory
        ranks, problems = _find_shards(self.root, self.model)
        self._shards: dict[tuple[int, int], dict[str, _Stored]] = {}
        for tp_rank, pp_rank in ranks if not problems else []:
            path = self.model / shard_name(tp_rank, pp_rank)
            try:
                self._shards[tp_rank, pp_rank] = dict(_read_shard(path))
            except (OSError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
                problems.append(f"{path.name}: {_first_line(error)}")
        if problems:
            raise UserError("\n".join(f"{key} {directory}: {problem}" for problem in problems))
        self.tensor_model_parallel_size = 1 + max(tp for tp, _ in ranks)
        self.pipeline_model_parallel_size = 1 + max(pp for _, pp in ranks)

    @property
    def names(self) -> set[str]:
        return {name for tensors in self._shards.values() for name in tensors}

    def layout(self) -> str:
        stored = (tensor.content for tensors in self._shards.values() for tensor in tensors.values())
        return "xser" if any(isinstance(content, Path) for content in stored) else "inline"

    def tensors(self) -> Iterator[tuple[int, int, str, TensorSpec]]:
        """Yield tp rank, pp rank, name and form of each tensor."""
        for (tp_rank, pp_rank), tensors in self._shards.items():
            for name, stored in tensors.items():
                yield tp_rank, pp_rank, name, stored.spec

    def values(self, tp_rank: int, pp_rank: int, name: str) -> Bits:
        """Return the bits of a tensor, mapped from its file."""
        stored = self._shards[tp_rank, pp_rank][name]
        if not isinstance(stored.content, Path):
            return from_torch(stored.content)
        tensor = _load(stored.content)
        if _spec(name, tensor) != stored.spec:
            raise UserError(f"{stored.content} does not hold what the info file beside {name}'s shard says")
        return from_torch(tensor)

    def files(self) -> dict[str, int]:
        """Return all files below model/ with their sizes in bytes."""
        paths = sorted(path for path in self.model.rglob("*") if path.is_file())
        return {path.relative_to(self.model).as_posix(): path.stat().st_size for path in paths}


def _find_shards(root: Path, model: Path) -> tuple[list[tuple[int, int]], list[str]]:
    """Return the (tp, pp) ranks of the shards, and why they are no whole checkpoint."""
    files = sorted(path.name for path in model.glob("*.pt")) if model.is_dir() else []
    parsed = {name: _SHARD.fullmatch(name) for name in files}
    strange = [name for name, match in parsed.items() if match is None and not name.endswith(".info.pt")]
    matches = [match for match in parsed.values() if match is not None]
    ranks = sorted({(int(match.group(2)), int(match.group(3))) for match in matches})
    problems = unfinished_problems(root)
    if (root / STARTED).exists() and not (root / DONE).exists():
        problems.append(f"it has no `{DONE}` file: the save was interrupted; use an older checkpoint")
    if strange:
        problems.append(f"{', '.join(strange)}: no shard of NxD's names; {shard_name(0, 0)} is one")
    if not ranks:
        return [], [*problems, f"no shards such as {shard_name(0, 0)} are there"]
    grid = [(tp, pp) for tp in range(1 + max(ranks)[0]) for pp in range(1 + max(pp for _, pp in ranks))]
    missing = [shard_name(*rank) for rank in grid if rank not in ranks]
    problems += [f"missing: {', '.join(missing)}"] if missing else []
    return ranks, problems


def _read_shard(path: Path) -> Iterator[tuple[str, _Stored]]:
    import torch

    allowed: list[Any] = [(TensorReference, f"{REFERENCE_MODULE}.{REFERENCE_CLASS}")]
    with torch.serialization.safe_globals(allowed):
        content = _load(path)
    if not isinstance(content, Mapping):
        raise ValueError(f"it holds a {type(content).__name__}, not tensors by name")
    references = {name: value for name, value in content.items() if isinstance(value, TensorReference)}
    info: dict[int, Any] = {}
    if references:
        info_path = path.with_name(path.name + ".info.pt")
        if not info_path.exists():
            raise ValueError(f"it refers to tensors, but {info_path.name} is missing; NxD cannot read it either")
        info = _load(info_path)
    for name, value in content.items():
        if name in references:
            entry = info[value.tid]
            spec = TensorSpec(dtype=_dtype(name, entry["dtype"]), shape=tuple(entry["shape"]))
            place = path.with_name(path.name + ".tensors") / f"tensor_{value.tid}.pt"
            if not place.is_file():
                raise ValueError(f"{place.parent.name}/{place.name} is missing")
            yield name, _Stored(spec=spec, content=place)
        else:
            yield name, _Stored(spec=_spec(name, value), content=value)


def _load(path: Path) -> Any:
    """Return what a file of torch.save holds, tensors mapped; code in it is refused, never run."""
    import torch

    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def _spec(name: str, value: Any) -> TensorSpec:
    import torch

    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} is a {type(value).__name__}, not a tensor")
    return TensorSpec(dtype=_dtype(name, value.dtype), shape=tuple(value.shape))


def _dtype(name: str, torch_dtype: Any) -> Any:
    torch_name = str(torch_dtype).removeprefix("torch.")
    if torch_name not in TORCH_DTYPES:
        raise ValueError(f"{name} has dtype {torch_name}; {', '.join(TORCH_DTYPES)} are known")
    return TORCH_DTYPES[torch_name]


def _first_line(error: Exception) -> str:
    """torch explains over many lines how to run untrusted code; the reason is in one of them."""
    text = str(error)
    refused = re.search(r"(?:Unsupported (?:global|class|operand|load)|GLOBAL)[^\n]*", text)
    if isinstance(error, pickle.UnpicklingError):
        detail = refused.group(0) if refused else text.splitlines()[0]
        return f"it is a pickle of more than plain tensors and is not read ({detail})"
    return text.splitlines()[0] if text else type(error).__name__
