from __future__ import annotations

import ast
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import device_monitor
from tests.node import living
from trainwright import node
from trainwright.node.events import Event, read_events
from trainwright.node.run_paths import RunPaths
from trainwright.worker_zip import build_worker

DEADLINE_S = 90  # for conditions that must come true; a machine under load is slow, not wrong
wait_for = partial(living.wait_for, deadline_s=DEADLINE_S)
SOURCES = sorted(Path(node.__file__).parent.glob("*.py"))

STOPPABLE = """
    import signal, sys
    def stop(number, frame):
        print("got", signal.Signals(number).name)
        sys.exit(75)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, stop)
    print("ready")
    while True:
        signal.pause()
"""
DEAF = """
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("ready")
    while True:
        signal.pause()
"""
LEAVES_A_DAEMON = """
    import subprocess, sys
    subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
"""


class Run:
    """A run directory with one stage, and the workers started for it."""

    def __init__(self, run_dir: Path) -> None:
        self.paths = RunPaths(run_dir)
        self.mark = f"TRAINWRIGHT_TEST_MARK={run_dir}"
        self.workers: list[subprocess.Popen[bytes]] = []

    def write(self, script: str, **job: Any) -> Run:
        for folder in (self.paths.jobs, self.paths.logs):
            folder.mkdir(parents=True)
        file = self.paths.own / "rank.py"
        file.write_text(textwrap.dedent(script))
        key, _, value = self.mark.partition("=")
        content = {
            "schema_version": 1,
            "launch": "plain",
            "command": [sys.executable, str(file)],
            "python": sys.executable,
            "env": {key: value},
            "num_nodes": 1,
            "devices": 1,
            "grace_s": 20.0,
            **job,
        }
        if content["launch"] == "torchrun":
            content["command"] = [str(file)]
        self.paths.job(1, "train").write_text(json.dumps(content))
        build_worker(self.paths.worker)
        return self

    def start(self, *arguments: str, stdout: int | None = None, **environ: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, self.paths.worker, self.paths.run_dir, "--stage", "train", "--attempt", "1", *arguments]
        number = len(self.workers)
        with open(self.output(number), "wb") as out, open(self.errors(number), "wb") as err:
            worker = subprocess.Popen(argv, stdout=stdout or out, stderr=err, env={**os.environ, **environ})
        self.workers.append(worker)
        return worker

    def run(self, *arguments: str, **environ: str) -> int:
        return self.start(*arguments, **environ).wait(DEADLINE_S)

    def output(self, number: int = 0) -> Path:
        return self.paths.own / f"stdout-{number}"

    def errors(self, number: int = 0) -> Path:
        return self.paths.own / f"stderr-{number}"

    def log(self, rank: int = 0) -> Path:
        return self.paths.rank_log("train", 1, rank)

    def await_ready(self, *ranks: int) -> None:
        wait_for(lambda: all(self.log(rank).exists() and b"ready" in self.log(rank).read_bytes() for rank in ranks))

    def last_event(self) -> Event:
        history = read_events(self.paths)
        assert history.unreadable == ()
        return history.events[-1]

    def processes(self) -> list[int]:
        """All living processes that carry this run's mark in their environment."""
        return living.marked(self.mark)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    living.end([run])


def test_a_rank_that_ends_well_makes_a_succeeded_run(run: Run) -> None:
    assert run.write("print('hello')").run() == 0
    assert [event.state for event in read_events(run.paths).events] == ["RUNNING", "SUCCEEDED"]
    assert run.output().read_bytes() == run.log().read_bytes() == b"hello\n"
    record = json.loads(run.paths.rank_record("train", 1, 0).read_text())
    assert (record["exit_code"], record["signal"]) == (0, None)


def test_log_and_terminal_hold_the_bytes_that_the_rank_wrote(run: Run) -> None:
    script = r"""
        import os
        os.write(1, b"half a line \xff\xfe\x00 ")
        os.write(2, b"\r 10%\r100%\xc3")
    """
    assert run.write(script).run() == 0
    expected = b"half a line \xff\xfe\x00 \r 10%\r100%\xc3"
    assert run.log().read_bytes() == expected
    assert run.output().read_bytes() == expected


def test_a_flood_that_nobody_reads_holds_up_neither_rank_nor_worker(run: Run) -> None:
    worker = run.write("import os\nfor _ in range(300): os.write(2, b'x' * 100_000)").start(stdout=subprocess.PIPE)
    assert worker.stdout is not None
    with worker.stdout:
        assert worker.wait(DEADLINE_S) == 0
    assert run.log().stat().st_size == 30_000_000


