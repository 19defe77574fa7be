"""Runs on disk: how one is recorded before it is submitted, found again, and what state it is in."""

import dataclasses
import json
import platform
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from trainwright import code_state, storage
from trainwright.code_state import CodeState
from trainwright.config import RunConfig
from trainwright.errors import UserError
from trainwright.exp_manager import run_dir, run_name
from trainwright.job import JobSpec
from trainwright.node import commit, events, processes
from trainwright.node.run_paths import RunPaths, SweepPaths
from trainwright.node.run_state import RunState, fold
from trainwright.plan import Plan
from trainwright.preflight import Finding
from trainwright.worker_zip import build_worker

SCHEMA_VERSION = 1

# A resumed run may be longer, run elsewhere and log otherwise; whatever else differs makes it another run.
_FREE_TO_CHANGE = (
    "run_id", "allow", "code", "dry_run", "on_failure", "max_jobs", "stages", "stages_from", "site", "launcher",
    "hardware", "exp_manager", "data.cache_dir", "data.index_mapping_dir", "data.num_workers", "trainer.max_steps",
    "trainer.val_check_interval", "trainer.limit_val_batches", "trainer.log_every_n_steps", "trainer.num_threads",
    "trainer.enable_progress_bar", "parallelism.strategy", "model.trains_on", "backend.python", "backend.nxdt_dir",
    "model.chat_template", "backend.compiler_cache_url", "backend.async_exec_max_inflight_requests",
    "backend.neuron_rt_exec_timeout", "backend.max_open_files", "backend.reserved_port", "data.train_source",
    "data.val_source", "backend.image", "backend.base_image", "backend.script", "backend.data_cache_dir",
    "backend.data_copy", "backend.max_time", "backend.nsys_profile",
)  # fmt: skip
_NOT_EVEN_SO = ("exp_manager.ema",)  # what a validation measures


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
    directory: Path = field(default_factory=Path.cwd)  # where the command was given: relative paths start there
    code: CodeState | None = None  # None: the directory is in no repository
    goes_on: bool = False  # stages that are done are not repeated, although the config names them

    @property
    def run_dir(self) -> Path:
        """Where the run lies as seen from here; its jobs hold the nodes' view."""
        return storage.seen_from_here(self.config, str(run_dir(self.config, self.run_id)))


def new_id(name: str, is_taken: Callable[[str], bool] = lambda made: False) -> str:
    """Return a new `{name}-{UTC yyyymmdd-hhmmss}-{4 hex}`; many are made in one second, so equal ones do happen."""
    while is_taken(made := f"{name}-{datetime.now(timezone.utc):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"):
        pass
    return made


def last_attempt(run: Path) -> int:
    """Return the newest recorded attempt of a run, 0 where there is no run."""
    paths, attempt = RunPaths(run), 0
    names = storage.names(paths.own)
    while paths.record(attempt + 1).name in names:
        attempt += 1
    return attempt


def read_record(run: Path, attempt: int) -> dict[str, Any]:
    """Return the record of an attempt as a plain tree."""
    text = RunPaths(run).record(attempt).read_text(encoding="utf-8")
    tree: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tree


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> tuple[str, ...]:
    """Return `key: old -> new` for each difference of two configs that a resume may not have."""
    changes: list[str] = []
    for key in sorted({*old, *new}):
        path, before, after = prefix + key, old.get(key), new.get(key)
        if before == after:
            continue
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changes += changed_keys(before, after, f"{path}.")
        elif not _is_free_to_change(path):
            changes.append(f"{path}: {json.dumps(before)} -> {json.dumps(after)}")
    return tuple(changes)


def _is_free_to_change(path: str) -> bool:
    is_free = any(path == free or path.startswith(f"{free}.") for free in _FREE_TO_CHANGE)
    return is_free and not path.startswith(_NOT_EVEN_SO)


def create(record: RunRecord, *, at: Path | None = None) -> list[Path]:
    """Write the record of a run and return the files. `at` is where instead of the run's directory (a dry run).

    If anything goes wrong, the directory is not left half made. Raises UserError when the disk or the bucket does not
    take it or another process made the same run or attempt first.
    """
    paths = RunPaths(at or record.run_dir)
    key = "exp_manager.dry_run_dir" if at else "exp_manager.exp_dir"
    try:
        with storage.reached(paths.run_dir, key), _claimed(record, paths, is_new=at is not None or record.attempt == 1):
            return _write(record, paths)
    except FileExistsError as error:
        raise UserError(f"run_id: another process is starting {record.run_id} at this moment; wait for it") from error
    except OSError as error:
        raise UserError(
            f"{key}: {paths.run_dir} cannot be written: {error.strerror}; free space or choose another"
        ) from error


@contextmanager
def _claimed(record: RunRecord, paths: RunPaths, *, is_new: bool) -> Iterator[None]:
    """Have an attempt at a run to ourselves: its directory, if new, and its record are made exclusively.

    On a bucket, where nobody can make a directory exclusively, the record alone is the claim.
    """
    text = yaml.safe_dump(_as_tree(record), sort_keys=False, allow_unicode=True)
    if storage.is_bucket(paths.run_dir):
        events.publish(paths.record(record.attempt), text)
    elif is_new:
        paths.run_dir.parent.mkdir(parents=True, exist_ok=True)
        paths.run_dir.mkdir()
    try:
        if not storage.is_bucket(paths.run_dir):
            for folder in (paths.jobs, paths.logs):
                folder.mkdir(parents=True, exist_ok=True)
            events.publish(paths.record(record.attempt), text)
        yield
    except BaseException:
        if is_new:
            storage.remove(paths.run_dir)
        raise


