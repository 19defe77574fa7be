"""Compared with TensorBoard's own reader, on files that its real writers wrote."""

import math
import os
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.tensorflow_stub import pywrap_tensorflow
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util.tensor_util import make_ndarray, make_tensor_proto
from torch.utils.tensorboard import SummaryWriter

from trainwright.node.tfevents import Point, ScalarReader, masked_crc32c


def write(folder: Path, steps: int, *, new_style: bool = False, text: str = "") -> Path:
    """Write two tags a step with torch's writer, `text` in between; return the file."""
    with SummaryWriter(str(folder)) as writer:
        for step in range(steps):
            writer.add_scalar("reduced_train_loss", 1 / (step + 1), step, walltime=1.7e9 + step, new_style=new_style)
            if text:
                writer.add_text("note", text, step)
            writer.add_scalar("train_step_timing in s", step * 1e9, step, walltime=1.8e9 + step, new_style=new_style)
    (path,) = folder.glob("events.out.tfevents.*")
    return path


def by_tensorboard(path: Path) -> set[Point]:
    """Return the scalars that TensorBoard's own reader finds in a file."""
    accumulator = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    scalars = {
        Point(tag, point.step, point.wall_time, point.value)
        for tag in accumulator.Tags()["scalars"]
        for point in accumulator.Scalars(tag)
    }
    tensors = {
        Point(tag, point.step, point.wall_time, float(make_ndarray(point.tensor_proto)))
        for tag in accumulator.Tags()["tensors"]
        for point in accumulator.Tensors(tag)
        if tag != "note/text_summary"
    }
    return scalars | tensors


@pytest.mark.parametrize("new_style", [False, True])
def test_points_are_those_that_tensorboard_reads(tmp_path: Path, new_style: bool) -> None:
    path = write(tmp_path, 20, new_style=new_style, text="a text")
    points = ScalarReader(path).read_new()
    assert len(points) == 40
    assert set(points) == by_tensorboard(path)
    assert [point.step for point in points[::2]] == list(range(20))


def test_numbers_that_are_none_are_read(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        for step, value in enumerate((math.nan, math.inf, -math.inf, -0.5)):
            writer.add_scalar("val_loss", value, step)
    (path,) = tmp_path.iterdir()
    values = [point.value for point in ScalarReader(path).read_new()]
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf, -0.5]


def test_tensors_count_if_they_hold_one_number(tmp_path: Path) -> None:
    tensors = {
        "float": np.float32(0.25),
        "double": np.float64(1e300),
        "vector": np.ones(1, np.float32),
        "text": np.array(b"0.5", dtype=object),
        "count": np.int64(3),
    }
    writer = EventFileWriter(str(tmp_path))
    for tag, value in tensors.items():
        writer.add_event(
            Event(step=-1, summary=Summary(value=[Summary.Value(tag=tag, tensor=make_tensor_proto(value))]))
        )
    raw = make_tensor_proto(np.float32(0))
    raw.ClearField("float_val")
    raw.tensor_content = np.float32(0.75).tobytes()  # as TensorFlow writes it
    writer.add_event(Event(step=5, summary=Summary(value=[Summary.Value(tag="raw", tensor=raw)])))
    writer.close()
    (path,) = tmp_path.iterdir()
    points = [(point.tag, point.step, point.value) for point in ScalarReader(path).read_new()]
    assert points == [("float", -1, 0.25), ("double", -1, 1e300), ("raw", 5, 0.75)]


def test_a_file_is_read_as_it_grows_wherever_it_is_cut(tmp_path: Path) -> None:
    content = write(tmp_path, 2).read_bytes()
    whole = ScalarReader(next(tmp_path.iterdir())).read_new()
    path = tmp_path / "growing"
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        reader = ScalarReader(path)
        first = reader.read_new()
        assert reader.read_new() == []
        path.write_bytes(content)
        assert (first + reader.read_new(), reader.damage) == (whole, None)
    assert len(whole) == 4


def test_room_that_is_not_filled_yet_is_waited_for(tmp_path: Path) -> None:
    path = write(tmp_path, 2)
    content = path.read_bytes()
    reader = ScalarReader(path)
    path.write_bytes(content[:-100] + bytes(100))
    before = reader.read_new()
    path.write_bytes(content)
    assert (len(before) + len(reader.read_new()), reader.damage) == (4, None)


def test_a_damaged_event_is_named_and_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    content = bytearray(path.read_bytes())
    at = content.index(b"reduced_train_loss", content.index(b"reduced_train_loss") + 1)
    content[at] ^= 1
    path.write_bytes(content)
    reader = ScalarReader(path)
    points = reader.read_new()
    assert [(point.tag[0], point.step) for point in points] == [("r", 0), ("t", 0), ("t", 1), ("r", 2), ("t", 2)]
    assert reader.damage is not None
    assert reader.damage.startswith(f"{path}: the record at byte ")
    assert "checksum of its event" in reader.damage


def test_behind_a_damaged_length_nothing_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    start = 12 + length + 4  # of the second record, the first one says which version wrote the file
    content[start] ^= 1
    path.write_bytes(content)
    reader = ScalarReader(path)
    assert (reader.read_new(), reader.read_new()) == ([], [])
    assert reader.damage is not None
    assert f"the record at byte {start} is damaged: the checksum of its length" in reader.damage


def test_a_long_file_comes_in_parts(tmp_path: Path) -> None:
    path = write(tmp_path, 3, text="x" * 1_200_000)
    reader = ScalarReader(path)
    parts = []
    while part := reader.read_new():
        parts.append(len(part))
    assert sum(parts) == 6
    assert len(parts) > 1


def test_a_file_that_was_moved_is_read_on(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    reader = ScalarReader(path)
    assert len(reader.read_new()) == 2
    more = write(tmp_path / "more", 2).read_bytes()
    os.rename(path, tmp_path / "moved")
    assert reader.read_new() == []
    with open(tmp_path / "moved", "ab") as file:
        file.write(more)
    reader.path = tmp_path / "moved"
    assert len(reader.read_new()) == 4


@pytest.mark.parametrize("content", [b"", b"123456789", bytes(range(256)) * 3])
def test_checksums_are_tensorboards(content: bytes) -> None:
    assert masked_crc32c(content) == pywrap_tensorflow.masked_crc32c(content)
