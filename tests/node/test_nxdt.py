"""NxDT's driver below the real worker, with stand-ins for torchrun and neuron_parallel_compile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.fake_neuron_tools import COMPILER
from tests.fakes import neuron_tools, nxdt_checkout
from tests.node import living
from trainwright.node import decision, neuron_cache, node_limits, nxdt_setup
from trainwright.node.decision import Decision
from trainwright.node.drive import DriverError
from trainwright.node.events import Event, append, node_who, read_events
from trainwright.node.peers import Peers
from trainwright.node.run_paths import RunPaths
from trainwright.node.run_state import RunState, fold
from trainwright.node.signals import SignalQueue
from trainwright.worker_zip import build_worker

DEADLINE_S = 60  # for conditions that must come true; a machine under load is slow, not wrong
wait_for = partial(living.wait_for, deadline_s=DEADLINE_S)
UNSET = ["NEURON_CC_FLAGS", "XLA_DOWNCAST_BF16", "COMPILE", "NEURON_COMPILE_CACHE_URL"]
YAML = """\
name: tiny
trainer:
  devices: 4
  num_nodes: {num_nodes}
  max_steps: 6
  log_every_n_steps: 2
exp_manager:
  exp_dir: {exp_dir}
  name: tiny
  version: r1
  resume_from_checkpoint: {resume_from}
  checkpoint_callback_params:
    save_top_k: 2
    filename: tiny--{{step}}-{{consumed_samples}}
    every_n_train_steps: 2
distributed_strategy:
  tensor_model_parallel_size: 4
data:
  global_batch_size: 8
  seq_length: 64
model:
  num_layers: 2
"""
RESULTS = {
    "model": {"name": "tiny", "parameters": 1000},
    "batch": {
        "micro_batch_size": 1,
        "global_batch_size": 8,
        "accumulate_grad_batches": 8,
        "world_size": 4,
        "data_parallel_size": 1,
    },
    "max_steps": 6,
    "log_every_n_steps": 2,
    "seq_length": 64,
    "flops_per_token": 6000,
    "peak_tflops": 95.0,
    "data": {},
}


class Run:
    """A run directory with NxDT's stages, and the workers started for it."""

    def __init__(self, folder: Path, num_nodes: int = 1) -> None:
        self.paths = RunPaths(folder / "exp" / "tiny" / "r1")
        self.cache, self.calls, self.pretrained = folder / "cache", folder / "calls", folder / "pretrained"
        self.mark = f"TRAINWRIGHT_TEST_MARK={folder}"
        self.workers: list[subprocess.Popen[bytes]] = []
        self.num_nodes = num_nodes
        self.settings: dict[str, Any] = {
            "schema_version": 1,
            "python": str(neuron_tools(folder / "env")),
            "orchestrator": str(nxdt_checkout(folder / "nxdt") / "examples" / "training_orchestrator.py"),
            "devices": 4,
            "num_nodes": num_nodes,
            "cache_url": str(self.cache),
            "cache_key": "ab" * 32,
            "cache_key_of": {"tp": 4},
            "max_open_files": 64,
            "unset_env": UNSET,
            "reserved_port": None,
            "global_batch_size": 8,
            "max_steps": 6,
            "checkpoint_name": "tiny--",
            "results": RESULTS,
        }
        for path in (self.paths.jobs, self.paths.logs, self.paths.nxdt(1), self.pretrained / "model"):
            path.mkdir(parents=True)
        for name, resume_from in (("fresh", self.pretrained), ("resume", "null")):
            text = YAML.format(num_nodes=num_nodes, exp_dir=folder / "exp", resume_from=resume_from)
            (self.paths.nxdt(1) / f"{name}.yaml").write_text(text)
        (self.pretrained / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt").write_bytes(b"pretrained")
        self.write_settings()
        build_worker(self.paths.worker)

    def write_settings(self, **changes: Any) -> None:
        self.settings.update(changes)
        (self.paths.nxdt(1) / "settings.json").write_text(json.dumps(self.settings))

    def start(self, stage: str, *, attempt: int = 1, node: int = 0, port: int = 0, **environ: str) -> None:
        run_dir, python = str(self.paths.run_dir), sys.executable
        words = ["--stage", stage, "--attempt", "{attempt}"]
        key, _, value = self.mark.partition("=")
        job = {
            "schema_version": 1,
            "launch": "plain",
            "command": [python, "-I", "-S", str(self.paths.worker), "nxdt", run_dir, *words],
            "python": python,
            "env": {key: value, "FI_PROVIDER": "efa"},
            "num_nodes": self.num_nodes,
            "devices": 4,
            "grace_s": 10.0,
            "foreign": "nxdt/settings.json" if stage == "train" else None,
        }
        self.paths.job(attempt, stage).write_text(json.dumps(job))
        argv = [python, str(self.paths.worker), run_dir, "--stage", stage, "--attempt", str(attempt)]
        if self.num_nodes > 1:
            argv += [f"--node-rank={node}", f"--num-nodes={self.num_nodes}", "--master-addr=127.0.0.1"]
            argv += [f"--master-port={port}"]
        env = {**os.environ, "FAKE_NEURON_CALLS": str(self.calls), **environ}
        with open(self.paths.own / "stdout", "ab") as out:
            self.workers.append(subprocess.Popen(argv, stdout=out, stderr=out, env=env))

    def run(self, stage: str, *, attempt: int = 1, **environ: str) -> int:
        self.start(stage, attempt=attempt, **environ)
        return self.workers[-1].wait(DEADLINE_S)

    def log(self, stage: str, *, attempt: int = 1, rank: int = 0) -> str:
        file = self.paths.rank_log(stage, attempt, rank)
        return file.read_bytes().decode() if file.exists() else ""

    def await_log(self, stage: str, text: str) -> None:
        wait_for(lambda: text in self.log(stage))

    def event(self) -> Event:
        return read_events(self.paths).events[-1]

    def state(self) -> RunState:
        return fold(read_events(self.paths).events)

    def told(self) -> list[dict[str, Any]]:
        """What each torchrun was started with."""
        return [json.loads(line) for line in self.calls.read_text().splitlines()] if self.calls.exists() else []

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in self.paths.checkpoints.iterdir())

    def processes(self) -> list[int]:
        return living.marked(self.mark)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make_one(num_nodes: int = 1) -> Run:
        runs.append(Run(tmp_path, num_nodes))
        return runs[-1]

    yield make_one
    living.end(runs)


