"""How fast `trainwright convert` is next to `cp` of the same bytes, and how much memory it takes.

    python benchmarks/convert.py /path/on/the/disk --model tanuki_8b

Makes a model of random bits, converts it to NxD's shards and back, and copies each result with `cp --reflink=never`.
Every step starts with a cold cache and ends with `sync`. Needs a bit more than twice the model's size on the disk (32
GiB for tanuki_8b), and removes all that it made.

Measured 2026-11-30 on 2 otherwise quiet cores, a local SSD, torch 2.13, tanuki_8b:

hf-to-nxd   18.3 s   cp 18.7 s   ratio 0.97   peak RssAnon 581 MiB
nxd-to-hf   25.6 s   cp 19.0 s   ratio 1.35   peak RssAnon 312 MiB

Both sum up every byte, which cp does not look at, so processor time decides: beside other work (load 2) the same code
had 1.21 and 1.71.
"""

import argparse
import contextlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainwright.checkpoint.bits import DTYPES, Bits, TensorSpec
from trainwright.checkpoint.containers import Safetensors
from trainwright.checkpoint.naming import parse_config
from trainwright.checkpoint.tensor_file import TensorFile

CONFIGS = {
    "tanuki_8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 65024,
    },
    "tanuki_1_layer": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 1,
        "vocab_size": 65024,
    },
}
FILE_BYTES = 5 * 10**9
SAMPLE_EVERY_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="on the disk to measure")
    parser.add_argument("--model", choices=CONFIGS, default="tanuki_1_layer")
    parser.add_argument("--tp", type=int, default=32)
    parser.add_argument("--kv-replicator", type=int, default=4)
    parser.add_argument("--layout", choices=["inline", "xser"], default="inline")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        root = Path(scratch)
        source, shards, model, copy = (root / name for name in ("hf", "nxd", "back", "copy"))
        make_model(source, CONFIGS[options.model])
        print(f"{options.model}: {gib(source):.2f} GiB of weights, {os.cpu_count()} cores", flush=True)
        degrees = ["--tp", str(options.tp), "--kv-replicator", str(options.kv_replicator), "--layout", options.layout]
        there = ["hf-to-nxd", "--input", str(source), "--output", str(shards), *degrees]
        back = ["nxd-to-hf", "--input", str(shards), "--output", str(model), "--base", str(source)]
        converted = convert(there, source, shards)
        hollow(source)
        compare(converted, shards, copy)
        converted = convert(back, shards, model)
        remove(shards)
        compare(converted, model, copy)


@dataclass(frozen=True, kw_only=True)
class Converted:
    """How one conversion went."""

    kind: str
    wall_s: float
    peak_bytes: int  # of anonymous memory


def convert(command: list[str], source: Path, output: Path) -> Converted:
    """Run one conversion as users do."""
    drop_from_cache(source)
    program = ["-c", "from trainwright.cli import main; main()", "convert", *command]
    wall_s, peak_bytes = timed(lambda: run_sampled(program))
    print(
        f"{command[0]}: {gib(output):.2f} GiB in {wall_s:.1f} s, peak RssAnon {peak_bytes / 2**20:.0f} MiB", flush=True
    )
    return Converted(kind=command[0], wall_s=wall_s, peak_bytes=peak_bytes)


def compare(converted: Converted, output: Path, copy: Path) -> None:
    """Copy what a conversion wrote, and print how the two compare."""
    drop_from_cache(output)
    copied_s, _ = timed(lambda: run(["cp", "-r", "--reflink=never", str(output), str(copy)]))
    remove(copy)
    print(f"{converted.kind}: cp {copied_s:.1f} s, ratio {converted.wall_s / copied_s:.2f}", flush=True)


def hollow(model: Path) -> None:
    """Give back the disk space of a model's values, and keep the headers, which are all that a base is read for."""
    for path in model.glob("*.safetensors"):
        size = path.stat().st_size
        with open(path, "r+b") as stream:
            (header_bytes,) = struct.unpack("<Q", stream.read(8))
            stream.truncate(8 + header_bytes)
            stream.truncate(size)


def make_model(directory: Path, sizes: dict[str, int]) -> None:
    """Write a Llama model of random bits in files of at most 5 GB."""
    directory.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", **sizes}
    (directory / "config.json").write_text(json.dumps(config))
    shape, problems = parse_config(config)
    assert shape is not None, problems
    weights = [(name, weight) for name, weight in shape.family.weights(shape.num_layers) if not weight.is_buffer]
    files: list[dict[str, TensorSpec]] = [{}]
    for name, weight in weights:
        spec = TensorSpec(dtype=DTYPES["BF16"], shape=shape.shape_of(weight))
        if sum(held.num_bytes for held in files[-1].values()) + spec.num_bytes > FILE_BYTES:
            files.append({})
        files[-1][name] = spec
    random = np.random.Generator(np.random.SFC64(0))
    weight_map = {}
    for index, specs in enumerate(files, 1):
        name = f"model-{index:05d}-of-{len(files):05d}.safetensors"
        file = TensorFile(directory / name, Safetensors(specs))
        for position, spec in enumerate(specs.values()):
            file.write(position, [random_bits(random, spec)])
        weight_map.update(dict.fromkeys(specs, name))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def random_bits(random: np.random.Generator, spec: TensorSpec) -> Bits:
    return np.frombuffer(random.bytes(spec.num_bytes), spec.dtype.bits).reshape(spec.shape)


def drop_from_cache(directory: Path) -> None:
    """Have the next reader of these files read them from the disk."""
    os.sync()
    for path in (path for path in directory.rglob("*") if path.is_file()):
        with open(path, "rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(work: Callable[[], int]) -> tuple[float, int]:
    started = time.perf_counter()
    result = work()
    os.sync()
    return time.perf_counter() - started, result


def run(command: list[str]) -> int:
    return subprocess.run(command, check=True).returncode


def run_sampled(arguments: list[str]) -> int:
    """Run Python and return the most anonymous memory that it and its children held together, in bytes."""
    process = subprocess.Popen([sys.executable, *arguments], stderr=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(anonymous_bytes(pid) for pid in tree(process.pid)))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=SAMPLE_EVERY_S)
    assert process.returncode == 0, arguments
    return peak


def tree(root: int) -> Iterator[int]:
    """Yield a process and all its descendants."""
    yield root
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{root}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from tree(int(child))


def anonymous_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def gib(directory: Path) -> float:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()) / 2**30


def remove(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    os.sync()


if __name__ == "__main__":
    main()
