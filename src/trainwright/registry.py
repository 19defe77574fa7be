"""Runs on disk: how one is recorded before it is submitted, found again, and what state it is in."""

import dataclasses
import json
import platform
import secrets
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from trainwright.config import RunConfig
from trainwright.errors import UserError
from trainwright.job import JobSpec
from trainwright.node import events
from trainwright.node.run_paths import RunPaths, SweepPaths
from trainwright.node.run_state import RunState, fold
from trainwright.plan import Plan
from trainwright.preflight import Finding
from trainwright.worker_zip import build_worker

SCHEMA_VERSION = 1

# A resumed run may be longer, run elsewhere and log otherwise; whatever else differs makes it another run.
_FREE_TO_CHANGE = (
    "run_id", "allow", "dry_run", "on_failure", "max_jobs", "site", "launcher", "hardware", "exp_manager",
    "data.cache_dir", "data.index_mapping_dir", "data.num_workers", "trainer.max_steps", "trainer.val_check_interval",
    "trainer.limit_val_batches", "trainer.log_every_n_steps", "trainer.num_threads", "trainer.enable_progress_bar",
    "model.trains_on",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """All that is decided about a run before it is submitted; frozen in `run/run.yaml`."""

    run_id: str
    attempt: int
    config: RunConfig
    plan: Plan
    findings: tuple[Finding, ...]
    jobs: tuple[JobSpec, ...]  # in the order of the stages
    overrides: tuple[str, ...]  # as the user gave them

    @property
    def run_dir(self) -> Path:
        return run_dir(self.config, self.run_id)


def run_dir(config: RunConfig, run_id: str) -> Path:
    """Return where a run lives: exp_dir/name/run_id."""
    return Path(config.exp_manager.exp_dir) / config.name / run_id


def new_id(name: str, is_taken: Callable[[str], bool] = lambda made: False) -> str:
    """Return a new `{name}-{UTC yyyymmdd-hhmmss}-{4 hex}`; many are made in one second, so equal ones do happen."""
    while is_taken(made := f"{name}-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"):
        pass
    return made


def last_attempt(run: Path) -> int:
    """Return the newest recorded attempt of a run, 0 where there is no run."""
    paths, attempt = RunPaths(run), 0
    while paths.record(attempt + 1).is_file():
        attempt += 1
    return attempt


def read_record(run: Path, attempt: int) -> dict[str, Any]:
    """Return the record of an attempt as a plain tree."""
    tree: dict[str, Any] = yaml.safe_load(RunPaths(run).record(attempt).read_text(encoding="utf-8"))
    return tree


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> tuple[str, ...]:
    """Return `key: old -> new` for each difference of two configs that a resume may not have."""
    changes: list[str] = []
    for key in sorted({*old, *new}):
        path, before, after = prefix + key, old.get(key), new.get(key)
        if path in _FREE_TO_CHANGE or before == after:
            continue
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changes += changed_keys(before, after, f"{path}.")
        else:
            changes.append(f"{path}: {json.dumps(before)} -> {json.dumps(after)}")
    return tuple(changes)


def create(record: RunRecord, *, at: Path | None = None) -> list[Path]:
    """Write the record of a run and return the files. `at` is where instead of the run's directory (a dry run).

    The directory is made exclusively and, if anything goes wrong, not left half made. Raises UserError when the disk
    does not take it or another process made the same run or attempt first.
    """
    paths = RunPaths(at or record.run_dir)
    is_new = at is not None or record.attempt == 1
    try:
        if is_new:
            paths.run_dir.parent.mkdir(parents=True, exist_ok=True)
            paths.run_dir.mkdir()
        return _write(record, paths)
    except FileExistsError as error:
        raise UserError(f"run_id: another process is starting {record.run_id} at this moment; wait for it") from error
    except OSError as error:
        if is_new:
            shutil.rmtree(paths.run_dir, ignore_errors=True)
        key = "exp_manager.dry_run_dir" if at else "exp_manager.exp_dir"
        raise UserError(
            f"{key}: {paths.run_dir} cannot be written: {error.strerror}; free space or choose another"
        ) from error


def _write(record: RunRecord, paths: RunPaths) -> list[Path]:
    for folder in (paths.jobs, paths.logs):
        folder.mkdir(parents=True, exist_ok=True)
    texts = {paths.record(record.attempt): yaml.safe_dump(_as_tree(record), sort_keys=False, allow_unicode=True)}
    for job in record.jobs:
        texts[paths.job(record.attempt, job.stage)] = job.to_json()
        texts.update({paths.own / name: text for name, text in job.files.items()})
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    build_worker(paths.worker)
    event = events.append(
        paths,
        events.PLANNED,
        who=events.SUBMIT,
        stage=None,
        attempt=record.attempt,
        stages=[job.stage for job in record.jobs],
        num_nodes=record.config.hardware.num_nodes,
    )
    return [*texts, paths.worker, event]


def _as_tree(record: RunRecord) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": record.run_id,
        "attempt": record.attempt,
        "created": events.timestamp(),
        "overrides": list(record.overrides),
        "allowed": list(record.config.allow),
        "findings": [dataclasses.asdict(finding) for finding in record.findings],
        "plan": dataclasses.asdict(record.plan),
        "stages": [job.stage for job in record.jobs],
        "versions": {"python": platform.python_version(), "trainwright": version("trainwright")},
        "git": _git_state(),
        "config": record.config.to_dict(),
    }


def _git_state() -> dict[str, Any] | None:
    """Return commit and dirtiness of the working directory's repository; None outside of one."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run(["git", "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"commit": commit.stdout.strip(), "is_dirty": bool(changes.stdout.strip())}


def create_sweep(records: Sequence[RunRecord]) -> Path:
    """List the runs of a sweep before the first is submitted, so that a crash shows what never started."""
    first = records[0].config
    paths = SweepPaths(first.exp_manager.exp_dir, first.name, new_id(first.name))
    listing = [
        {"number": number, "run_id": record.run_id, "run_dir": str(record.run_dir), "overrides": list(record.overrides)}
        for number, record in enumerate(records)
    ]
    try:
        paths.sweep_dir.mkdir(parents=True)
        paths.jobs.write_text(
            json.dumps({"schema_version": SCHEMA_VERSION, "jobs": listing}, indent=1), encoding="utf-8"
        )
    except OSError as error:
        raise UserError(f"exp_manager.exp_dir: {paths.sweep_dir} cannot be written: {error.strerror}") from error
    return paths.sweep_dir


def note(record: RunRecord, state: str, *, stage: str | None = None, **extra: Any) -> None:
    """Record what the submitting side did or saw."""
    events.append(RunPaths(record.run_dir), state, who=events.SUBMIT, stage=stage, attempt=record.attempt, **extra)


def refresh(run: Path) -> RunState:
    """Return the state of a run: a fold over its events."""
    return fold(events.read_events(RunPaths(run)).events)


def results(run: Path) -> dict[str, Any] | None:
    """Return results.json of a run; None where the run has not written it."""
    try:
        tree: dict[str, Any] = json.loads(RunPaths(run).results.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return tree
