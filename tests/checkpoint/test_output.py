"""An output is whole or nothing: killed, refused, raced, full or run again."""

import fcntl
import json
import os
import signal
import tempfile
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoint.models import Sizes, convert_and_tell, random_tensors, received, tree, write_model
from trainwright.checkpoint import hf_to_nxd, nxd_to_hf
from trainwright.checkpoint.bits import DTYPES, TensorSpec
from trainwright.checkpoint.containers import Safetensors, file_bytes
from trainwright.checkpoint.hf_model import HfModel
from trainwright.checkpoint.nxd_checkpoint import NxdCheckpoint
from trainwright.checkpoint.output import space_problems
from trainwright.errors import UserError
from trainwright.node.commit import read_commit

READERS = {"hf-to-nxd": NxdCheckpoint, "nxd-to-hf": HfModel}
SIZES = Sizes(key_value_heads=2, replicator=2, layers=4, head_size=8, ffn_per_rank=16, vocab_per_rank=64)


def model(directory: Path, seed: int = 0) -> Path:
    return write_model(directory, SIZES.config(), random_tensors(SIZES, torch.bfloat16, seed))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(["hf-to-nxd", "nxd-to-hf"]), tensors=st.integers(0, 110), then_s=st.floats(0, 0.02))
def test_a_conversion_killed_at_any_moment_and_started_again_equals_an_undisturbed_one(
    processes: ForkServerContext, kind: str, tensors: int, then_s: float
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        hf = model(root / "hf")
        options: dict[str, Any] = {"tensor_model_parallel_size": 4, "layout": "xser"}
        source, convert = hf, hf_to_nxd
        if kind == "nxd-to-hf":
            hf_to_nxd(hf, root / "source", **options)
            source, convert, options = root / "source", nxd_to_hf, {"base": hf, "max_shard_bytes": 10_000}  # type: ignore[assignment]
        convert(source, root / "undisturbed", **options)
        output = root / "killed"
        receiver, sender = processes.Pipe(duplex=False)
        process = processes.Process(target=convert_and_tell, args=(sender, kind, source, output, options))
        process.start()
        sender.close()
        try:
            for _ in range(tensors):
                receiver.recv()
        except EOFError:  # it was done before
            pass
        process.join(then_s)
        process.kill()
        process.join()
        if read_commit(output) is None:  # what is there does not pass for a checkpoint
            with pytest.raises(UserError):
                READERS[kind](output, "--input")
            if (output / "done").exists():  # what NxD goes by
                assert tree(output / "model") == tree(root / "undisturbed" / "model")
        convert(source, output, **options)
        assert tree(output) == tree(root / "undisturbed")


def test_nxds_done_marker_comes_after_all_shards(tmp_path: Path) -> None:
    def done_is_not_there(done: int, total: int) -> None:
        assert not (tmp_path / "nxd" / "done").exists()

    hf_to_nxd(model(tmp_path / "hf"), tmp_path / "nxd", tensor_model_parallel_size=4, report=done_is_not_there)
    assert (tmp_path / "nxd" / "done").exists()


def test_an_output_without_its_commit_is_not_read(tmp_path: Path) -> None:
    hf = model(tmp_path / "hf")
    hf_to_nxd(hf, tmp_path / "nxd", tensor_model_parallel_size=4)
    nxd_to_hf(tmp_path / "nxd", tmp_path / "back", base=hf)
    for kind, output in {"hf-to-nxd": tmp_path / "nxd", "nxd-to-hf": tmp_path / "back"}.items():
        (output / "commit.json").unlink()
        with pytest.raises(UserError, match="it is not complete: it has no commit"):
            READERS[kind](output, "--input")


def test_what_another_conversion_left_unfinished_is_not_mixed_in(tmp_path: Path) -> None:
    """The rest is of other values and of another layout: what it leaves must all be gone."""
    first, second = model(tmp_path / "1", seed=1), model(tmp_path / "2", seed=2)
    hf_to_nxd(first, tmp_path / "nxd", tensor_model_parallel_size=4, layout="xser")
    (tmp_path / "nxd" / "commit.json").write_text("{")  # killed while it committed
    hf_to_nxd(second, tmp_path / "nxd", tensor_model_parallel_size=4)
    hf_to_nxd(second, tmp_path / "clean", tensor_model_parallel_size=4)
    assert tree(tmp_path / "nxd") == tree(tmp_path / "clean")


def test_a_complete_output_is_left_alone(tmp_path: Path) -> None:
    hf = model(tmp_path / "hf")
    hf_to_nxd(hf, tmp_path / "nxd", tensor_model_parallel_size=4)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "nxd").rglob("*")}
    report = hf_to_nxd(hf, tmp_path / "nxd", tensor_model_parallel_size=4)
    assert report.was_complete
    assert report.written_bytes == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "nxd").rglob("*")} == before


