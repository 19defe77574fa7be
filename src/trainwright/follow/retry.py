"""Runs that did not succeed, started once more: composed again from what the user gave, and refused if that changed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainwright import dispatch, registry, report
from trainwright.config import RunConfig
from trainwright.dispatch import Composed
from trainwright.errors import UserError
from trainwright.follow.compare import differences, flatten
from trainwright.follow.overview import Overview
from trainwright.node import events, processes
from trainwright.places import CONF

_FAILED = (events.FAILED, events.TIMEOUT)


def to_retry(runs: Sequence[Overview], *, only_failed: bool) -> list[Overview]:
    """Return the runs that ended without success, and unless `only_failed` those that never started or were stopped."""
    if only_failed:
        return [run for run in runs if run.state.state in _FAILED]
    return [run for run in runs if run.state.state not in (events.SUCCEEDED, *_on_their_way(run))]


def _on_their_way(run: Overview) -> tuple[str, ...]:
    """Return the states in which a run still comes to its end by itself."""
    states = (events.SUBMITTED, events.QUEUED, events.RUNNING, events.REQUEUED)
    record = registry.read_record(run.run_dir, registry.last_attempt(run.run_dir))
    return (*states, events.PLANNED) if processes.may_live(record["process"]) else states


def retry(runs: Sequence[Overview], *, accept_changes: bool = False) -> list[report.Outcome]:
    """Start runs again under their own ids and follow them as at their first start.

    Raises UserError with all differences when a config composes to something else than was recorded.
    """
    numbered = [compose_again(run, number) for number, run in enumerate(runs)]
    changes = [line for run, job in zip(runs, numbered, strict=True) for line in _changes(run, job)]
    if changes and not accept_changes:
        raise UserError(
            "\n".join(
                [
                    *dict.fromkeys(changes),
                    "these configs are not those that were recorded; undo the changes, or add --accept-changes",
                ]
            )
        )
    return dispatch.dispatch(numbered, is_new_sweep=False)


def compose_again(run: Overview, number: int) -> Composed:
    """Compose a run from the overrides of its newest attempt, as today's files have it, with its id fixed."""
    from hydra import compose, initialize_config_dir

    record = _record(run)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        tree = compose("config", [*record["overrides"], f"run_id={run.run_id}"])
    overrides = tuple(record["overrides"])
    return Composed(number=number, overrides=overrides, tree=tree, directory=directory(record), goes_on=True)


def directory(record: dict[str, Any]) -> Path:
    """Return where the command of a run was given: what relative paths in its config start from."""
    return Path(record["directory"])


def _changes(run: Overview, job: Composed) -> list[str]:
    old = flatten(_record(run)["config"])
    new = flatten(RunConfig.from_hydra(job.tree).with_absolute_paths(job.directory).to_dict())
    return [f"{run.run_id}: {line}" for line in differences(old, new)]


def _record(run: Overview) -> dict[str, Any]:
    if registry.last_attempt(run.run_dir) == 0:
        raise UserError(f"{run.run_id}: {run.run_dir} has no record; it cannot be started again")
    return registry.read_record(run.run_dir, registry.last_attempt(run.run_dir))