def test_a_flood_of_100_mb_needs_no_memory(run: Run) -> None:
    flood = "import os\nfor _ in range(1000): os.write(2, b'x' * 100_000)\n"
    worker = run.write(flood + "import signal; signal.pause()").start()
    wait_for(lambda: run.output().stat().st_size == 100_000_000)
    status = Path(f"/proc/{worker.pid}/status").read_text()
    (peak_kib,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    assert peak_kib < 50_000  # Python alone takes some 15,000
    worker.terminate()
    assert worker.wait(DEADLINE_S) == 143
    assert run.last_event().state == "CANCELLED"


def test_a_flood_reaches_a_reader_whole(run: Run) -> None:
    worker = run.write("import os\nfor _ in range(300): os.write(2, b'x' * 100_000)").start(stdout=subprocess.PIPE)
    assert len(worker.communicate()[0]) == 30_000_000


def test_lines_reach_the_terminal_while_the_rank_runs(run: Run) -> None:
    worker = run.write(STOPPABLE).start()
    wait_for(lambda: b"ready" in run.output().read_bytes())
    worker.terminate()
    assert worker.wait(DEADLINE_S) == 75


@pytest.mark.parametrize(
    ("script", "exit_code", "state", "reason"),
    [
        ("print('oh'); raise SystemExit(7)", 7, "FAILED", "rank 0 ended with exit code 7"),
        ("import os; print('oh'); os.kill(os.getpid(), 9)", 137, "FAILED", "rank 0 was killed by SIGKILL"),
        ("print('oh'); raise SystemExit(75)", 75, "PREEMPTED", "the ranks asked to be started again"),
    ],
)
def test_the_exit_code_of_a_rank_is_the_job_s(run: Run, script: str, exit_code: int, state: str, reason: str) -> None:
    assert run.write(script).run() == exit_code
    event = run.last_event()
    assert (event.state, event.extra["exit_code"], event.extra["reason"]) == (state, exit_code, reason)
    if state == "FAILED":
        assert (event.extra["first_failing_rank"], event.extra["last_lines"]) == (0, ["oh"])
        assert reason in run.errors().read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_the_worker_reaches_the_rank_which_may_save_and_leave(run: Run, number: signal.Signals) -> None:
    worker = run.write(STOPPABLE).start()
    run.await_ready(0)
    worker.send_signal(number)
    assert worker.wait(DEADLINE_S) == 75
    assert run.log().read_text() == f"ready\ngot {number.name}\n"
    assert run.last_event().state == "PREEMPTED"


def test_a_rank_that_is_stopped_without_saving_is_a_cancelled_run(run: Run) -> None:
    worker = run.write("import signal; print('ready'); signal.pause()").start()
    run.await_ready(0)
    worker.terminate()
    assert worker.wait(DEADLINE_S) == 143
    assert run.last_event().state == "CANCELLED"


def test_a_rank_that_ignores_the_signal_is_killed_after_the_grace(run: Run) -> None:
    worker = run.write(DEAF, grace_s=0.5).start()
    run.await_ready(0)
    worker.terminate()
    assert worker.wait(DEADLINE_S) == 137
    assert (run.last_event().state, run.last_event().extra["first_failing_rank"]) == ("CANCELLED", 0)
    assert json.loads(run.paths.rank_record("train", 1, 0).read_text())["signal"] == signal.SIGKILL
    assert run.processes() == []


def test_a_second_interrupt_does_not_wait_for_the_grace(run: Run) -> None:
    script = DEAF.replace("signal.SIGINT, signal.SIG_IGN", "signal.SIGINT, lambda *_: print('heard')")
    worker = run.write(script, grace_s=1e6).start()
    run.await_ready(0)
    worker.send_signal(signal.SIGINT)
    wait_for(lambda: b"heard" in run.log().read_bytes())
    worker.send_signal(signal.SIGINT)
    assert worker.wait(DEADLINE_S) == 137
    assert run.processes() == []


def test_a_job_that_is_stopped_before_its_ranks_began_ends_at_once(run: Run, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 1000\n")
    python.chmod(0o755)
    worker = run.write("", launch="torchrun", python=str(python), grace_s=1e6).start()
    wait_for(lambda: read_events(run.paths).events)
    worker.terminate()
    assert worker.wait(DEADLINE_S) == 143
    assert run.last_event().state == "CANCELLED"
    assert run.processes() == []


def test_no_process_outlives_a_killed_worker(run: Run) -> None:
    worker = run.write(DEAF).start()
    run.await_ready(0)
    worker.kill()
    wait_for(lambda: run.processes() == [])


def test_what_a_rank_left_in_the_background_ends_with_the_job(run: Run) -> None:
    assert run.write(LEAVES_A_DAEMON).run() == 0
    assert run.processes() == []


def test_the_job_s_environment_lies_over_the_inherited_one(run: Run) -> None:
    run.write("import os; print(os.environ['A'], os.environ['B'])", env={"A": "job"})
    assert run.run(A="shell", B="shell") == 0
    assert run.log().read_text() == "job shell\n"


def test_a_plain_command_learns_its_place_in_the_cluster(run: Run) -> None:
    run.write("import os; print(*(os.environ[k] for k in ('NODE_RANK', 'NNODES', 'MASTER_ADDR')))", num_nodes=2)
    assert run.run("--node-rank=1", "--num-nodes=2", "--master-addr=127.0.0.1", "--master-port=5000") == 0
    assert run.log(1).read_text() == "1 2 127.0.0.1\n"
    assert (run.last_event().who, run.last_event().extra["num_nodes"]) == ("a1-node1", 2)


@pytest.mark.parametrize(
    ("break_it", "exit_code", "message"),
    [
        (lambda run: run.paths.job(1, "train").unlink(), 2, "cannot read the job"),
        (lambda run: run.paths.job(1, "train").write_text("{"), 2, "cannot read the job"),
        (lambda run: run.paths.events.write_text("in the way"), 1, "run/events"),
        (lambda run: (run.paths.logs.rmdir(), run.paths.logs.write_text("in the way")), 1, "run/logs"),
        (lambda run: run.paths.node_log("train", 1, 0).mkdir(), 1, "node0.log"),
        (lambda run: run.log().mkdir(), 1, "rank0.log"),
    ],
)
def test_what_cannot_be_read_or_written_is_said_clearly(
    run: Run, break_it: Callable[[Run], object], exit_code: int, message: str
) -> None:
    run.write("print('hello')")
    break_it(run)
    assert run.run() == exit_code
    assert message in run.errors().read_text()
    assert "Traceback" not in run.errors().read_text()


@pytest.mark.parametrize(("bytes_left", "message"), [(0, "cannot work in"), (2000, "rank 0 ended with exit code")])
def test_a_disk_that_takes_no_more_ends_the_job_with_a_clear_word(run: Run, bytes_left: int, message: str) -> None:
    run.write("print('x' * 10_000)")
    argv = [sys.executable, run.paths.worker, run.paths.run_dir, "--stage", "train"]
    limit = (resource.RLIMIT_FSIZE, (bytes_left, bytes_left))  # as a full disk, but for this process tree only
    ended = subprocess.run(argv, capture_output=True, text=True, preexec_fn=lambda: resource.setrlimit(*limit))
    assert ended.returncode == 1
    assert message in ended.stderr


def test_an_environment_that_does_not_fit_is_refused_before_anything_starts(run: Run) -> None:
    assert run.write("print('hello')").run(SLURM_NODEID="0", SLURM_NNODES="4") == 2
    assert "made for num_nodes=1, but here SLURM_NNODES=4" in run.errors().read_text()
    assert read_events(run.paths).events == ()


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (
            {"command": ["no-such-program"]},
            "rank 0 could not start: [Errno 2] No such file or directory: 'no-such-program'",
        ),
        ({"python": "no-such-python"}, "No such file or directory: 'no-such-python'"),
        ({"launch": "torchrun", "python": "false"}, "the launcher ended with exit code 1 before ranks [0] started"),
    ],
)
def test_a_program_that_cannot_be_started_is_named(run: Run, job: dict[str, Any], reason: str) -> None:
    assert run.write("", **job).run() == 1
    assert run.last_event().state == "FAILED"
    assert reason in run.last_event().extra["reason"]


