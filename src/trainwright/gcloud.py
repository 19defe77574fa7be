"""Google's own command line, which builds images and sets projects up; what it prints is the user's to see."""

import shutil
import subprocess
import sys
from collections.abc import Sequence

from trainwright.errors import UserError

_INSTALL = "https://cloud.google.com/sdk/docs/install"


def refuse_missing(by_hand: str) -> None:
    """Raise UserError where gcloud is not on PATH, with what to do `by_hand` elsewhere."""
    if shutil.which("gcloud") is None:
        raise UserError(f"gcloud is not on PATH; install it ({_INSTALL}), or {by_hand}, say in Cloud Shell")


def run(command: Sequence[str], *, to_stderr: bool = False) -> int:
    """Run a command of gcloud on this terminal and return its exit code; `to_stderr` keeps standard output free."""
    sys.stdout.flush()
    return subprocess.run(command, stdout=2 if to_stderr else None).returncode


def succeeds(command: Sequence[str]) -> bool:
    """Return whether a command of gcloud ends well; what it prints is not shown."""
    quiet = subprocess.DEVNULL
    return subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet).returncode == 0