@pytest.fixture
def run(make: Callable[..., Run]) -> Run:
    return make()


# ---- compile


def test_compile_starts_the_tools_as_train_sh_does_and_passes_the_gate(run: Run) -> None:
    assert run.run("compile", XLA_DOWNCAST_BF16="secret", NEURON_COMPILE_CACHE_URL="/elsewhere") == 0
    assert (run.event().state, run.event().extra["reason"]) == ("SUCCEEDED", None)
    (call,) = run.told()
    argv = call["argv"]
    assert argv[:8] == [
        "--nproc_per_node", "4", "--nnodes", "1", "--node_rank", "0", "--master_addr", "127.0.0.1",
    ]  # fmt: skip
    assert argv[8] == "--master_port"
    assert int(argv[9]) > 0
    assert argv[10:] == [
        run.settings["orchestrator"],
        f"hydra.run.dir='{run.paths.nxdt(1)}/hydra'",
        "hydra.output_subdir=null",
        f"--config-path={run.paths.nxdt(1)}",
        "--config-name=fresh",
    ]
    env = call["env"]
    assert call["cwd"] == os.path.dirname(run.settings["orchestrator"])
    assert env["PATH"].startswith(f"{os.path.dirname(run.settings['python'])}:")
    assert (env["COMPILE"], env["NEURON_EXTRACT_GRAPHS_ONLY"]) == ("1", "1")
    assert (env["NEURON_COMPILE_CACHE_URL"], env["FI_PROVIDER"]) == (str(run.cache), "efa")
    assert "XLA_DOWNCAST_BF16" not in env
    log = run.log("compile")
    assert "unset XLA_DOWNCAST_BF16, which came from the shell" in log
    assert "secret" not in log
    assert "compile gate: passed" in log
    assert log.encode() in (run.paths.own / "stdout").read_bytes()
    assert [module.state for module in neuron_cache.modules(run.cache)] == ["done"] * 3
    assert json.loads(run.paths.nxdt_findings("compile", 1, 0).read_text())["findings"] == []
    assert run.processes() == []


