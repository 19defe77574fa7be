"""Hugging Face model directories: config.json, safetensors with or without index. Values are mapped, never loaded."""

import json
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainwright.checkpoint.bits import DTYPES, Bits, TensorSpec
from trainwright.checkpoint.naming import ModelShape, parse_config
from trainwright.checkpoint.output import unfinished_problems
from trainwright.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, kw_only=True)
class _Location:
    file: str
    start: int
    spec: TensorSpec


class HfModel:
    """A model as Hugging Face stores it. Raises UserError with all that is wrong with its files."""

    def __init__(self, directory: Path, key: str) -> None:
        """`key` is the option that named `directory`."""
        self.directory = directory
        config, problems = _read_json(directory / "config.json")
        shape = None
        if config is not None:
            shape, wrong = parse_config(config)
            problems += [f"config.json: {problem}" for problem in wrong]
        self._locations, wrong = _locate(directory)
        problems += wrong + unfinished_problems(directory)
        if problems or shape is None:
            raise UserError("\n".join(f"{key} {directory}: {problem}" for problem in problems))
        self.shape: ModelShape = shape
        self.specs: Mapping[str, TensorSpec] = {name: place.spec for name, place in self._locations.items()}
        self._maps: dict[str, mmap.mmap] = {}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: spec.shape for name, spec in self.specs.items()}

    def values(self, name: str) -> Bits:
        """Return a view of the tensor in its file."""
        place = self._locations[name]
        mapped = self._map(place.file)
        dtype = place.spec.dtype.bits
        if place.spec.num_bytes == 0:
            return np.zeros(place.spec.shape, dtype)
        num_values = place.spec.num_bytes // dtype.itemsize
        return np.frombuffer(mapped, dtype, num_values, place.start).reshape(place.spec.shape)

    def read_ahead(self, name: str) -> None:
        """Have the system read the tensor into its cache in large pieces."""
        place = self._locations[name]
        start = place.start - place.start % mmap.PAGESIZE
        self._map(place.file).madvise(mmap.MADV_WILLNEED, start, place.start + place.spec.num_bytes - start)

    def file_of(self, name: str) -> str:
        """Return the name of the file that holds a tensor."""
        return self._locations[name].file

    def files(self) -> dict[str, int]:
        """Return the weight files with their sizes in bytes."""
        names = sorted({place.file for place in self._locations.values()})
        return {name: (self.directory / name).stat().st_size for name in names}

    def _map(self, file: str) -> mmap.mmap:
        if file not in self._maps:
            with open(self.directory / file, "rb") as stream:
                self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[file]


def _locate(directory: Path) -> tuple[dict[str, _Location], list[str]]:
    """Return where each tensor is, and what is wrong with the files."""
    problems: list[str] = []
    listed: dict[str, str] | None = None  # None: no index, the one file says it all
    if (directory / INDEX).is_file():
        index, problems = _read_json(directory / INDEX)
        listed = dict((index or {}).get("weight_map", {}))
        if not problems and not listed:
            problems.append(f"{INDEX} has no weight_map")
    elif not (directory / SINGLE).is_file():
        pickles = sorted(path.name for path in directory.glob("*.bin")) if directory.is_dir() else []
        hint = f"; {pickles[0]} is a pickle, which is not read: save it as safetensors first" if pickles else ""
        return {}, [f"neither {INDEX} nor {SINGLE} is there{hint}"]
    found: dict[str, _Location] = {}
    for file in sorted(set(listed.values())) if listed is not None else [SINGLE]:
        try:
            tensors = _read_header(directory / file)
        except (OSError, ValueError) as error:
            problems.append(f"{file} cannot be read: {error}")
            continue
        found.update({name: place for name, place in tensors.items() if listed is None or listed.get(name) == file})
        absent = [name for name, where in (listed or {}).items() if where == file and name not in tensors]
        problems += [f"{file} lacks {', '.join(absent)}, which {INDEX} places there"] if absent else []
    return found, problems


def _read_header(path: Path) -> dict[str, _Location]:
    """Return where the tensors of one safetensors file are. Raises ValueError where the file is damaged."""
    with open(path, "rb") as stream:
        file_bytes = os.fstat(stream.fileno()).st_size
        prefix = stream.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else file_bytes
        if header_bytes > file_bytes - 8:
            raise ValueError("it is no safetensors file, or cut short")
        header = json.loads(stream.read(header_bytes))
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{name} has dtype {entry['dtype']}; {', '.join(DTYPES)} are known")
        spec = TensorSpec(dtype=DTYPES[entry["dtype"]], shape=tuple(entry["shape"]))
        start, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
        if end > file_bytes or end - start != spec.num_bytes:
            raise ValueError(f"{name} lies at {start} to {end} of {file_bytes} bytes: the file is cut short or damaged")
        tensors[name] = _Location(file=path.name, start=start, spec=spec)
    return tensors


def _read_json(path: Path) -> tuple[dict[str, Any] | None, list[str]]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"it is no JSON: {error}"
        return None, [f"{path.name}: {reason}"]
    return (content, []) if isinstance(content, dict) else (None, [f"{path.name}: it is no JSON object"])
