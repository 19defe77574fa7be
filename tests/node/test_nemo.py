"""What a node does before NeMo's ranks and what its worker makes of their logs, below the real worker."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import bucket_mount
from tests.nemo_checkpoints import distributed, marker, name_of
from tests.node import living
from trainwright.backends import RENDERERS
from trainwright.config import RunConfig
from trainwright.node import decision, nemo, nemo_config
from trainwright.node.events import Event, read_events
from trainwright.node.run_paths import RunPaths
from trainwright.plan import make_plan
from trainwright.worker_zip import build_worker

DEADLINE_S = 60  # for conditions that must come true; a machine under load is slow, not wrong
wait_for = partial(living.wait_for, deadline_s=DEADLINE_S)
YAML = """\
exp_manager:
  resume_if_exists: true
  resume_ignore_no_checkpoint: true
model:
  resume_from_checkpoint: null
"""
RESULTS = {
    "model": {"name": "tiny", "parameters": 1000},
    "batch": {
        "micro_batch_size": 1,
        "global_batch_size": 256,
        "accumulate_grad_batches": 8,
        "world_size": 2,
        "data_parallel_size": 2,
    },
    "max_steps": 30,
    "log_every_n_steps": 1,
    "seq_length": 64,
    "flops_per_token": 6000,
    "peak_tflops": 65.0,
    "data": {},
}
# Plays NeMo's script: reads the YAML of the attempt, and tells of steps as Lightning's progress bar does.
RANK = """
    import os, sys
    folder, name = (word.partition("=")[2] for word in sys.argv[1:3])
    print("reads", name, open(f"{folder}/{name}.yaml").read())
    print("NODE_RANK", os.environ["NODE_RANK"])
    for step in (1, 2):
        print(f"Epoch 0:   1%|1| {step}/30 [00:09<1:00:00, 9.0s/it, v_num=r1, reduced_train_loss={9 - step}.0, "
              f"global_step={step - 1}.000, consumed_samples={step * 256}.0, train_step_timing in s=2.000]")
    sys.exit(int(os.environ.get("RANK_CODE", 0)))
"""


class Run:
    """A run directory with NeMo's only stage, and the workers started for it."""

    def __init__(self, folder: Path, num_nodes: int = 1) -> None:
        self.paths = RunPaths(folder / "exp" / "gpt" / "r1")
        self.num_nodes, self.mark = num_nodes, f"TRAINWRIGHT_TEST_MARK={folder}"
        self.workers: list[subprocess.Popen[bytes]] = []
        for path in (self.paths.jobs, self.paths.nemo(1), self.paths.checkpoints):
            path.mkdir(parents=True)
        self.rank = folder / "rank.py"
        self.rank.write_text(textwrap.dedent(RANK))
        self.source = folder / "gcs" / "wiki"
        self.source.parent.mkdir()
        for suffix in (".bin", ".idx"):
            Path(f"{self.source}{suffix}").write_bytes(b"tokens")
        self.settings: dict[str, Any] = {
            "schema_version": 1,
            "data": [{"from": str(self.source), "to": str(folder / "ssd" / "wiki"), "url": None, "copy": "mount"}],
            "index_mapping_dir": str(folder / "gcs" / "index"),
            "model_parallel": [1, 1],
            "debug": True,
            "results": RESULTS,
            "versions": {},
        }
        (self.paths.nemo(1) / "config.yaml").write_text(YAML)
        self.write_settings()
        key, _, value = self.mark.partition("=")
        python, run_dir = sys.executable, str(self.paths.run_dir)
        words = ["nemo", run_dir, "--stage", "train", "--attempt", "{attempt}"]
        self.job: dict[str, Any] = {
            "schema_version": 1,
            "launch": "plain",
            "command": [
                python, str(self.rank), f"--config-path={self.paths.nemo(1)}", "--config-name=config-a{attempt}",
            ],
            "python": python,
            "env": {key: value, "NCCL_DEBUG": "VERSION", "NCCL_PROXY": "http://me:sesame@proxy"},
            "env_from": ["AIP_MINE"],
            "num_nodes": num_nodes,
            "devices": 1,
            "grace_s": 10.0,
            "prepare": [python, "-I", "-S", str(self.paths.worker), *words],
            "foreign": "nemo/settings.json",
        }  # fmt: skip
        build_worker(self.paths.worker)
        self.port = 0

    def write_settings(self, **changes: Any) -> None:
        self.settings.update(changes)
        (self.paths.nemo(1) / "settings.json").write_text(json.dumps(self.settings))

    def start(self, *, attempt: int = 1, node: int = 0, **environ: str) -> subprocess.Popen[bytes]:
        self.paths.job(attempt, "train").write_text(json.dumps(self.job))
        argv = [sys.executable, str(self.paths.worker), str(self.paths.run_dir), "--stage=train"]
        argv += [f"--attempt={attempt}"]
        if self.num_nodes > 1:
            self.port = self.port or free_port()
            argv += [f"--node-rank={node}", f"--num-nodes={self.num_nodes}", "--master-addr=127.0.0.1"]
            argv += [f"--master-port={self.port}"]
        env = {**os.environ, "AIP_MINE": "of-env-from", **environ}
        with open(self.output(node), "ab") as out:
            self.workers.append(subprocess.Popen(argv, stdout=out, stderr=out, env=env))
        return self.workers[-1]

    def run(self, *, attempt: int = 1, **environ: str) -> int:
        return self.start(attempt=attempt, **environ).wait(DEADLINE_S)

    def output(self, node: int = 0) -> Path:
        return self.rank.with_name(f"out-{node}")

    def node_log(self, *, attempt: int = 1, node: int = 0) -> str:
        return self.paths.node_log("train", attempt, node).read_text()

    def config(self, attempt: int = 1) -> str:
        return (self.paths.nemo(1) / f"config-a{attempt}.yaml").read_text()

    def event(self) -> Event:
        return read_events(self.paths).events[-1]

    def resumed(self, attempt: int = 1) -> str | None:
        told = nemo_config.says(self.config(attempt), "resume_from_checkpoint")
        return None if told is None else Path(json.loads(told)).name

    def processes(self) -> list[int]:
        """All living processes that carry this run's mark in their environment."""
        return living.marked(self.mark)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(num_nodes: int = 1) -> Run:
        made.append(Run(tmp_path, num_nodes))
        return made[-1]

    yield make
    living.end(made)