@pytest.mark.parametrize(
    ("failure", "exit_code", "reasons"),
    [
        ("device-memory", 1, ["lines with ERROR: 1; exit code 1; first: 2025-Mar-27", "(device-memory)"]),
        ("failed-graph", 1, [f"1 of 3 graphs failed to compile; first: {{cache}}/{COMPILER}/MODULE_"]),
        ("compiler", 1, ["1 of 3 graphs failed to compile; lines with ERROR: 1; first:", "known cause (compiler)"]),
        ("cached-failure", 1, ["neuron-cache clean --failed --cache {cache}"]),
        ("error-line", 1, ["first: 2025-06-25 05:50:00.000001: 75652 ERROR ||NEURON_CACHE||: something"]),
        ("no-totals", 1, ["did not come to its end"]),
        ("no-graphs", 1, ["Total graphs: 0"]),
        ("exit-code", 3, ["exit code 3"]),
        ("cache-file", 1, ["graphs are missing; first: FileNotFoundError", "known cause (cache-file)"]),
    ],
)
def test_a_failed_compile_stage_is_named_in_the_run_s_status(
    run: Run, failure: str, exit_code: int, reasons: list[str]
) -> None:
    assert run.run("compile", FAKE_NEURON_FAILURE=f"compile:{failure}") == exit_code
    state = run.state()
    assert (state.state, state.exit_code) == ("FAILED", exit_code)
    assert state.reason is not None
    assert state.reason.startswith(f"rank 0 ended with exit code {exit_code}: ")
    for reason in reasons:
        assert reason.format(cache=run.cache) in state.reason
    assert state.last_lines[-1].startswith("trainwright: compile has failed: ")


def test_what_is_compiled_is_not_compiled_again_unless_something_changed(run: Run) -> None:
    assert run.run("compile") == 0
    assert run.run("compile", attempt=2) == 0
    reason = f"skipped: all 3 graphs are in {run.cache}, made with the same key and versions"
    assert (run.state().state, run.state().reason) == ("SUCCEEDED", reason)
    assert len(run.told()) == 1
    neuron_tools(Path(run.settings["python"]).parents[1], {"neuronx-cc": "2.20.1"})
    assert run.run("compile", attempt=3) == 0
    assert "neuronx-cc is 2.20.1, the cache was made with 2.19.8089.0" in run.log("compile", attempt=3)
    assert len(run.told()) == 2  # and all of its graphs were there already, which is no failure
    assert "Total graphs: 0" in run.log("compile", attempt=3)


def test_stale_locks_are_cleared_before_the_compiler_would_wait_for_them(run: Run) -> None:
    assert run.run("compile") == 0
    module = neuron_cache.modules(run.cache)[0]
    lock = module.path / "model.hlo_module.pb.lock"
    (module.path / "model.done").unlink()
    lock.touch()
    os.utime(lock, (time.time() - 100, time.time() - 100))
    assert run.run("compile", attempt=2) == 0
    log = run.log("compile", attempt=2)
    assert f"cleared the stale lock {lock}" in log
    assert f"1 of 3 graphs are gone from {run.cache}, first {COMPILER}/{module.name}" in log
    assert "Another process" not in log


def test_a_cache_in_a_bucket_is_never_skipped(run: Run) -> None:
    run.write_settings(cache_url="s3://bucket/cache")
    for attempt in (1, 2):
        assert run.run("compile", attempt=attempt) == 0
        log = run.log("compile", attempt=attempt)
        assert "s3://bucket/cache is a bucket, which is not looked into: always compiled" in log
    assert len(run.told()) == 2
    assert not run.cache.exists()


# ---- train


def test_train_starts_from_the_pretrained_weights_and_writes_results(run: Run) -> None:
    assert run.run("train") == 0
    (call,) = run.told()
    assert call["argv"][-1] == "--config-name=fresh"
    assert call["env"]["COMPILE"] == "0"
    assert "NEURON_EXTRACT_GRAPHS_ONLY" not in call["env"]
    assert "loading checkpoint from pretrained" in run.log("train")
    assert run.checkpoints() == [
        "tiny--step=4-consumed_samples=24.0.ckpt",
        "tiny--step=6-consumed_samples=40.0.ckpt",
    ]
    results = json.loads(run.paths.results.read_text())
    assert results["stop_reason"] == "max_steps"
    assert [saved["step"] for saved in results["checkpoints"]] == [4, 6]
    steps = [json.loads(line)["step"] for line in run.paths.metrics(1).read_text().splitlines()]
    assert (steps[0], steps) == (1, sorted(steps))


