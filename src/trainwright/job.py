"""JobSpec: one stage of one run, as the scheduler submits it and the worker reads it."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """All that a scheduler and the worker need for one stage of one run. Survives a JSON round trip."""

    run_id: str
    run_dir: str  # as the nodes see it
    stage: str
    attempt: int  # 1 for a new run, one more for each resume
    launch: Literal["torchrun", "plain"]  # ranks started by torchrun, or one process a node
    # torchrun: the rank's arguments behind PYTHON; plain: argv. Never shell-quoted. The word {attempt} stands for the
    # attempt's number, since a job that its scheduler starts again is the next attempt.
    command: tuple[str, ...]
    python: str  # interpreter of the worker and of the ranks
    env: Mapping[str, str]  # laid over the environment that the scheduler gives
    num_nodes: int
    devices: int  # processes a node
    image: str | None  # container image; None: the bare host
    time_limit_s: int | None  # None: no limit
    grace_s: float  # between the polite signal and the kill
    files: Mapping[str, str]  # text by path below run/, written before the submit
    outputs: tuple[str, ...] = ()  # what the stage commits: if all of it is complete, no run is needed. Empty: always
    lane: str | None = None  # jobs of one lane run one after the other; None: of no lane
    env_from: tuple[str, ...] = ()  # names of environment variables that must reach the ranks; values are never written
    max_requeues: int | None = None  # restarts by the scheduler; None: it starts nothing again
    scratch: str | None = None  # where nodes keep files that grow, see node.growing. None: the run directory appends
    next_stage: str | None = None  # what the worker goes on with in the same job after success; None: nothing
    prepare: tuple[str, ...] | None = None  # argv run once on each node before its ranks, as `command`; None: nothing
    foreign: str | None = None  # below run/: how to read what a framework logs for TensorBoard only; None: nothing
    most_nodes: int | None = None  # that any stage of this job has from here on; None: as many as this one

    def to_json(self) -> str:
        return json.dumps({"schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)}, indent=1, ensure_ascii=False)

    @property
    def job_nodes(self) -> int:
        """How many nodes the job needs; some stages may use fewer, then the others wait."""
        return self.most_nodes or self.num_nodes

    @classmethod
    def from_json(cls, text: str) -> "JobSpec":
        tree: dict[str, Any] = json.loads(text)
        assert tree.pop("schema_version") == SCHEMA_VERSION
        lists = [key for key in ("command", "outputs", "env_from", "prepare") if tree.get(key) is not None]
        return cls(**{**tree, **{key: tuple(tree[key]) for key in lists}})