@pytest.fixture
def run(make_run: Callable[..., Run]) -> Run:
    return make_run()


def test_a_node_is_prepared_before_its_ranks_and_tells_what_they_did(run: Run) -> None:
    assert run.run() == 0, run.output().read_text()
    prepared = run.node_log()
    assert "trainwright: data: copying" in prepared
    assert "trainwright: train: fresh: no checkpoint yet; starting at step 0" in prepared
    assert prepared.strip() in run.output().read_text()  # node 0 shows it
    assert (run.source.parents[1] / "ssd" / "wiki.bin").read_bytes() == b"tokens"
    assert (run.source.parent / "index").is_dir()
    told = run.paths.rank_log("train", 1, 0).read_text()
    assert "reads config-a1 exp_manager:\n  resume_if_exists: false\n" in told
    lines = [json.loads(line) for line in run.paths.metrics(1).read_text().splitlines()]
    assert [(line["step"], line["consumed_samples"], line["train_loss"]) for line in lines] == [
        (1, 256, 8.0),
        (2, 512, 7.0),
    ]
    assert json.loads(run.paths.results.read_text())["steps"] == 2


def test_what_is_printed_of_the_cluster_holds_no_secret(run: Run) -> None:
    assert run.run(TRAINWRIGHT_DEBUG="1", AIP_HEADER="Bearer abcdef123456", CLOUD_ML_X="x") == 0
    told = run.node_log() + run.output().read_text()
    for line in ("NCCL_DEBUG=VERSION", "NODE_RANK=0", "NNODES=1", "AIP_MINE=***", "NCCL_PROXY=http://***@proxy"):
        assert f"trainwright: {line}\n" in told
    assert "worker: AIP_HEADER=Bearer ***\n" in told
    assert "sesame" not in told
    assert "abcdef" not in told


def test_the_newest_whole_checkpoint_is_what_the_next_attempt_is_told(run: Run) -> None:
    distributed(run.paths.checkpoints, name_of(10, loss="nan"))
    distributed(run.paths.checkpoints, name_of(20))
    distributed(run.paths.checkpoints, name_of(30), is_whole=False)
    marker(run.paths.checkpoints, name_of(30))
    (run.paths.run_dir / "run_1").mkdir()
    # A job that its scheduler has started again: there are no files of attempt 2.
    run.paths.record(1).write_text("attempt: 1\n")
    assert run.run(SLURM_RESTART_COUNT="1") == 0, run.output().read_text()
    assert run.resumed(2) == name_of(20)
    assert "reads config-a2" in run.paths.rank_log("train", 2, 0).read_text()
    told = run.node_log(attempt=2)
    assert f"janitor: removed {name_of(30)}: its save was interrupted" in told
    assert "janitor: made an empty run_0" in told
    assert decision.read(run.paths.nemo_decision("train", 2)).reason == f"from {name_of(20)}, step 20"


