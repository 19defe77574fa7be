"""`worker.pyz nemo RUN_DIR --stage train --attempt N`: what a node does once before its ranks start NeMo.

It copies the training data to the node's own disk. Node 0 first puts the checkpoints in order and decides for all nodes
what the attempt goes on from: all ranks read that from `config-aN.yaml`, a copy of the run's YAML.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from pathlib import Path
from typing import Any, Mapping, Sequence

from . import data_copy, decision, drive, events, growing, masking, nemo_config, nemo_janitor
from .data_copy import DataCopyError, DataSet
from .decision import FRESH, RESUME, Decision
from .drive import FAILED, USER_ERROR, DriverError, say
from .janitor import JanitorError
from .peers import Peers
from .run_paths import RunPaths

SETTINGS_SCHEMA_VERSION = 1


def main(argv: Sequence[str]) -> int:
    """Prepare this node for an attempt and return 0, or the exit code of the stage."""
    parser = argparse.ArgumentParser(prog="worker.pyz nemo", description="Prepare this node of a run for NeMo.")
    parser.add_argument("run_dir", help="the run directory")
    parser.add_argument("--stage", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    arguments = parser.parse_args(argv)
    paths = RunPaths(arguments.run_dir, growing.scratch_of(os.environ))
    node = _Node(paths, arguments.stage, arguments.attempt)
    try:
        return node.prepare()
    except (JanitorError, DataCopyError) as error:
        return node.give_up(error, USER_ERROR)
    except DriverError as error:
        return node.give_up(error, error.code)
    except OSError as error:
        return node.give_up(error, FAILED)


class _Node:
    """One node's part of an attempt, before its ranks."""

    def __init__(self, paths: RunPaths, stage: str, attempt: int) -> None:
        self._paths, self._stage, self._attempt = paths, stage, attempt
        self._node = int(os.environ.get("NODE_RANK", "0"))
        self._num_nodes = int(os.environ.get("NNODES", "1"))

    def prepare(self) -> int:
        """Do it all. Raises DriverError, JanitorError, DataCopyError and OSError."""
        self._folder, settings = decision.read_settings(self._paths.nemo, self._attempt, SETTINGS_SCHEMA_VERSION)
        if settings.get("debug"):
            job = json.loads(self._paths.job(self._attempt, self._stage).read_text(encoding="utf-8"))
            for line in masking.cluster_variables(os.environ, job.get("env_from", ())):
                say(line)
        if self._node == 0:
            self._decide(settings)
        data_copy.copy_all([DataSet.of(entry) for entry in settings["data"]], say)
        if self._node != 0:
            return self._await_decision()
        return 0

    def give_up(self, error: Exception, code: int) -> int:
        """Tell why the stage cannot start, also where the worker looks for it, and return its exit code."""
        say(f"cannot start: {error}")
        with contextlib.suppress(OSError):  # it may be the disk that is full
            file = self._paths.prepare_reason(self._stage, self._attempt, self._node)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(" ".join(str(error).split()) + "\n", encoding="utf-8")
        return code

    def _decide(self, settings: Mapping[str, Any]) -> None:
        text = (self._folder / "config.yaml").read_text(encoding="utf-8")
        if nemo_config.says(text, "resume_if_exists") == "false":
            decided = Decision(FRESH, "exp_manager.resume_if_exists=false: checkpoints are not looked at")
        else:
            text, decided = self._order(text, settings)
        for action in nemo_janitor.prepare_archive(self._paths.run_dir):
            say(f"janitor: {action}")
        if settings.get("index_mapping_dir") is not None:
            Path(settings["index_mapping_dir"]).mkdir(parents=True, exist_ok=True)
        self._write_config(text)
        decision.publish(self._decision_file(), decided, self._num_nodes, has_links=self._paths.scratch is None)
        say(f"{self._stage}: {decided.what}: {decided.reason}")

    def _order(self, text: str, settings: Mapping[str, Any]) -> tuple[str, Decision]:
        """Put the checkpoints in order and return NeMo's YAML for this attempt, with the words to it."""
        tensor, pipeline = settings.get("model_parallel", (1, 1))
        earlier = (self._paths.nemo_decision(self._stage, attempt) for attempt in range(1, self._attempt))
        order = nemo_janitor.tidy(
            self._paths.checkpoints,
            self._paths.damaged,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            needs_averaged=nemo_config.averages(text),
            has_resumed=decision.has_resumed(earlier),
            may_ignore_damaged=decision.may_ignore_damaged(self._paths, self._attempt),
        )
        for action in order.actions:
            say(f"janitor: {action}")
        chosen = order.checkpoint
        if chosen is not None:
            reason = f"from {chosen.name}, step {chosen.step}"
            return nemo_config.with_resume(text, str(chosen.resume_path)), Decision(RESUME, reason)
        if nemo_config.says(text, "resume_ignore_no_checkpoint") == "false":
            raise DriverError(
                f"{self._paths.checkpoints} has no checkpoint, and exp_manager.resume_ignore_no_checkpoint=false; "
                "set it to true to start at step 0"
            )
        told = nemo_config.says(text, "resume_from_checkpoint")
        start = "starting at step 0" if told in (None, "null") else f"starting from {told}"
        return nemo_config.with_resume(text, None), Decision(FRESH, f"no checkpoint yet; {start}")

    def _write_config(self, text: str) -> None:
        """Write what ranks read. Of an earlier start of this attempt there may be one, which others may have read."""
        file = self._folder / f"config-a{self._attempt}.yaml"
        if self._num_nodes == 1:
            file.unlink(missing_ok=True)
        try:
            events.publish(file, text, has_links=self._paths.scratch is None)
        except FileExistsError:
            if file.read_text(encoding="utf-8") != text:
                raise DriverError(
                    f"{file} of an earlier start of this attempt says otherwise than it would now; "
                    "`trainwright resume` begins a new attempt"
                ) from None

    def _await_decision(self) -> int:
        decided = decision.wait_for(
            self._decision_file(),
            Peers(self._paths, self._stage, self._attempt, self._node, self._num_nodes),
            drive.queue_signals(),
        )
        if decided is None:
            raise DriverError("told to stop before node 0 had decided", FAILED)
        say(f"{self._stage}: {decided.what}: {decided.reason}")
        return 0

    def _decision_file(self) -> Path:
        return self._paths.nemo_decision(self._stage, self._attempt)
