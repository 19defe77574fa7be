"""What all commands share: how they end, numbers on their command lines, runs that overrides compose."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from trainwright.errors import EXIT_INTERRUPTED, UserError

if TYPE_CHECKING:
    from trainwright.config import RunConfig

_OF_EXTRAS = ("numpy", "torch")  # packages that a command may need and a bare installation lacks


def guarded(run: Callable[[argparse.Namespace], int], options: argparse.Namespace, *, extra: str | None = None) -> int:
    """Run a command and return its exit code; what is a user's to mend is printed as errors.

    `extra` is the one of ours that brings the packages that the command needs; None: it needs none.
    """
    try:
        code = run(options)
        sys.stdout.flush()
    except UserError as error:
        return _refuse(str(error), error.exit_code)
    except BrokenPipeError:  # `| head` has seen enough; Python would complain once more when it closes stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except PermissionError as error:  # another user's files
        return _refuse(str(error), UserError.exit_code)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except ModuleNotFoundError as error:
        if extra is None or error.name not in _OF_EXTRAS:
            raise
        return _refuse(f"{error.name} is not installed: pip install 'trainwright[{extra}]'", UserError.exit_code)
    return code


def _refuse(message: str, code: int) -> int:
    for line in message.splitlines():
        print(line if line.startswith((" ", "error ")) else f"error: {line}", file=sys.stderr)
    return code


def compose_run(overrides: Sequence[str]) -> "RunConfig":
    """Return the run that overrides compose. Raises UserError where they do not."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from trainwright.config import RunConfig
    from trainwright.places import CONF

    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return RunConfig.from_hydra(compose("config", list(overrides)))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(str(error)) from error


def count(text: str) -> int:
    """Return a number of at least 1, for argparse."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return int(text)