def test_a_run_without_a_whole_checkpoint_fails_saying_why_and_starts_over_on_request(run: Run) -> None:
    distributed(run.paths.checkpoints, name_of(10), lacks="common.pt")
    assert run.run() == 2
    event = run.event()
    assert (event.state, event.extra["exit_code"]) == ("FAILED", 2)
    assert event.extra["reason"].startswith("before the ranks: no checkpoint in ")
    assert f"{name_of(10)}: common.pt is missing or was cut short" in event.extra["reason"]
    assert not run.paths.rank_log("train", 1, 0).exists()
    assert not run.paths.results.exists()
    run.paths.record(2).write_text("config:\n  exp_manager:\n    resume_ignore_damaged: true\n")
    assert run.run(attempt=2) == 0
    assert run.resumed(2) is None
    assert [path.name for path in run.paths.damaged.iterdir()] == [name_of(10)]


@pytest.mark.parametrize(
    ("text", "code", "reason"),
    [
        ("print('oh'); raise SystemExit(7)", 7, "before the ranks: ended with exit code 7"),
        ("import os; print('oh'); os.kill(os.getpid(), 9)", 137, "before the ranks: ended with exit code 137"),
    ],
)
def test_any_program_that_fails_before_the_ranks_is_the_end_of_the_stage(
    text: str, code: int, reason: str, run: Run
) -> None:
    run.job["prepare"] = [sys.executable, "-c", text]
    assert run.run() == code
    event = run.event()
    assert (event.state, event.extra["reason"], event.extra["last_lines"]) == ("FAILED", reason, ["oh"])
    assert not run.paths.rank_log("train", 1, 0).exists()


def test_a_missing_program_or_data_is_told(run: Run) -> None:
    run.job["prepare"] = ["/nowhere/python3"]
    assert run.run() == 1
    assert "/nowhere/python3" in str(run.event().extra["reason"])
    run.job["prepare"] = None
    (run.paths.nemo(1) / "config-a2.yaml").write_text(YAML)
    assert run.run(attempt=2) == 0


def test_a_signal_ends_the_preparation_and_the_stage(run: Run) -> None:
    run.job["prepare"] = [sys.executable, "-c", "import signal; print('ready', flush=True); signal.pause()"]
    worker = run.start()
    wait_for(lambda: run.output().exists() and "ready" in run.output().read_text())
    worker.send_signal(signal.SIGUSR1)
    assert worker.wait(DEADLINE_S) == 75
    assert (run.event().state, run.event().extra["reason"]) == ("PREEMPTED", "stopped by SIGUSR1")
    assert run.processes() == []


def test_a_failure_of_the_ranks_is_in_the_results(run: Run) -> None:
    assert run.run(RANK_CODE="3") == 3
    results = json.loads(run.paths.results.read_text())
    assert (results["stop_reason"], results["stop_message"]) == ("failed", "rank 0 ended with exit code 3")
    assert results["steps"] == 2


def test_an_attempt_whose_time_is_over_asks_to_be_started_again(run: Run) -> None:
    run.write_settings(early_ends={"max_time_per_run": 0})
    assert run.run() == 75
    event, results = run.event(), json.loads(run.paths.results.read_text())
    over = "it ended by itself after step 2 of 30"
    assert (event.state, event.extra["reason"]) == ("PREEMPTED", f"exp_manager.max_time_per_run is over: {over}")
    assert (results["stop_reason"], results["stop_message"]) == ("max_time_per_run", over)


def test_a_run_that_ends_early_for_good_has_succeeded_and_says_why(run: Run) -> None:
    run.write_settings(early_ends={"max_time": 0})
    assert run.run() == 0
    assert (run.event().state, run.event().extra["reason"]) == ("SUCCEEDED", "it ended by itself after step 2 of 30")
    assert json.loads(run.paths.results.read_text())["stop_reason"] == "max_time"


