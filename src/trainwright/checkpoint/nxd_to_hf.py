"""From NxD's shards to a complete Hugging Face model, with the names and the other files of its base model."""

import json
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trainwright.checkpoint import convert
from trainwright.checkpoint.assembly import Assembly, Block
from trainwright.checkpoint.bits import Bits, Dtype, DtypeChoice, TensorSpec, cast, chosen, largest_difference, mean
from trainwright.checkpoint.containers import Safetensors, file_bytes
from trainwright.checkpoint.convert import Report, ReportBytes, Source, Target
from trainwright.checkpoint.hf_model import INDEX, SINGLE, HfModel
from trainwright.checkpoint.manifest import Manifest
from trainwright.checkpoint.naming import name_problems
from trainwright.checkpoint.nxd_checkpoint import NxdCheckpoint
from trainwright.checkpoint.output import MARKER, claimed, space_problems, standing
from trainwright.checkpoint.tensor_file import TensorFile
from trainwright.errors import UserError
from trainwright.node.commit import COMMIT_FILE

OnDifference = Literal["refuse", "average"]
HfDtype = DtypeChoice | Literal["base"]
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")
_TEMPLATE, _TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
_SHOWN = 5  # tensors that an error lists


def nxd_to_hf(
    source: Path,
    output: Path,
    *,
    base: Path,
    max_shard_bytes: int | None = 5 * 10**9,
    dtype: HfDtype = "keep",
    on_difference: OnDifference = "refuse",
    chat_template: Path | str | None = None,
    allow_extra: bool = False,
    workers: int | None = None,
    report: ReportBytes | None = None,
) -> Report:
    """Write the checkpoint in `source` to the new directory `output` as a model like `base`.

    `max_shard_bytes` None: each tensor in the file where the base has it. `dtype` "base": each in the base's type.
    `on_difference`: what to do where copies of a tensor differ. `chat_template`: its text or the file that holds it;
    None: the base's, if it has one.
    Raises UserError with all that is wrong before anything is written, and when copies differ and are to be refused;
    nothing stays of an output that is not complete. A complete `output` is left alone.
    """
    started = time.perf_counter()
    checkpoint, model = NxdCheckpoint(source, "--input"), HfModel(base, "--base")
    state, problems = standing(output)
    problems += [f"--base {base}: {p}" for p in name_problems(model.shape, model.shapes, allow_extra=allow_extra)]
    template, unreadable = _read_template(chat_template, base)
    if problems or unreadable:
        raise UserError("\n".join(problems + unreadable))
    assembly = Assembly(checkpoint, model.shape, model.shapes, allow_extra=allow_extra)
    if assembly.problems:
        raise UserError("\n".join(f"--input {source}: {problem}" for problem in assembly.problems))
    work = _Work(checkpoint, model, assembly, output, max_shard_bytes, dtype)
    problems = [] if state == "complete" else space_problems(output, work.needed_bytes)
    if problems:
        raise UserError("\n".join(problems))
    manifest = Manifest(
        kind="nxd-to-hf",
        source=checkpoint.root.absolute(),
        source_files=checkpoint.files(),
        options={
            "base": str(base.absolute()),
            "max_shard_bytes": max_shard_bytes,
            "dtype": dtype,
            "on_difference": on_difference,
            "chat_template": template,
        },
        degrees=assembly.degrees.to_dict(),
        model=model.shape.to_dict(),
    )
    groups = work.groups()
    if state == "complete":
        manifest.check_complete(output, groups)
    else:
        with claimed(output, manifest.request()):
            crc32s = convert.stream(groups, workers=workers or convert.default_workers(), report=report)
            work.settle_differences(on_difference)
            work.write_other_files(template)
            manifest.commit(output, groups, crc32s, work.notes)
    wall_s = time.perf_counter() - started
    return manifest.report(output, groups, work.notes, was_complete=state == "complete", wall_s=wall_s)


