"""torch, zip tools and safetensors read what the two containers describe, beyond 4 GiB too."""

import json
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from trainwright.checkpoint.bits import DTYPES, Dtype, TensorSpec
from trainwright.checkpoint.containers import Container, Safetensors, TorchArchive, file_bytes
from trainwright.checkpoint.tensor_file import TensorFile


def spec(*shape: int, dtype: str = "F32") -> TensorSpec:
    return TensorSpec(dtype=DTYPES[dtype], shape=shape)


def write(path: Path, container: Container, order: list[int]) -> TensorFile:
    """Write tensors that count up from their index."""
    file = TensorFile(path, container)
    for index in order:
        described = container.specs[index]
        num_values = described.num_bytes // described.dtype.item_bytes
        file.write(index, [np.arange(index, index + num_values, dtype=described.dtype.bits).reshape(described.shape)])
    return file


SPECS = {"a": spec(3, 5), "scalar": spec(), "empty": spec(0, 4), "half": spec(2, 3, 4, dtype="F16")}


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_torch_loads_an_archive_whatever_the_order_of_writing(tmp_path: Path, order: list[int]) -> None:
    write(tmp_path / "x.pt", TorchArchive(SPECS), order)
    for is_mapped in (False, True):
        loaded = torch.load(tmp_path / "x.pt", weights_only=True, mmap=is_mapped)
        assert list(loaded) == list(SPECS)
        assert loaded["a"].view(torch.int32).tolist() == torch.arange(15).reshape(3, 5).tolist()
        assert (loaded["scalar"].shape, loaded["scalar"].view(torch.int32).item()) == ((), 1)
        assert loaded["empty"].shape == (0, 4)
        assert loaded["half"].dtype == torch.float16
        assert loaded["half"].view(torch.int16).flatten().tolist() == list(range(3, 27))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: dtype.code)
def test_every_type_keeps_its_name_in_both_formats(tmp_path: Path, dtype: Dtype) -> None:
    described = TensorSpec(dtype=dtype, shape=(1,))
    write(tmp_path / "x.pt", TorchArchive(described), [0])
    write(tmp_path / "x.safetensors", Safetensors({"x": described}), [0])
    expected = getattr(torch, dtype.torch_name)
    assert torch.load(tmp_path / "x.pt", weights_only=True).dtype == expected
    assert load_file(tmp_path / "x.safetensors")["x"].dtype == expected


def test_a_shard_has_the_records_that_torch_save_writes_aligned_and_checksummed(tmp_path: Path) -> None:
    write(tmp_path / "x.pt", TorchArchive(SPECS), [0, 1, 2, 3])
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        assert archive.testzip() is None
        content = (tmp_path / "x.pt").read_bytes()
        for record in (info for info in archive.infolist() if "/data/" in info.filename):
            lengths = np.frombuffer(content, "<u2", 2, record.header_offset + 26)
            assert (record.header_offset + 30 + int(lengths.sum())) % 64 == 0


@pytest.mark.parametrize("container", [TorchArchive(SPECS), Safetensors(SPECS)], ids=["torch", "safetensors"])
def test_the_size_and_the_checksum_are_known_without_reading_the_file(tmp_path: Path, container: Container) -> None:
    file = write(tmp_path / "x", container, [2, 0, 3, 1])
    content = (tmp_path / "x").read_bytes()
    assert file_bytes(container) == len(content)
    assert file.crc32 == zlib.crc32(content)


def test_a_safetensors_header_is_aligned_json(tmp_path: Path) -> None:
    container = Safetensors(SPECS)
    assert len(container.head) % 8 == 0
    assert json.loads(container.head[8:])["__metadata__"] == {"format": "pt"}


def test_records_and_archives_beyond_4_gib_are_read(tmp_path: Path) -> None:
    content = {"small": spec(16), "large": spec(5 * 2**28), "after": spec(16)}  # 5 GiB between two small ones
    archive, path = TorchArchive(content), tmp_path / "large.pt"
    size = file_bytes(archive)
    with open(path, "wb") as stream:  # with a hole in place of the values
        stream.write(archive.head)
        for index in range(3):
            stream.seek(archive.starts[index])
            stream.write(archive.before(index, 0))
        stream.write(np.arange(16, dtype="<u4").tobytes())
        stream.seek(size - len(archive.tail([0, 0, 0])))
        stream.write(archive.tail([0, 0, 0]))
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert loaded["large"].shape == (5 * 2**28,)
    assert loaded["after"].view(torch.int32).tolist() == list(range(16))
    with zipfile.ZipFile(path) as zipped:
        assert zipped.getinfo("archive/data/1").file_size == 5 * 2**30
