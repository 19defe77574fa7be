"""What the programs of the stages share: `python -m trainwright.backends.nxdt.STAGE RUN_DIR --attempt N`."""

import argparse
import contextlib
import importlib.util
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from trainwright import registry
from trainwright.config import RunConfig
from trainwright.errors import EXIT_FAILED, EXIT_PREEMPTED, UserError
from trainwright.node.run_paths import RunPaths

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)  # from the worker: cancelled, or shortly before the time limit
_PACKAGES = ("fsspec", "huggingface_hub", "numpy", "torch", "transformers")
# Where the options of `trainwright convert`, which its messages name, come from in a run.
_KEYS = {
    "--input": "backend.model_dir",
    "--output": "backend.pretrained_dir",
    "--base": "backend.model_dir",
    "--tp": "parallelism.tensor_model_parallel_size",
    "--pp": "parallelism.pipeline_model_parallel_size",
    "--kv-replicator": "parallelism.kv_replicator",
    "--hardware": "hardware",
    "--chat-template": "model.chat_template",
}


def run_stage(work: Callable[[RunConfig, RunPaths], str | None], stage: str, argv: Sequence[str] | None) -> int:
    """Read the record of the attempt that `argv` names, do the work and return the exit code.

    What the work returns, or why it cannot be done, becomes the reason that the run's status shows.
    """
    parser = argparse.ArgumentParser(prog=f"python -m trainwright.backends.nxdt.{stage}")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, default=1)
    arguments = parser.parse_args(argv)
    for number in _STOP_SIGNALS:
        signal.signal(number, _stop)
    try:
        config = RunConfig.from_dict(registry.read_record(arguments.run_dir, arguments.attempt)["config"])
        told = work(config, RunPaths(arguments.run_dir))
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr, flush=True)
        _explain(arguments.run_dir, stage, arguments.attempt, "; ".join(str(error).splitlines()))
        return error.exit_code or EXIT_FAILED
    if told is not None:
        _explain(arguments.run_dir, stage, arguments.attempt, told)
    return 0


def _explain(run_dir: Path, stage: str, attempt: int, reason: str) -> None:
    """Leave the reason where the worker looks for it."""
    file = RunPaths(run_dir).rank_reason(stage, attempt, 0)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{reason}\n", encoding="utf-8")


def _stop(number: int, _: object) -> None:
    """End at once, as preempted: what is whole stays, and what is not starts again clean."""
    os.write(
        2, f"stopped by {signal.Signals(number).name}; started again, the stage goes on with what is whole\n".encode()
    )
    os._exit(EXIT_PREEMPTED)  # threads may be in transfers that take long


def say(line: str) -> None:
    """Print one line, at once."""
    print(line, flush=True)


@contextlib.contextmanager
def in_terms_of_config(**others: str) -> Iterator[None]:
    """Let errors of the converter name keys of the config; `others` says which, by option, where not the usual one."""
    keys = {**_KEYS, **{f"--{option.replace('_', '-')}": key for option, key in others.items()}}
    try:
        yield
    except UserError as error:
        # Longest first: an option may be the beginning of another.
        known = "|".join(sorted(map(re.escape, keys), key=len, reverse=True))
        raise type(error)(re.sub(rf"({known})\b", lambda found: keys[found.group()], str(error))) from error


def _refuse_missing_packages() -> None:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        told = f"launcher.python: {sys.executable} lacks {', '.join(missing)}; pip install 'trainwright[nxdt]' there"
        print(f"error: {told}", file=sys.stderr)
        raise SystemExit(UserError.exit_code)


_refuse_missing_packages()  # at once: the programs import them in their first lines
