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
    output: str | None = None  # directory that the stage commits; one that is complete needs no stage. None: no such
    lane: str | None = None  # jobs of one lane run one after the other; None: of no lane
    env_from: tuple[str, ...] = ()  # names of environment variables that must reach the ranks; values are never written
    max_requeues: int | None = None  # restarts by the scheduler; None: it starts nothing again

    def to_json(self) -> str:
        return json.dumps({"schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)}, indent=1, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "JobSpec":
        tree: dict[str, Any] = json.loads(text)
        assert tree.pop("schema_version") == SCHEMA_VERSION
        return cls(**{**tree, "command": tuple(tree["command"]), "env_from": tuple(tree["env_from"])})
