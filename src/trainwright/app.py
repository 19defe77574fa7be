"""`python train.py`: Hydra's command line with our rules about commas, errors and exit codes."""

import os
import re
import shlex
import sys
import traceback
from collections.abc import Sequence

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from trainwright.config import RunConfig
from trainwright.errors import EXIT_INTERRUPTED, UserError
from trainwright.places import CONF, EXPERIMENTS


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code: 0 done, 1 failed, 2 input, 3 refused, 75 preempted."""
    sys.exit(run(list(sys.argv[1:] if argv is None else argv)))


def run(arguments: list[str]) -> int:
    """Run the command line and return its exit code."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints errors itself and exits with 1, whatever they are
    sys.argv[1:] = arguments
    try:
        sys.argv[1:] = _as_hydra_takes_it(arguments)
        hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(_train_here)()
    except UserError as error:
        return _refuse(str(error).splitlines(), error.exit_code)
    except (HydraException, OmegaConfBaseException) as error:
        return _refuse(_all_problems(arguments, error), UserError.exit_code)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception:  # our bug: the traceback is what helps
        traceback.print_exc()
        return 1
    return 0


def _train_here(tree: DictConfig) -> float | None:
    """Train in this process: what hydra.mode=RUN is for, so that a debugger's breakpoints hold."""
    from trainwright.dispatch import Composed, run_here

    return run_here(Composed(number=0, overrides=(), tree=tree))


def _refuse(problems: Sequence[str], exit_code: int) -> int:
    for problem in problems:
        print(problem if problem.startswith("error ") else f"error: {problem}", file=sys.stderr)
    return exit_code


def _as_hydra_takes_it(arguments: list[str]) -> list[str]:
    """Return the arguments with ours translated; raise UserError on a comma that would start several runs unasked."""
    arguments = ["max_jobs=null" if argument == "--yes" else argument for argument in arguments]
    known = get_args_parser().parse_intermixed_args(arguments)
    # Hydra's own parser takes overrides on one side of its flags only.
    arguments = [*known.overrides, *(argument for argument in arguments if argument not in known.overrides)]
    is_sweep_asked_for = known.multirun or any(line.startswith("+sweep=") for line in known.overrides)
    if is_sweep_asked_for or known.cfg or known.info is not None or known.shell_completion:
        return arguments
    swept = [override for line in known.overrides for override in _parsed(line) if override.is_sweep_override()]
    if swept:
        raise UserError("\n".join(map(_both_spellings, swept)))
    return arguments


def _all_problems(arguments: Sequence[str], first: Exception) -> list[str]:
    """Return every problem of a command line that Hydra refused; Hydra itself stops at the first.

    Keys that are in no config are forced in, so that the parse finds them beside whatever else is wrong.
    """
    lines = [line for line in arguments if not line.startswith("-")]
    try:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            RunConfig.from_hydra(
                hydra.compose("config", [_forced(override) for line in lines for override in _parsed(line)])
            )
    except UserError as error:
        return str(error).splitlines()
    except (HydraException, OmegaConfBaseException):
        pass  # not a matter of keys: the first error stands
    cause = f"\n{first.__cause__}" if isinstance(first.__cause__, OmegaConfBaseException) else ""
    return [f"{first}{cause}"]


def _forced(override: Override) -> str:
    """Return a plain `key=value` as one that may add the key; a swept one with its first value."""
    value = next(override.sweep_string_iterator()) if override.is_sweep_override() else None
    line = str(override.input_line) if value is None else f"{override.get_key_element()}={value}"
    is_group = any((root / override.key_or_group).is_dir() for root in (CONF, EXPERIMENTS))
    is_plain = override.type == OverrideType.CHANGE and not is_group and not override.key_or_group.startswith("hydra")
    return f"++{line}" if is_plain else line


def _parsed(line: str) -> list[Override]:
    """Parse one override. Raises UserError with a corrected spelling, ready to paste, where the value is not quoted."""
    try:
        return list(OverridesParser.create().parse_overrides([line]))
    except HydraException as error:
        key, is_assignment, value = line.partition("=")
        remedy = shlex.quote(f"{key}={quoted(value)}") if is_assignment else "write KEY=VALUE"
        raise UserError(f"{line}: not an override ({str(error).splitlines()[0]}); for text write  {remedy}") from error


def quoted(value: str) -> str:
    """Return `value` as text in Hydra's override grammar."""
    # OmegaConf first: to it \${ begins no interpolation, and backslashes before that count twice.
    inner = re.sub(r"(\\*)\$\{", lambda found: 2 * found.group(1) + "\\${", value)
    inner = re.sub(r'\\+(?="|$)', lambda run: 2 * run.group(), inner).replace('"', '\\"')
    return f'"{inner}"'


def _both_spellings(override: Override) -> str:
    key, _, value = str(override.input_line).partition("=")
    sweep, single = shlex.quote(f"{key}={value}"), shlex.quote(f"{key}={quoted(value)}")
    return (
        f"{key}: {value} are several values, which would start several runs; "
        f"for a sweep write  -m {sweep}  and for one value  {single}"
    )
