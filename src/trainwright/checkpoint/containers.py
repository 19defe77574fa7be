"""The two file formats of weights, as bytes around tensors: torch.save's archive and safetensors.

Sizes are known before any value, so that a tensor's place is known and tensors can be written in any order.
"""

import io
import json
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trainwright.checkpoint.bits import TensorSpec

_ALIGNMENT = 64  # of tensors in an archive, as torch.save has it, so that they can be mapped into memory
_MAX_32, _MAX_16 = 0xFFFFFFFF, 0xFFFF
_FIRST_DAY = 0x21  # 1980-01-01, the earliest date that a zip archive can tell
_ZIP64_VERSION = 45


class Container(Protocol):
    """The bytes of a file besides its tensors."""

    @property
    def specs(self) -> Sequence[TensorSpec]: ...

    @property
    def head(self) -> bytes: ...

    @property
    def starts(self) -> Sequence[int]:
        """Where `before(i)` begins in the file; tensor i follows it."""

    def before(self, index: int, crc32: int) -> bytes: ...

    def tail(self, crc32s: Sequence[int]) -> bytes: ...


def file_bytes(container: Container) -> int:
    """Return the size of the file that `container` describes."""
    num = len(container.specs)
    parts = [len(container.before(index, 0)) + spec.num_bytes for index, spec in enumerate(container.specs)]
    return len(container.head) + sum(parts) + len(container.tail([0] * num))


class Safetensors:
    """A safetensors file: length, JSON, then the values. Source: the format's README, huggingface/safetensors."""

    def __init__(self, tensors: Mapping[str, TensorSpec]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        starts, end = [], 0
        for name, spec in tensors.items():
            starts.append(end)
            end += spec.num_bytes
            header[name] = {"dtype": spec.dtype.code, "shape": spec.shape, "data_offsets": [starts[-1], end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the values begin aligned
        self.specs = list(tensors.values())
        self.head = struct.pack("<Q", len(text)) + text
        self.starts = [len(self.head) + start for start in starts]

    def before(self, index: int, crc32: int) -> bytes:
        return b""

    def tail(self, crc32s: Sequence[int]) -> bytes:
        return b""


class TorchArchive:
    """What torch.save writes: an uncompressed zip archive of a pickle and one record for each tensor.

    Source: torch/serialization.py and caffe2/serialize/inline_container.cc; the tests read it with torch.load.
    """

    def __init__(self, content: Mapping[str, TensorSpec] | TensorSpec) -> None:
        self.specs = [content] if isinstance(content, TensorSpec) else list(content.values())
        self._records: list[_Record] = []
        small = {"data.pkl": _pickled(content), "byteorder": b"little", "version": b"3\n"}
        self.head = b""
        for name, data in small.items():
            record = _Record(name=f"archive/{name}", offset=len(self.head), num_bytes=len(data))
            self._records.append(record)
            self.head += record.local_header(zlib.crc32(data)) + data
        self._small_crc32s = [zlib.crc32(data) for data in small.values()]
        self._end = len(self.head)
        self.starts = []
        for index, spec in enumerate(self.specs):
            record = _Record(name=f"archive/data/{index}", offset=self._end, num_bytes=spec.num_bytes)
            self._records.append(record)
            self.starts.append(self._end)
            self._end += len(record.local_header(0)) + spec.num_bytes

    def before(self, index: int, crc32: int) -> bytes:
        return self._records[len(self._small_crc32s) + index].local_header(crc32)

    def tail(self, crc32s: Sequence[int]) -> bytes:
        all_crc32s = [*self._small_crc32s, *crc32s]
        entries = [record.central_header(crc) for record, crc in zip(self._records, all_crc32s, strict=True)]
        return b"".join(entries) + _end_of_archive(len(entries), sum(map(len, entries)), self._end)


@dataclass(frozen=True, kw_only=True)
class _Record:
    """One stored file of a zip archive. Field names and order: PKWARE's APPNOTE.TXT, 4.3."""

    name: str
    offset: int
    num_bytes: int

    def local_header(self, crc32: int) -> bytes:
        name, is_large = self.name.encode(), self.num_bytes >= _MAX_32
        extra = struct.pack("<HHQQ", 1, 16, self.num_bytes, self.num_bytes) if is_large else b""
        unpadded = self.offset + 30 + len(name) + len(extra) + 4
        padding = -unpadded % _ALIGNMENT
        extra += b"FB" + struct.pack("<H", padding) + b"\0" * padding  # torch's own field for padding
        return struct.pack("<4sH", b"PK\3\4", _ZIP64_VERSION) + self._shared(crc32, name, extra) + name + extra

    def central_header(self, crc32: int) -> bytes:
        name = self.name.encode()
        large = [self.num_bytes] * 2 if self.num_bytes >= _MAX_32 else []
        large += [self.offset] if self.offset >= _MAX_32 else []
        extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
        versions = struct.pack("<4sHH", b"PK\1\2", _ZIP64_VERSION, _ZIP64_VERSION)
        rest = struct.pack("<HHHII", 0, 0, 0, 0, min(self.offset, _MAX_32))
        return versions + self._shared(crc32, name, extra) + rest + name + extra

    def _shared(self, crc32: int, name: bytes, extra: bytes) -> bytes:
        size = min(self.num_bytes, _MAX_32)
        return struct.pack("<HHHHIIIHH", 0, 0, 0, _FIRST_DAY, crc32, size, size, len(name), len(extra))


def _end_of_archive(num_entries: int, directory_bytes: int, directory_start: int) -> bytes:
    end = b""
    if num_entries >= _MAX_16 or directory_start >= _MAX_32 or directory_bytes >= _MAX_32:
        sizes = (num_entries, num_entries, directory_bytes, directory_start)
        end += struct.pack("<4sQHHII4Q", b"PK\6\6", 44, _ZIP64_VERSION, _ZIP64_VERSION, 0, 0, *sizes)
        end += struct.pack("<4sIQI", b"PK\6\7", 0, directory_start + directory_bytes, 1)
    entries = min(num_entries, _MAX_16)
    sizes = (entries, entries, min(directory_bytes, _MAX_32), min(directory_start, _MAX_32))
    return end + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, *sizes, 0)


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    spec: TensorSpec
    key: str


@dataclass(frozen=True, kw_only=True)
class _Storage:
    spec: TensorSpec
    key: str


def _pickled(content: Mapping[str, TensorSpec] | TensorSpec) -> bytes:
    """Return the pickle that torch.save would write for contiguous tensors of these names, shapes and types."""
    import torch
    from torch._utils import _rebuild_tensor_v2

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> object:
            if not isinstance(value, _Storage):
                return None
            num_values = value.spec.num_bytes // value.spec.dtype.item_bytes
            return ("storage", getattr(torch, value.spec.dtype.storage), value.key, "cpu", num_values)

        def reducer_override(self, value: object) -> Any:
            if not isinstance(value, _Tensor):
                return NotImplemented
            storage = _Storage(spec=value.spec, key=value.key)
            strides = _strides(value.spec.shape)
            return _rebuild_tensor_v2, (storage, 0, value.spec.shape, strides, False, OrderedDict())

    if isinstance(content, TensorSpec):
        root: object = _Tensor(spec=content, key="0")
    else:
        root = {name: _Tensor(spec=spec, key=str(index)) for index, (name, spec) in enumerate(content.items())}
    stream = io.BytesIO()
    Pickler(stream, protocol=2).dump(root)
    return stream.getvalue()


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(size, 1))
    return tuple(strides[: len(shape)])