def test_two_nodes_meet_through_torchrun(run: Run) -> None:
    script = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.tensor([float(dist.get_rank() + 1)])
        dist.all_reduce(total)
        print("rank", dist.get_rank(), "of", dist.get_world_size(), "sum", total.item())
        dist.destroy_process_group()
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run.write(script, launch="torchrun", num_nodes=2)
    for rank in (0, 1):
        run.start(f"--node-rank={rank}", "--num-nodes=2", "--master-addr=127.0.0.1", f"--master-port={port}")
    assert [worker.wait(DEADLINE_S) for worker in run.workers] == [0, 0]
    for rank in (0, 1):
        assert f"rank {rank} of 2 sum 3.0\n" in run.log(rank).read_text()
    assert run.output(0).read_bytes() == run.log(0).read_bytes()
    assert run.output(1).read_bytes() == b""
    assert run.processes() == []


def test_a_killed_rank_brings_down_a_peer_that_ignores_sigterm(run: Run) -> None:
    script = f"""
        import os, pathlib
        peer = pathlib.Path(__file__).parent / "logs/train-a1-rank0.log"
        if os.environ["RANK"] == "1":
            while not (peer.exists() and "ready" in peer.read_text()):
                pass
            print("step 7", flush=True)
            os.kill(os.getpid(), 9)
        exec({textwrap.dedent(DEAF)!r})
    """
    assert run.write(script, launch="torchrun", devices=2, grace_s=1.0).run() == 137
    event = run.last_event()
    assert (event.state, event.extra["first_failing_rank"]) == ("FAILED", 1)
    assert event.extra["reason"] == "rank 1 was killed by SIGKILL"
    assert event.extra["last_lines"] == ["step 7"]
    assert "step 7" in run.errors().read_text()
    assert run.processes() == []