def test_a_stop_asks_for_another_start_and_that_one_resumes(run: Run) -> None:
    run.start("train", FAKE_NEURON_PAUSE_AT="3")
    run.await_log("train", "stays before step 3")
    run.workers[0].send_signal(signal.SIGUSR1)
    assert run.workers[0].wait(DEADLINE_S) == 75
    assert (run.event().state, run.event().extra["reason"]) == ("PREEMPTED", "stopped by SIGUSR1")
    assert run.processes() == []  # also what had left the group
    assert "NxDT saves nothing on a signal" in run.log("train")
    assert json.loads(run.paths.results.read_text())["stop_reason"] == "preempted"
    assert run.run("train", attempt=2) == 0
    assert run.told()[1]["argv"][-1] == "--config-name=resume"
    assert "train: resume: from tiny--step=2-consumed_samples=8.0.ckpt, step 2" in run.log("train", attempt=2)
    assert "tiny--step=6-consumed_samples=40.0.ckpt" in run.checkpoints()


def test_a_save_that_was_killed_is_swept_before_nemo_dies_of_it(run: Run) -> None:
    assert run.run("train", FAKE_NEURON_KILLED_IN="4") == 137
    assert any(name.endswith("-unfinished") for name in run.checkpoints())
    assert run.run("train", attempt=2) == 0
    log = run.log("train", attempt=2)
    assert "janitor: removed tiny--step=4-consumed_samples=24.0.ckpt: its save was interrupted" in log
    assert "janitor: removed NeMo's marker" in log
    assert "train: resume: from tiny--step=2" in log


def test_damaged_checkpoints_stop_the_run_before_it_starts(run: Run) -> None:
    assert run.run("train") == 0
    for path in run.paths.checkpoints.iterdir():
        (path / "user_content.pt").unlink()
    assert run.run("train", attempt=2) == 2
    assert len(run.told()) == 1
    reason = run.state().reason
    assert reason is not None
    assert "can be resumed from: tiny--step=4" in reason
    assert "user_content.pt is missing or empty" in reason
    run.paths.record(3).write_text("config:\n  exp_manager:\n    resume_ignore_damaged: true\n")
    assert run.run("train", attempt=3) == 0
    assert "loading checkpoint from pretrained" in run.log("train", attempt=3)


def test_a_failed_training_is_explained_where_the_cause_is_known(run: Run) -> None:
    assert run.run("train", FAKE_NEURON_FAILURE="train:collectives-timeout") == 1
    reason = run.state().reason
    assert reason is not None
    assert reason.startswith("rank 0 ended with exit code 1: known cause (collectives-timeout): ")
    assert json.loads(run.paths.results.read_text())["stop_reason"] == "failed"


def test_a_run_that_resumed_once_does_not_start_over_without_a_word(run: Run) -> None:
    assert run.run("train") == 0
    assert run.run("train", attempt=2) == 0
    shutil.rmtree(run.paths.checkpoints)
    assert run.run("train", attempt=3) == 2
    assert "can be resumed from: there is none left" in str(run.state().reason)


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (
            lambda run: Path(run.settings["python"]).with_name("torchrun").unlink(),
            "torchrun: not there; backend.python",
        ),
        (lambda run: Path(run.settings["orchestrator"]).unlink(), "set backend.nxdt_dir to NxDT's checkout"),
        (lambda run: (run.paths.nxdt(1) / "settings.json").unlink(), "settings.json is not there"),
        (lambda run: run.write_settings(schema_version=2), "is of another version of trainwright"),
        (lambda run: run.cache.write_text(""), "Not a directory"),
    ],
)
def test_what_is_missing_is_said(run: Run, break_it: Callable[[Run], object], reason: str) -> None:
    break_it(run)
    assert run.run("compile") in (1, 2)
    assert reason in str(run.state().reason)
    assert "Traceback" not in run.log("compile")


# ---- several nodes