def test_a_complete_output_of_other_values_or_degrees_is_not_taken_for_this_one(tmp_path: Path) -> None:
    hf = model(tmp_path / "hf")
    hf_to_nxd(hf, tmp_path / "nxd", tensor_model_parallel_size=4)
    with pytest.raises(UserError, match=r"complete, but made with .*'fuse_qkv': True.* name a new directory"):
        hf_to_nxd(hf, tmp_path / "nxd", tensor_model_parallel_size=4, fuse_qkv=False)
    other = model(tmp_path / "other", seed=5)
    with pytest.raises(UserError, match="complete, but made from other values of 39 tensors"):
        hf_to_nxd(other, tmp_path / "nxd", tensor_model_parallel_size=4)


def test_a_directory_with_files_of_others_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis").write_text("years")
    with pytest.raises(UserError, match="holds files that no conversion made; name a new directory"):
        hf_to_nxd(model(tmp_path / "hf"), tmp_path / "home", tensor_model_parallel_size=4)
    assert (tmp_path / "home" / "thesis").read_text() == "years"


def test_two_conversions_do_not_write_into_one_directory(tmp_path: Path) -> None:
    (tmp_path / "nxd").mkdir()
    marker = os.open(tmp_path / "nxd" / "conversion.json", os.O_RDWR | os.O_CREAT)
    fcntl.flock(marker, fcntl.LOCK_EX)
    try:
        with pytest.raises(UserError, match="another conversion is writing there"):
            hf_to_nxd(model(tmp_path / "hf"), tmp_path / "nxd", tensor_model_parallel_size=4)
    finally:
        os.close(marker)


def test_a_model_that_the_disk_has_no_room_for_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    sizes = Sizes(
        key_value_heads=2, replicator=2, vocab_per_rank=2**36, is_tied=True
    )  # a table of 8 TiB, all of it a hole
    specs = {name: TensorSpec(dtype=DTYPES["BF16"], shape=shape) for name, shape in sizes.shapes().items()}
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(sizes.config()))
    with open(tmp_path / "hf" / "model.safetensors", "wb") as stream:
        stream.write(Safetensors(specs).head)
        stream.truncate(file_bytes(Safetensors(specs)))
    with pytest.raises(UserError, match=r"--output .*: 17592\d{9} bytes are needed, \d+ are free"):
        hf_to_nxd(tmp_path / "hf", tmp_path / "nxd", tensor_model_parallel_size=4)
    assert not (tmp_path / "nxd").exists()


def test_a_full_disk_is_told_in_bytes(tmp_path: Path) -> None:
    (told,) = space_problems(tmp_path / "not" / "there", 2**62)
    assert f"{2**62} bytes are needed, " in told
    assert told.endswith("are free on its disk; free some or name another")
    assert space_problems(tmp_path / "not" / "there", 1) == []


def test_a_conversion_that_fails_in_the_middle_leaves_no_files(tmp_path: Path) -> None:
    class StoppedError(Exception):
        pass

    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        hf_to_nxd(model(tmp_path / "hf"), tmp_path / "nxd", tensor_model_parallel_size=4, report=interrupt)
    assert not any((tmp_path / "nxd").iterdir())


def test_a_file_size_limit_is_a_users_error(tmp_path: Path, processes: ForkServerContext) -> None:
    """A limit of the system stands for the full disk: writing fails with an error of the same kind."""
    hf = model(tmp_path / "hf")
    receiver, sender = processes.Pipe(duplex=False)
    process = processes.Process(target=convert_with_limit, args=(sender, hf, tmp_path / "nxd"))
    process.start()
    told = receiver.recv()
    process.join()
    assert "cannot be written: [Errno 27] File too large" in told
    assert not any((tmp_path / "nxd").iterdir())


def convert_with_limit(connection: Any, source: Path, output: Path) -> None:
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    try:
        hf_to_nxd(source, output, tensor_model_parallel_size=4)
    except UserError as error:
        connection.send(str(error))


@pytest.mark.parametrize("kind", ["hf-to-nxd", "nxd-to-hf"])
def test_memory_does_not_grow_with_the_number_of_layers(
    tmp_path: Path, processes: ForkServerContext, kind: str
) -> None:
    """A layer here has 5 MB, the model 150 MB."""
    sizes = Sizes(key_value_heads=2, replicator=2, head_size=128, ffn_per_rank=256, layers=32)
    hf = write_model(tmp_path / "hf", sizes.config(), random_tensors(sizes, torch.bfloat16))
    options: dict[str, Any] = {"tensor_model_parallel_size": 4}
    source = hf
    if kind == "nxd-to-hf":
        hf_to_nxd(hf, tmp_path / "nxd", **options)
        source, options = tmp_path / "nxd", {"base": hf}
    receiver, sender = processes.Pipe(duplex=False)
    process = processes.Process(target=convert_and_tell, args=(sender, kind, source, tmp_path / "out", options))
    process.start()
    sender.close()
    first, *held = received(receiver)
    process.join()
    assert read_commit(tmp_path / "out") is not None
    assert max(held) - first < 48 * 1024