def test_a_rank_that_leaves_early_with_0_fails_the_job_and_is_named(run: Run) -> None:
    script = """
        import os, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        if os.environ["RANK"] == "1":
            os._exit(0)
        dist.all_reduce(torch.ones(1))
    """
    assert run.write(script, launch="torchrun", devices=2).run() == 1
    assert run.last_event().state == "FAILED"
    assert run.last_event().extra["reason"] == "rank 0 ended with exit code 1, after ranks [1] had ended with 0"
    assert run.processes() == []


def test_a_node_that_fails_ends_the_others_with_its_exit_code(run: Run) -> None:
    fails = "import os\nif os.environ['NODE_RANK'] == '1': raise SystemExit(9)\n"
    run.write(fails + textwrap.dedent(DEAF), num_nodes=2)
    for rank in (0, 1):
        run.start(f"--node-rank={rank}", "--num-nodes=2", "--master-addr=127.0.0.1", "--master-port=5000")
    assert [worker.wait(DEADLINE_S) for worker in run.workers] == [9, 9]
    assert {event.who: event.state for event in read_events(run.paths).events} == {
        "a1-node0": "CANCELLED",
        "a1-node1": "FAILED",
    }
    assert run.last_event().extra["reason"] == "stopped since node 1 was FAILED: rank 1 ended with exit code 9"
    assert run.processes() == []


@pytest.mark.parametrize(("monitor", "suffix"), [("nvidia-smi", "csv"), ("neuron-monitor", "jsonl")])
def test_a_device_monitor_writes_beside_the_run_and_ends_with_it(
    run: Run, tmp_path: Path, monitor: str, suffix: str
) -> None:
    samples = run.paths.device_samples("train", 1, 0, suffix)
    path = device_monitor(tmp_path / "bin", monitor)
    script = f"""
        import pathlib
        while not (pathlib.Path({str(samples)!r}).exists() and pathlib.Path({str(samples)!r}).read_text()):
            pass
    """
    assert run.write(script).run(PATH=path) == 0
    assert samples.read_text().startswith({"csv": "--query-gpu=timestamp,index", "jsonl": "-c "}[suffix])
    assert run.processes() == []


def test_ranks_below_torchrun_save_and_leave_one_after_the_other(run: Run) -> None:
    slow = STOPPABLE.replace("sys.exit(75)", "peer_is_gone(); sys.exit(75)")
    script = f"""
        import os, pathlib
        record = pathlib.Path(__file__).parent / "ranks/train-a1-rank0.json"
        def peer_is_gone():
            while os.environ["RANK"] == "1" and "exit_code" not in record.read_text():
                pass
        exec({textwrap.dedent(slow)!r})
    """
    worker = run.write(script, launch="torchrun", devices=2).start()
    run.await_ready(0, 1)
    (torchrun,) = [pid for pid in run.processes() if b"--nproc-per-node" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(torchrun, signal.SIGUSR1)  # as Slurm does to every process of a step; it must not die of it
    worker.terminate()
    assert worker.wait(DEADLINE_S) == 75
    assert [run.log(rank).read_text() for rank in (0, 1)] == ["ready\ngot SIGTERM\n"] * 2
    assert run.last_event().state == "PREEMPTED"


def test_the_worker_starts_without_site_and_environment(run: Run) -> None:
    build_worker(run.paths.run_dir / "worker.pyz")
    argv = [sys.executable, "-S", "-I", run.paths.run_dir / "worker.pyz", "--help"]
    assert "--node-rank" in subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def test_equal_sources_make_equal_workers(tmp_path: Path) -> None:
    for name in ("a.pyz", "b.pyz"):
        build_worker(tmp_path / name)
    assert (tmp_path / "a.pyz").read_bytes() == (tmp_path / "b.pyz").read_bytes()
    with zipfile.ZipFile(tmp_path / "a.pyz") as archive:
        assert archive.namelist() == sorted(["__main__.py", *(f"node/{file.name}" for file in SOURCES)])


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_a_node_needs_python_3_8_and_its_standard_library_only(source: Path) -> None:
    tree = ast.parse(source.read_text(), feature_version=(3, 8))
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Import):
            modules = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.level == 0:
            modules = [statement.module or ""]
        else:
            continue
        assert {name.split(".")[0] for name in modules} <= sys.stdlib_module_names
