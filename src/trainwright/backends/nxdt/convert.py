"""Writes the fetched model as NxD's shards: `python -m trainwright.backends.nxdt.convert RUN_DIR --attempt N`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from trainwright.backends.nxdt.document import backend_of
from trainwright.backends.nxdt.fetch import model_request, shards_of_another_model
from trainwright.backends.nxdt.stage import in_terms_of_config, run_stage, say
from trainwright.checkpoint import hf_to_nxd
from trainwright.checkpoint.progress import shown
from trainwright.config import RunConfig
from trainwright.errors import UserError
from trainwright.fetch.model import other_origin
from trainwright.node.run_paths import RunPaths


def convert(config: RunConfig, paths: RunPaths) -> None:
    """Have the shards that training starts from, spread as the run's config says.

    Raises UserError where the shards that are there were made otherwise or from another model.
    """
    backend, parallelism = backend_of(config), config.parallelism
    source, output = Path(backend.model_dir), Path(backend.pretrained_dir)
    other = other_origin(model_request(config)) or shards_of_another_model(config)
    if other is not None:
        raise UserError(other)
    with in_terms_of_config(), shown("convert") as report:
        done = hf_to_nxd(
            source,
            output,
            tensor_model_parallel_size=parallelism.tensor_model_parallel_size,
            pipeline_model_parallel_size=parallelism.pipeline_model_parallel_size,
            kv_replicator=parallelism.kv_replicator,
            fuse_qkv=backend.fuse_qkv,
            layout="xser",  # as NxDT's own checkpoints are: constants.py
            hardware=config.hardware.neuron_generation,
            report=report,
        )
    for note in done.notes:
        say(f"note: {note}")
    if done.was_complete:
        say(f"backend.pretrained_dir: {output} is there, from the same values")
    else:
        gib = done.written_bytes / 2**30
        say(f"backend.pretrained_dir: {output}: {done.num_tensors} tensors, {gib:.2f} GiB in {done.wall_s:.1f} s")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stage and return its exit code: 0 done, 2 the user's input."""
    return run_stage(convert, "convert", argv)


if __name__ == "__main__":
    sys.exit(main())