def _write(record: RunRecord, paths: RunPaths) -> list[Path]:
    """Write all but the record itself, the event last: only then is there a run."""
    texts = {}
    for job in record.jobs:
        texts[paths.job(record.attempt, job.stage)] = job.to_json()
        texts.update({paths.own / name: text for name, text in job.files.items()})
    storage.in_parallel(lambda path: _publish(path, texts[path]), list(texts), texts)
    build_worker(paths.worker)
    code_files = code_state.write(record.code, paths, record.attempt) if record.code is not None else []
    if record.code is not None and record.config.code == "snapshot":
        code_state.write_snapshot(record.code, paths, record.attempt)
    event = events.append(
        paths,
        events.PLANNED,
        who=events.SUBMIT,
        stage=None,
        attempt=record.attempt,
        stages=[job.stage for job in record.jobs],
        num_nodes=record.config.hardware.num_nodes,
        # What lists of runs show, here too: to parse the record of each would take seconds.
        launcher=record.config.launcher.kind,
        max_steps=record.config.trainer.max_steps,
        overrides=list(record.overrides),
    )
    return [paths.record(record.attempt), *texts, paths.worker, *code_files, event]


def _publish(path: Path, text: str) -> None:
    if not storage.is_bucket(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    events.publish(path, text)


def _as_tree(record: RunRecord) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": record.run_id,
        "attempt": record.attempt,
        "created": events.timestamp(),
        "process": processes.identity(),
        "directory": str(record.directory),
        "overrides": list(record.overrides),
        "allowed": list(record.config.allow),
        "findings": [dataclasses.asdict(finding) for finding in record.findings],
        "plan": dataclasses.asdict(record.plan),
        "stages": [job.stage for job in record.jobs],
        "versions": {"python": platform.python_version(), "trainwright": version("trainwright")},
        "git": code_state.as_tree(record.code),
        "config": record.config.to_dict(),
    }


def create_sweep(records: Sequence[RunRecord]) -> Path:
    """List the runs of a sweep before the first is submitted, so that a crash shows what never started."""
    first = records[0].config
    exp_dir = storage.seen_from_here(first, first.exp_manager.exp_dir)
    paths = SweepPaths(exp_dir, run_name(first), new_id(first.name))
    listing = [
        {"number": number, "run_id": record.run_id, "run_dir": str(record.run_dir), "overrides": list(record.overrides)}
        for number, record in enumerate(records)
    ]
    text = json.dumps({"schema_version": SCHEMA_VERSION, "jobs": listing}, indent=1)
    try:
        with storage.reached(paths.sweep_dir, "exp_manager.exp_dir"):
            _publish(paths.jobs, text)
    except OSError as error:
        raise UserError(f"exp_manager.exp_dir: {paths.sweep_dir} cannot be written: {error.strerror}") from error
    return paths.sweep_dir


def holder(run: Path, attempt: int) -> str | None:
    """Return the process that still works on an attempt of launcher=local, None if none does.

    The worker of a node counts as long as it lives, the process that submits only until the attempt has ended: it may
    go on with other runs. Of other launchers, their scheduler knows.
    """
    record = read_record(run, attempt)
    if record["config"]["launcher"]["kind"] != "local":
        return None
    history = [event for event in events.read_events(RunPaths(run)).events if event.attempt == attempt]
    started = [event for event in history if event.state == events.RUNNING and event.node is not None]
    ended = {event.node for event in history if event.state in events.ENDED}
    holders = [] if fold(history).state in events.ENDED else [record["process"]]
    holders += [event.extra["process"] for event in started if event.node not in ended]
    living = [process for process in holders if processes.may_live(process)]
    return f"process {living[0]['pid']} on {living[0]['host']}" if living else None


def note(record: RunRecord, state: str, *, stage: str | None = None, **extra: Any) -> None:
    """Record what the submitting side did or saw. Raises UserError when a bucket does not take it."""
    paths = RunPaths(record.run_dir)
    with storage.reached(paths.run_dir, "exp_manager.exp_dir"):
        events.append(paths, state, who=events.SUBMIT, stage=stage, attempt=record.attempt, **extra)


def refresh(run: Path) -> RunState:
    """Return the state of a run: a fold over its events. Raises UserError when a bucket cannot be reached."""
    with storage.reached(run, run.name):
        return fold(events.read_events(RunPaths(run)).events)


def states_before(record: RunRecord) -> dict[str | None, str]:
    """Return the state that each stage had before this attempt."""
    history = events.read_events(RunPaths(record.run_dir)).events
    earlier = fold(event for event in history if event.attempt < record.attempt)
    return {stage.stage: stage.state for stage in earlier.stages}


def newest_export(run_dir: Path) -> Path | None:
    """Return the complete export of the largest step, a Hugging Face model; None where a run has none."""
    exports = RunPaths(run_dir).exports
    found = exports.glob("step=*") if exports.is_dir() else ()
    complete = [path for path in found if commit.read_commit(path) is not None]
    return max(complete, key=lambda path: int(path.name.partition("=")[2]), default=None)


def results(run: Path) -> dict[str, Any] | None:
    """Return results.json of a run; None where the run has not written it."""
    try:
        tree: dict[str, Any] = json.loads(RunPaths(run).results.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return tree