class _Work:
    """The files to write, and from what."""

    def __init__(
        self,
        checkpoint: NxdCheckpoint,
        model: HfModel,
        assembly: Assembly,
        output: Path,
        max_shard_bytes: int | None,
        dtype: HfDtype,
    ) -> None:
        self._checkpoint, self._model, self._assembly, self._output = checkpoint, model, assembly, output
        self._dtype: HfDtype = dtype
        self._lock = threading.Lock()
        self._differences: dict[str, float] = {}
        weights = dict(model.shape.family.weights(model.shape.num_layers))
        self._buffers = {name for name, weight in weights.items() if weight.is_buffer}
        in_order = [name for name in weights if name in model.specs]
        in_order += [name for name in model.specs if name not in weights]
        specs = {name: TensorSpec(dtype=self._chosen(name), shape=model.specs[name].shape) for name in in_order}
        self._files = (
            _in_files(specs, max_shard_bytes)
            if max_shard_bytes is not None
            else _as_in_base(specs, {name: model.file_of(name) for name in specs})
        )
        from_base = sum(not assembly.blocks(name) for name in in_order)
        taken = [f"{from_base} tensors that no shard holds are the base model's"] if from_base else []
        self.notes: list[str] = [*assembly.notes, *taken]

    @property
    def needed_bytes(self) -> int:
        return sum(file_bytes(Safetensors(specs)) for specs in self._files.values())

    def groups(self) -> list[convert.Group]:
        targets: dict[int, list[Target]] = defaultdict(list)
        for file_name, specs in self._files.items():
            file = TensorFile(self._output / file_name, Safetensors(specs))
            for index, (name, spec) in enumerate(specs.items()):
                blocks = partial(self._values, name)
                targets[self._group(name)].append(
                    Target(file=file, index=index, num_bytes=spec.num_bytes, blocks=blocks)
                )
        sources: dict[int, list[Source]] = defaultdict(list)
        for tp_rank, pp_rank, name, _ in self._checkpoint.tensors():
            values = partial(self._checkpoint.values, tp_rank, pp_rank, name)
            source = Source(name=f"tp {tp_rank} pp {pp_rank} {name}", values=values, prepare=partial(_crc32, values))
            sources[self._group(name)].append(source)
        return convert.in_groups(sources, targets)

    def settle_differences(self, choice: OnDifference) -> None:
        """Raise UserError where copies differed and that is to be refused; note it otherwise."""
        if not self._differences:
            return
        largest = sorted(self._differences.items(), key=lambda item: -item[1])
        listed = ", ".join(f"{name} by up to {difference:.3g}" for name, difference in largest[:_SHOWN])
        told = f"the copies of {len(largest)} tensors differ between ranks: {listed}"
        if choice == "refuse":
            raise UserError(f"--input {self._checkpoint.root}: {told}; --on-difference average takes their mean")
        self.notes.append(f"{told}; their mean was taken")

    def write_other_files(self, template: str | None) -> None:
        """Write the index, the configuration, and copies of what else the base model has, with `template` if given."""
        base = self._model.directory
        if list(self._files) != [SINGLE]:
            weight_map = {name: file for file, specs in self._files.items() for name in specs}
            total = sum(spec.num_bytes for specs in self._files.values() for spec in specs.values())
            _write_json(self._output / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        for path in sorted(base.iterdir()):
            is_ours = path.name in (MARKER, COMMIT_FILE)
            if (
                path.is_file()
                and not path.name.startswith(".")
                and not is_ours
                and not path.name.endswith(_WEIGHT_FILES)
            ):
                shutil.copyfile(path, self._output / path.name)
        self._write_config()
        if template is not None:
            (self._output / _TEMPLATE).write_text(template, encoding="utf-8")
            tokenizer = json.loads((base / _TOKENIZER_CONFIG).read_bytes())
            _write_json(self._output / _TOKENIZER_CONFIG, {**tokenizer, "chat_template": template})

    def _write_config(self) -> None:
        """Correct the type of the weights, where the base's configuration tells another."""
        config = json.loads((self._model.directory / "config.json").read_bytes())
        key = "dtype" if "dtype" in config else "torch_dtype"
        weight = next(name for file in self._files.values() for name in file if name not in self._buffers)
        written = self._chosen(weight).torch_name
        if self._model.specs[weight].dtype.torch_name != written:
            _write_json(self._output / "config.json", {**config, key: written})

    def _group(self, name: str) -> int:
        shape = self._model.shape
        layer = shape.family.layer_of(name)
        if layer is not None:
            return layer
        return -1 if name in {stored.name for stored in shape.family.first} else shape.num_layers

    def _chosen(self, name: str) -> Dtype:
        if not self._assembly.blocks(name):
            return self._model.specs[name].dtype
        if self._dtype == "base":
            return self._model.specs[name].dtype
        stored = self._assembly.dtype(name)
        return stored if name in self._buffers else chosen(stored, self._dtype)

    def _values(self, name: str) -> list[Bits]:
        """Return a tensor's values in pieces that follow each other."""
        blocks = self._assembly.blocks(name)
        if not blocks:
            return [self._model.values(name)]
        stored = self._assembly.dtype(name)
        parts = [cast(self._merged(name, block, stored), stored, self._chosen(name)) for block in blocks]
        is_split_across_columns = blocks[0].piece.dimension == 1
        return [np.concatenate(parts, axis=1)] if is_split_across_columns else parts

    def _merged(self, name: str, block: Block, dtype: Dtype) -> Bits:
        """Return the one value of a slice's copies: their mean where they differ, which is noted."""
        copies = [self._assembly.values(copy) for copy in block.copies]
        differing = [copy for copy in copies[1:] if not np.array_equal(copies[0], copy)]
        if not differing:
            return copies[0]
        difference = max(largest_difference(copies[0], copy, dtype) for copy in differing)
        with self._lock:
            self._differences[name] = max(difference, self._differences.get(name, 0.0))
        return mean(copies, dtype)


def _crc32(values: Callable[[], Bits]) -> int:
    return convert.crc32_of(values())


def _in_files(specs: Mapping[str, TensorSpec], max_bytes: int) -> dict[str, dict[str, TensorSpec]]:
    """Return the tensors of each file by the file's name: in order, as many as fit, one at least."""
    files: list[dict[str, TensorSpec]] = [{}]
    room = max_bytes
    for name, spec in specs.items():
        if files[-1] and spec.num_bytes > room:
            files.append({})
            room = max_bytes
        files[-1][name] = spec
        room -= spec.num_bytes
    ordered = [_aligned(file) for file in files]
    if len(ordered) == 1:
        return {SINGLE: ordered[0]}
    return {f"model-{index:05d}-of-{len(ordered):05d}.safetensors": file for index, file in enumerate(ordered, 1)}


def _as_in_base(specs: Mapping[str, TensorSpec], file_of: Mapping[str, str]) -> dict[str, dict[str, TensorSpec]]:
    """Return the tensors of each file by the file's name, as the base model has them."""
    files: dict[str, dict[str, TensorSpec]] = {name: {} for name in sorted(set(file_of.values()))}
    for name, spec in specs.items():
        files[file_of[name]][name] = spec
    return {name: _aligned(file) for name, file in files.items()}


def _aligned(file: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return the tensors with wide values first, so that all lie aligned."""
    return dict(sorted(file.items(), key=lambda item: -item[1].dtype.item_bytes))


def _read_template(template: Path | str | None, base: Path) -> tuple[str | None, list[str]]:
    if template is None:
        return None, []
    if not (base / _TOKENIZER_CONFIG).is_file():
        named = template if isinstance(template, Path) else f"of {len(template)} characters"
        return None, [f"--chat-template {named}: --base {base} has no {_TOKENIZER_CONFIG} to put it into"]
    if isinstance(template, str):
        return template, []
    try:
        return template.read_text(encoding="utf-8"), []
    except (OSError, UnicodeDecodeError) as error:
        return None, [f"--chat-template {template}: cannot be read: {error}"]


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
