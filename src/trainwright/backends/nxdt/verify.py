"""Compares the newest export with the fetched model: `python -m ...nxdt.verify RUN_DIR --attempt N`."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trainwright.backends.nxdt.document import backend_of
from trainwright.backends.nxdt.stage import run_stage, say
from trainwright.checkpoint.differences import Difference, differences, structure_problems, type_problems
from trainwright.checkpoint.hf_model import HfModel
from trainwright.checkpoint.loading import loading_problems
from trainwright.config import RunConfig
from trainwright.errors import RunFailedError, UserError
from trainwright.node import commit
from trainwright.node.run_paths import RunPaths

_STEP = re.compile(r"step=(\d+)")
_SHOWN = 10  # tensors of the table, those with the largest differences


def verify(config: RunConfig, paths: RunPaths) -> str:
    """Check the newest complete export against the model it started from, write down what was found and sum it up.

    Raises RunFailedError where it is no model of that form, or has values that are no numbers.
    """
    step = newest(paths.exports)
    say(f"step {step} is the newest complete export")
    report = compare(paths.export(step), Path(backend_of(config).model_dir))
    target = paths.verification(step)
    target.write_text(json.dumps(report, indent=1), encoding="utf-8")
    _print(report)
    say(f"written to {target}")
    if report["problems"]:
        raise RunFailedError("\n".join(report["problems"]))
    changed = f"{report['weights_differing']:,} of {report['weights']:,} weights differ from the fetched model's"
    return f"step {step} loads; {changed}"


def newest(exports: Path) -> int:
    """Return the largest step whose export is complete. Raises UserError where there is none."""
    found = {int(match.group(1)): path for path in exports.glob("step=*") if (match := _STEP.fullmatch(path.name))}
    reasons = {step: commit.why_incomplete(path) for step, path in sorted(found.items())}
    complete = [step for step, reason in reasons.items() if reason is None]
    if complete:
        return max(complete)
    listed = [f"{found[step].name}: {reason}" for step, reason in reasons.items()]
    raise UserError(
        "\n".join([f"{exports}: no complete export is there; run the stage export (stages_from=export)", *listed])
    )


def compare(export: Path, base: Path) -> dict[str, Any]:
    """Return, as JSON, how the model in `export` differs from the one in `base` and what is wrong with it."""
    model, other = HfModel(export, "export"), HfModel(base, "backend.model_dir")
    problems = commit.verify(export)
    problems += [*structure_problems(model, other), *type_problems(model, other)]
    found = list(differences(model, other))
    problems += [
        f"{one.name} has {one.num_nan} NaN and {one.num_infinite} infinite values of {one.num_values}"
        for one in found
        if one.num_nan or one.num_infinite
    ]
    total, differing = sum(one.num_values for one in found), sum(one.num_differing for one in found)
    warnings = []
    if found and differing == 0:
        warnings.append("not one weight differs from the model that training started from: training changed nothing")
    problems += loading_problems(export)
    return {
        "schema_version": 1,
        "export": str(export),
        "base": str(base),
        "tensors": len(model.specs),
        "tensors_differing": sum(one.num_differing > 0 for one in found),
        "weights": total,
        "weights_differing": differing,
        "share_differing": differing / total if total else 0.0,
        "largest_difference": max((one.largest for one in found), default=0.0),
        "nan": sum(one.num_nan for one in found),
        "infinite": sum(one.num_infinite for one in found),
        "dtypes": sorted({spec.dtype.torch_name for spec in model.specs.values()}),
        "problems": problems,
        "warnings": warnings,
        "largest": [vars(one) for one in _largest(found)],
    }


def _largest(found: Sequence[Difference]) -> list[Difference]:
    return sorted((one for one in found if one.num_differing), key=lambda one: -one.largest)[:_SHOWN]


def _print(report: dict[str, Any]) -> None:
    table = Table("tensor", "weights", "differing", "share", "by up to", box=None)
    for one in report["largest"]:
        _add_row(table, one["name"], one["num_values"], one["num_differing"], one["largest"])
    _add_row(table, "all", report["weights"], report["weights_differing"], report["largest_difference"])
    Console(width=120).print(table)
    numbers = f"NaN {report['nan']}, infinite {report['infinite']}"
    say(f"{report['tensors']} tensors, {', '.join(report['dtypes'])}; {numbers}")
    for warning in report["warnings"]:
        say(f"warning: {warning}")


def _add_row(table: Table, name: str, num: int, differing: int, largest: float) -> None:
    table.add_row(name, f"{num:,}", f"{differing:,}", f"{differing / max(num, 1):.2%}", f"{largest:.3g}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stage and return its exit code: 0 right, 1 wrong, 2 the user's input."""
    return run_stage(verify, "verify", argv)


if __name__ == "__main__":
    sys.exit(main())