def run_on_both(run: Run, stage: str, attempt: int = 1) -> int:
    """Run a stage on two nodes to its end and return the port where they meet."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    for node in (1, 0):
        run.start(stage, attempt=attempt, node=node, port=port)
    assert [worker.wait(DEADLINE_S) for worker in run.workers[-2:]] == [0, 0]
    return port


def test_two_nodes_compile_into_one_cache_and_skip_together(make: Callable[..., Run]) -> None:
    run = make(num_nodes=2)
    run_on_both(run, "compile")
    assert [module.state for module in neuron_cache.modules(run.cache)] == ["done"] * 3
    assert sorted(file.name for file in (run.cache / "trainwright").glob("*.json")) == [
        f"{'ab' * 32}.json",
        f"{'ab' * 32}.node1.json",
    ]
    run_on_both(run, "compile", attempt=2)
    assert len(run.told()) == 2
    told = [event.extra["reason"] for event in read_events(run.paths).events if event.state == "SUCCEEDED"]
    assert [str(reason).startswith("skipped: all 3 graphs") for reason in told] == [False, False, True, True]


def test_two_nodes_do_what_node_0_decides(make: Callable[..., Run]) -> None:
    run = make(num_nodes=2)
    port = run_on_both(run, "train")
    calls = sorted(run.told(), key=lambda call: call["argv"][5])
    assert [call["argv"][:6] for call in calls] == [
        ["--nproc_per_node", "4", "--nnodes", "2", "--node_rank", str(node)] for node in (0, 1)
    ]
    assert {(*call["argv"][6:10], call["argv"][-1]) for call in calls} == {
        ("--master_addr", "127.0.0.1", "--master_port", str(port), "--config-name=fresh")
    }
    assert decision.read(run.paths.nxdt_decision("train", 1)).what == "fresh"
    assert "no EFA device, though 2 nodes" in run.log("train", rank=1) or list(Path("/sys/class/infiniband").glob("*"))


@pytest.fixture
def signals() -> Iterator[SignalQueue]:
    before = signal.getsignal(signal.SIGUSR1)
    queue = SignalQueue([signal.SIGUSR1])
    yield queue
    queue.close()
    signal.signal(signal.SIGUSR1, before)


def test_a_node_does_not_wait_for_a_node_0_that_has_failed(tmp_path: Path, signals: SignalQueue) -> None:
    paths = RunPaths(tmp_path)
    append(paths, "FAILED", who=node_who(1, 0), stage="train", attempt=1, reason="no checkpoint is complete")
    peers = Peers(paths, "train", 1, 1, 2)
    with pytest.raises(DriverError, match="node 0 was FAILED: no checkpoint is complete") as failed:
        decision.wait_for(tmp_path / "decision.json", peers, signals, limit_s=60)
    assert failed.value.code == 1


def test_a_node_does_not_wait_for_ever(tmp_path: Path, signals: SignalQueue) -> None:
    peers = Peers(RunPaths(tmp_path), "train", 1, 1, 2)
    with pytest.raises(DriverError, match="node 0 has not decided within 0 s"):
        decision.wait_for(tmp_path / "decision.json", peers, signals, limit_s=0)


def test_a_node_that_waits_can_be_stopped(tmp_path: Path, signals: SignalQueue) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    peers = Peers(RunPaths(tmp_path), "train", 1, 1, 2)
    assert decision.wait_for(tmp_path / "decision.json", peers, signals, limit_s=60) is None


def test_a_decision_is_made_once_where_several_nodes_may_have_read_it(tmp_path: Path) -> None:
    file = tmp_path / "nxdt" / "decision.json"
    decision.publish(file, Decision("fresh", "a"), 2)
    decision.publish(file, Decision("fresh", "b"), 2)
    with pytest.raises(DriverError, match="says fresh, now it would be resume; `trainwright resume` begins"):
        decision.publish(file, Decision("resume", "c"), 2)
    decision.publish(file, Decision("resume", "d"), 1)
    assert decision.read(file) == Decision("resume", "d")


# ---- environment and limits


def settings(**changes: Any) -> dict[str, Any]:
    return {"python": "/env/bin/python3", "cache_url": "/fsx/cache", "unset_env": UNSET, **changes}


def test_hydra_itself_reads_the_yaml_and_leaves_nothing_in_the_checkout(tmp_path: Path) -> None:
    checkout, folder = tmp_path / "nxdt", tmp_path / "it's a = run, 1"
    checkout.mkdir()
    folder.mkdir()
    orchestrator = checkout / "orchestrator.py"
    orchestrator.write_text(
        "import hydra, os\n"
        "@hydra.main(config_path='conf', config_name='megatron_gpt_config', version_base='1.2')\n"
        "def main(cfg):\n"
        "    print(cfg, os.getcwd())\n"
        "main()\n"
    )
    (folder / "fresh.yaml").write_text("name: tiny\n")
    told = {"python": sys.executable, "devices": 1, "orchestrator": str(orchestrator)}
    where: dict[str, Any] = {"node": 0, "num_nodes": 1, "master_addr": "127.0.0.1", "master_port": 1}
    argv = nxdt_setup.command(told, compiles=False, folder=folder, config="fresh", **where)
    rank = [sys.executable, *argv[argv.index(str(orchestrator)) :]]
    printed = subprocess.run(rank, cwd=checkout, stdout=subprocess.PIPE, check=True, text=True).stdout
    assert printed == f"{{'name': 'tiny'}} {checkout}\n"
    assert list(checkout.iterdir()) == [orchestrator]
    assert {path.name for path in folder.iterdir()} == {"fresh.yaml", "hydra"}


def test_only_what_the_config_itself_sets_may_beat_the_yaml() -> None:
    inherited = {"NEURON_CC_FLAGS": "--retry", "XLA_DOWNCAST_BF16": "1", "COMPILE": "1", "PATH": "/bin", "HOME": "/x"}
    env, notes = nxdt_setup.environment(inherited, settings(), kept={"NEURON_CC_FLAGS": "--retry"}, compiles=False)
    assert env == {
        "NEURON_CC_FLAGS": "--retry",
        "PATH": "/env/bin:/bin",
        "HOME": "/x",
        "COMPILE": "0",
        "NEURON_COMPILE_CACHE_URL": "/fsx/cache",
    }
    assert [note.split(" which")[0] for note in notes] == [
        "NEURON_CC_FLAGS is set by launcher.env or hardware.env and beats NxDT's YAML",
        "unset XLA_DOWNCAST_BF16,",
        "unset COMPILE,",
    ]
    assert not any("--retry" in note for note in notes)


def test_a_job_that_its_scheduler_started_again_reads_the_files_of_the_submitted_attempt(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    for attempt in (1, 2):
        paths.nxdt(attempt).mkdir(parents=True)
        (paths.nxdt(attempt) / "settings.json").write_text(json.dumps({"schema_version": 1, "number": attempt}))
    assert [nxdt_setup.read_settings(paths, attempt)[1]["number"] for attempt in (1, 2, 3)] == [1, 2, 2]


def test_ports_that_the_kernel_may_give_away_are_findings(tmp_path: Path) -> None:
    folder = tmp_path / "proc/sys/net/ipv4"
    folder.mkdir(parents=True)
    (folder / "ip_local_port_range").write_text("32768\t60999\n")
    (folder / "ip_local_reserved_ports").write_text("41000,48620-48630\n")

    def found(master_port: int, reserved_port: int | None) -> list[str]:
        check = node_limits.check(num_nodes=1, master_port=master_port, reserved_port=reserved_port, root=tmp_path)
        return [str(finding) for finding in check]

    assert found(20001, None) == found(41000, 48625) == []
    assert found(41001, 48631) == [
        f"finding: port {port}, where the ranks meet, may be given to any other program; as root: "
        f"`sysctl -w net.ipv4.ip_local_reserved_ports={port}`"
        for port in (41001, 48631)
    ]


def test_several_nodes_without_efa_are_a_finding(tmp_path: Path) -> None:
    def found(num_nodes: int) -> int:
        return len(node_limits.check(num_nodes=num_nodes, master_port=1, reserved_port=None, root=tmp_path))

    assert (found(1), found(2)) == (0, 1)
    (tmp_path / "sys/class/infiniband/rdmap16s27").mkdir(parents=True)
    assert found(2) == 0


def test_lustre_clients_with_too_little_room_for_writes_are_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lctl = tmp_path / "lctl"
    lctl.write_text("#!/bin/sh\necho 64\necho 32\n")
    lctl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (finding,) = node_limits.check(num_nodes=1, master_port=1, reserved_port=None, root=tmp_path)
    assert "max_dirty_mb is 32, NxDT sets 64" in str(finding)


def test_open_files_are_raised_as_far_as_the_node_allows() -> None:
    code = (
        "import resource; from trainwright.node.node_limits import raise_open_files\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))\n"
        "print(*raise_open_files(150), resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
        "print(*raise_open_files(65535), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    first, second = told.splitlines()
    assert first == "150"
    assert second.startswith(
        "finding: a process may open 200 files here, NxDT wants 65535; as root: `LimitNOFILE=65535`"
    )
    assert second.endswith(" 200")
