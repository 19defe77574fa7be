"""Where the project's own data lies: the configuration trees and the shipped text."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parents[1]

# A checkout keeps conf/, experiments/ and constraints.txt at its root, where users edit them; a wheel carries them
# inside the package.
_ROOT = _CHECKOUT if (_CHECKOUT / "pyproject.toml").is_file() and (_CHECKOUT / "conf").is_dir() else _PACKAGE
CONF = _ROOT / "conf"
EXPERIMENTS = _ROOT / "experiments"
CONSTRAINTS = _ROOT / "constraints.txt"  # the versions that this one was tested with


def corpus(name: str) -> Path | None:
    """Return the text shipped under `name`, or None where no text of that name is shipped."""
    path = _PACKAGE / "corpora" / f"{name}.txt.xz"
    return path if path.is_file() else None
