"""Copies of files that a user wants beside a run: exp_manager.files_to_copy."""

import shutil
from pathlib import Path

from trainwright.config import RunConfig
from trainwright.errors import UserError
from trainwright.node.run_paths import RunPaths


def copy_files(config: RunConfig, paths: RunPaths, attempt: int) -> None:
    """Copy the files into the attempt's own directory below run/, all side by side.

    NeMo puts them beside its logs, where its next start moves them away. Raises UserError when one cannot be copied.
    """
    files = config.exp_manager.files_to_copy or ()
    if files:
        paths.copied_files(attempt).mkdir(parents=True, exist_ok=True)
    for file in map(Path, files):
        try:
            # Not copy2: mounted buckets keep neither mode nor times, and refuse them.
            shutil.copyfile(file, paths.copied_files(attempt) / file.name)
        except OSError as error:
            raise UserError(f"exp_manager.files_to_copy: {file} cannot be copied: {error.strerror}") from error
