"""Writes the newest complete checkpoint as a Hugging Face model: `python -m ...nxdt.export RUN_DIR --attempt N`."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainwright.backends.nxdt.document import backend_of
from trainwright.backends.nxdt.stage import in_terms_of_config, run_stage, say
from trainwright.checkpoint import nxd_to_hf
from trainwright.checkpoint.progress import shown
from trainwright.config import RunConfig
from trainwright.errors import UserError
from trainwright.node import janitor
from trainwright.node.run_paths import RunPaths


def export(config: RunConfig, paths: RunPaths) -> None:
    """Write the model of the newest complete checkpoint, in types, files and names as the fetched model's.

    Exports of older steps stay. Raises UserError where there is no complete checkpoint.
    """
    backend = backend_of(config)
    checkpoint, step = newest(paths.checkpoints)
    output = paths.export(step)
    say(f"step {step} is the newest complete checkpoint: {checkpoint}")
    with _with_remedy(checkpoint, output, backend.model_dir), shown("export") as report:
        done = nxd_to_hf(
            checkpoint,
            output,
            base=Path(backend.model_dir),
            max_shard_bytes=None,
            dtype="base",
            chat_template=config.model.chat_template,
            report=report,
        )
    for note in done.notes:
        say(f"note: {note}")
    if done.was_complete:
        say(f"{output} is there, from the same values")
    else:
        say(f"{output}: {done.num_tensors} tensors, {done.written_bytes / 2**30:.2f} GiB in {done.wall_s:.1f} s")


def newest(checkpoints: Path) -> tuple[Path, int]:
    """Return the complete checkpoint of the largest step. Raises UserError that says why each there does not count."""
    found = janitor.look(checkpoints)
    complete = [(one.step, one.path.stat().st_mtime, one.path) for one in found if one.problem is None and one.step]
    if complete:
        step, _, path = max(complete)
        return path, step
    reasons = [f"{one.path.name}: {one.problem or 'neither its name nor its content tells a step'}" for one in found]
    raise UserError(
        "\n".join(
            [
                f"{checkpoints}: no complete checkpoint is there to export; train first (stages_from=train), with "
                "exp_manager.checkpoint_callback_params.every_n_train_steps at most trainer.max_steps",
                *reasons,
            ]
        )
    )


@contextlib.contextmanager
def _with_remedy(checkpoint: Path, output: Path, base: str) -> Iterator[None]:
    """Name keys of the config in errors, and how to go on where copies of a tensor have come apart in training."""
    try:
        with in_terms_of_config(input="checkpoints", output="export"):
            yield
    except UserError as error:
        if "--on-difference average" not in str(error):
            raise
        paths = f"--input {checkpoint} --output {output} --base {base}"
        command = f"trainwright convert nxd-to-hf {paths} --dtype base --max-shard-size base --on-difference average"
        raise UserError(f"{error}: {command}, then stages=[verify]") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stage and return its exit code: 0 done, 2 the user's input."""
    return run_stage(export, "export", argv)


if __name__ == "__main__":
    sys.exit(main())