def test_node_0_decides_for_all_and_each_node_copies(make_run: Callable[..., Run]) -> None:
    run = make_run(num_nodes=2)
    distributed(run.paths.checkpoints, name_of(10))
    distributed(run.paths.checkpoints, name_of(20), is_whole=False)
    late = run.start(node=1)
    wait_for(lambda: run.paths.node_log("train", 1, 1).exists() and "data: copied" in run.node_log(node=1))
    assert late.poll() is None
    first = run.start(node=0)
    assert (first.wait(DEADLINE_S), late.wait(DEADLINE_S)) == (0, 0)
    assert run.resumed() == name_of(10)
    for node in (0, 1):
        assert f"train: resume: from {name_of(10)}, step 10" in run.node_log(node=node)
        assert f"NODE_RANK {node}" in run.paths.rank_log("train", 1, node).read_text()
    assert "is there already" in run.node_log(node=0)  # here both nodes have one disk
    assert "janitor" not in run.node_log(node=1)


def test_a_second_start_of_an_attempt_does_not_decide_otherwise_once_other_nodes_may_have_read_it(
    run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run.paths.job(1, "train").write_text(json.dumps(run.job))
    words = [str(run.paths.run_dir), "--stage", "train", "--attempt", "1"]
    monkeypatch.setenv("NODE_RANK", "0")
    monkeypatch.setenv("NNODES", "2")
    assert (nemo.main(words), nemo.main(words)) == (0, 0)
    distributed(run.paths.checkpoints, name_of(20))
    assert nemo.main(words) == 2
    assert "config-a1.yaml of an earlier start of this attempt says otherwise" in capfd.readouterr().out
    monkeypatch.setenv("NNODES", "1")
    assert nemo.main(words) == 0
    assert run.resumed() == name_of(20)


def test_a_node_that_cannot_be_prepared_ends_the_others(make_run: Callable[..., Run]) -> None:
    run = make_run(num_nodes=2)
    distributed(run.paths.checkpoints, name_of(10), lacks="common.pt")
    nodes = [run.start(node=node) for node in (0, 1)]
    assert [node.wait(DEADLINE_S) for node in nodes] == [2, 2]
    reasons = {
        event.node: str(event.extra["reason"]) for event in read_events(run.paths).events if event.extra.get("reason")
    }
    assert "common.pt is missing" in reasons[0]
    assert "node 0 was FAILED" in reasons[1]


def test_a_run_in_a_bucket_is_prepared_without_a_link_or_a_rename(run: Run, tmp_path: Path) -> None:
    distributed(run.paths.checkpoints, name_of(10))
    distributed(run.paths.checkpoints, name_of(20), is_whole=False)
    run.job["prepare"] = [word for word in run.job["prepare"] if word not in ("-I", "-S")]  # else no hook is there
    run.job["scratch"] = str(tmp_path / "scratch")
    environ = bucket_mount.environment(run.paths.run_dir, tmp_path)
    assert run.run(**environ) == 0, run.output().read_text()
    assert bucket_mount.refused(environ) == []
    assert run.resumed() == name_of(10)
    assert [json.loads(line)["step"] for line in run.paths.metrics(1).read_text().splitlines()] == [1, 2]


def test_what_a_run_renders_is_what_nodes_read_and_tell_nemo(
    parsed: Callable[..., RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parsed(
        "model=gpt_small", "hardware=t4", "site.vertex.bucket=b", "site.vertex.project=p",
        f"data.index_mapping_dir={tmp_path}/index", "backend.data_cache_dir=null",
    )  # fmt: skip
    paths = RunPaths(tmp_path / "r1")
    (job,) = RENDERERS["nemo"](config, make_plan(config), run_id="r1", run_dir=str(paths.run_dir), attempt=1)
    for name, text in {**job.files, "jobs/a1-train.json": job.to_json()}.items():
        (paths.own / name).parent.mkdir(parents=True, exist_ok=True)
        (paths.own / name).write_text(text)
    newest = distributed(paths.checkpoints, name_of(20, suffix="-last"))
    assert job.prepare is not None
    monkeypatch.delenv("NODE_RANK", raising=False)
    assert nemo.main([word.replace("{attempt}", "1") for word in job.prepare[5:]]) == 0
    folder, name = (word.partition("=")[2].replace("{attempt}", "1") for word in job.command[1:])
    rendered = yaml.safe_load((Path(folder) / "config.yaml").read_text())
    told = yaml.safe_load((Path(folder) / f"{name}.yaml").read_text())
    rendered["exp_manager"].update(resume_if_exists=False, resume_from_checkpoint=str(newest))
    assert told == rendered
