"""The compiler's cache: states, locks that somebody holds or nobody, what a later run need not compile."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from trainwright import cli
from trainwright.node import neuron_cache
from trainwright.node.compile_gate import CompileGate
from trainwright.node.lock_watch import LockWatch
from trainwright.node.neuron_cache import CacheUse, Compiled, clear_stale_locks, modules, why_compile

COMPILER = "neuronxcc-2.19.8089.0+8ab9f450"
VERSIONS = {"neuronx-cc": "2.19.8089.0", "libneuronxla": None}


def graph(cache: Path, name: str, *files: str, compiler: str = COMPILER) -> Path:
    folder = cache / compiler / f"MODULE_{name}+4eb52b03"
    folder.mkdir(parents=True)
    for file in ("model.hlo_module.pb", *files):
        (folder / file).write_bytes(b"" if file.endswith((".lock", ".done")) else b"12345")
    return folder


def old_lock(cache: Path, name: str = "1") -> Path:
    lock = graph(cache, name, "model.hlo_module.pb.lock") / "model.hlo_module.pb.lock"
    os.utime(lock, (time.time() - 1000, time.time() - 1000))
    return lock


@contextmanager
def running(code: str, *arguments: str) -> Iterator[int]:
    """Run Python code until it says that it is ready; its process id."""
    argv = [sys.executable, "-c", code + "\nprint(flush=True)\nimport signal; signal.pause()", *arguments]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def test_a_graph_is_done_failed_locked_or_incomplete(tmp_path: Path) -> None:
    graph(tmp_path, "1", "model.neff", "model.done")
    graph(tmp_path, "2", "model.log")
    graph(tmp_path, "3", "model.hlo_module.pb.lock")
    graph(tmp_path, "4")
    graph(tmp_path, "5", "model.neff", "model.done", "model.hlo_module.pb.lock")
    (tmp_path / "other").mkdir()
    found = modules(tmp_path)
    assert [(module.name[7], module.state) for module in found] == [
        ("1", "done"),
        ("2", "failed"),
        ("3", "locked"),
        ("4", "incomplete"),
        ("5", "done"),
    ]
    assert [module.size_bytes for module in found] == [10, 10, 5, 5, 10]
    assert [len(module.locks) for module in found] == [0, 0, 1, 0, 1]
    assert modules(tmp_path / "nowhere") == []


def test_a_lock_that_nobody_holds_is_cleared(tmp_path: Path) -> None:
    lock = old_lock(tmp_path)
    done = clear_stale_locks(tmp_path)
    assert (done.cleared, dict(done.kept)) == ((lock,), {})
    assert not lock.exists()
    assert clear_stale_locks(tmp_path).cleared == ()


@pytest.mark.parametrize("how", ["flock", "lockf"])
def test_a_lock_that_a_process_has_locked_stays(tmp_path: Path, how: str) -> None:
    lock = old_lock(tmp_path)
    code = f"import fcntl, sys; f = open(sys.argv[1], 'rb+'); fcntl.{how}(f, fcntl.LOCK_EX)"
    with running(code, str(lock)):
        assert clear_stale_locks(tmp_path).kept == {lock: "a process has locked it"}
    assert clear_stale_locks(tmp_path).cleared == (lock,)


def test_a_lock_whose_graph_a_process_compiles_stays(tmp_path: Path) -> None:
    lock, other = old_lock(tmp_path), old_lock(tmp_path, "2")
    with running("pass", "compile", f"model.{lock.parent.name}.hlo_module.pb") as pid:
        done = clear_stale_locks(tmp_path)
    assert done.kept == {lock: f"process {pid} of this host works on it"}
    assert done.cleared == (other,)


def test_a_lock_that_a_process_has_open_stays(tmp_path: Path) -> None:
    lock = old_lock(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(lock)
    with running("import sys; f = open(sys.argv[1])", str(link)) as pid:
        assert clear_stale_locks(tmp_path).kept == {lock: f"process {pid} of this host works on it"}


def test_while_the_compiler_runs_here_only_what_it_works_on_stays(tmp_path: Path) -> None:
    lock = old_lock(tmp_path)
    tool = tmp_path / "neuron_parallel_compile"
    tool.write_text("print(flush=True)\nimport signal; signal.pause()\n")
    with subprocess.Popen([sys.executable, str(tool)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert clear_stale_locks(tmp_path).kept == {lock: f"process {process.pid} of this host compiles"}
        assert clear_stale_locks(tmp_path, compiles_here=True).cleared == (lock,)
        process.kill()


def test_a_young_lock_stays(tmp_path: Path) -> None:
    lock = old_lock(tmp_path)
    os.utime(lock)
    assert "s old" in clear_stale_locks(tmp_path).kept[lock]


def test_only_the_locks_asked_for_are_looked_at(tmp_path: Path) -> None:
    lock, other = old_lock(tmp_path), old_lock(tmp_path, "2")
    assert clear_stale_locks(tmp_path, only=[other.parent.name]).cleared == (other,)
    assert lock.exists()


def test_a_lock_on_a_file_system_without_locks_is_judged_by_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_none(*_: Any) -> None:
        raise OSError(37, "No locks available")

    lock = old_lock(tmp_path)
    monkeypatch.setattr(fcntl, "flock", has_none)
    monkeypatch.setattr(fcntl, "lockf", has_none)
    assert clear_stale_locks(tmp_path).cleared == (lock,)


def test_while_another_run_uses_the_cache_its_locks_stay(tmp_path: Path) -> None:
    lock = old_lock(tmp_path)
    use = CacheUse(tmp_path, run_dir="/runs/a")
    use.begin()
    assert "run /runs/a uses this cache" in clear_stale_locks(tmp_path, own="/runs/b").kept[lock]
    assert clear_stale_locks(tmp_path, own="/runs/a").cleared == (lock,)
    use.end()
    assert neuron_cache.users(tmp_path) == []


def test_a_user_on_another_host_lives_as_long_as_it_says_so(tmp_path: Path) -> None:
    use = CacheUse(tmp_path, run_dir="/runs/a")
    use.begin()
    use.marker.write_text(json.dumps({"host": "elsewhere", "pid": 1, "started": 5, "run_dir": "/runs/a"}))
    assert [who["host"] for who in neuron_cache.users(tmp_path)] == ["elsewhere"]
    os.utime(use.marker, (time.time() - 1000, time.time() - 1000))
    assert neuron_cache.users(tmp_path) == []
    use.beat()
    assert len(neuron_cache.users(tmp_path)) == 1


def test_a_user_of_this_host_that_was_killed_is_none(tmp_path: Path) -> None:
    use = CacheUse(tmp_path, run_dir="/runs/a")
    use.begin()
    use.marker.write_text(json.dumps({**json.loads(use.marker.read_text()), "started": 1}))
    assert neuron_cache.users(tmp_path) == []


def test_a_user_whose_marker_was_cleaned_away_comes_back(tmp_path: Path) -> None:
    use = CacheUse(tmp_path, run_dir="/runs/a")
    use.begin()
    neuron_cache.clean(tmp_path, only_failed=False)
    use.beat()
    assert len(neuron_cache.users(tmp_path)) == 1


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_lock_that_the_compiler_waits_for_too_long_is_looked_at(tmp_path: Path, num_nodes: int) -> None:
    lock, other = old_lock(tmp_path), old_lock(tmp_path, "2")
    use = CacheUse(tmp_path, run_dir="/runs/a")  # the run's own
    use.begin()
    gate, watch = CompileGate(str(tmp_path)), LockWatch(tmp_path, Path("/runs/a"), num_nodes)
    for minute in range(11):
        gate.feed(f"[INFO]: Another process must be compiling {lock.parent}/model.hlo_module.pb", minute * 60.0)
        told = watch.look(gate, minute * 60.0)
        assert bool(told) == (minute == 10)
    assert told[0] == f"the compiler has waited 600 s for the lock of {lock.parent.name}"
    if num_nodes == 1:
        assert told[1:] == [f"cleared the stale lock {lock}"]
    else:  # another node of the run may be behind it
        assert told[1].startswith(f"left the lock {lock}: run /runs/a uses this cache on")
    assert other.exists()
    assert watch.look(gate, 660.0) == []


# ---- what need not be compiled again


def compiled(cache: Path, *names: str, **changes: Any) -> Compiled:
    graphs = []
    for name in names:
        folder = graph(cache, name, "model.neff", "model.done")
        graphs.append(f"{folder.parent.name}/{folder.name}")
    return Compiled(
        **{"key": "ab" * 32, "key_of": {"tp": 32}, "versions": VERSIONS, "graphs": tuple(graphs), **changes}
    )


def test_a_run_with_the_same_key_and_versions_need_not_compile(tmp_path: Path) -> None:
    before = compiled(tmp_path, "1", "2")
    file = neuron_cache.record(tmp_path, before, node=0, num_nodes=1)
    assert file == tmp_path / "trainwright" / f"{before.key}.json"
    assert json.loads(file.read_text())["key_of"] == {"tp": 32}
    assert why_compile(tmp_path, before.key, VERSIONS, 1) == (None, 2)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda cache: {"key": "cd" * 32}, "no run with this cache key (cdcdcdcdcdcd) has compiled into"),
        (
            lambda cache: {"versions": {**VERSIONS, "neuronx-cc": "2.20"}},
            "neuronx-cc is 2.20, the cache was made with 2.19.8089.0",
        ),
        (
            lambda cache: {"versions": {**VERSIONS, "libneuronxla": "2.2"}},
            "libneuronxla is 2.2, the cache was made with None",
        ),
        (lambda cache: {"num_nodes": 2}, "no run with this cache key"),
        (lambda cache: next(cache.glob("*/MODULE_2*/model.done")).unlink(), "1 of 2 graphs are gone from"),
        (lambda cache: next(cache.glob("trainwright/*.json")).write_text("{"), "is no record of ours"),
    ],
)
def test_what_has_changed_is_why_it_must_compile(
    tmp_path: Path, change: Callable[[Path], dict[str, Any] | None], why: str
) -> None:
    before = compiled(tmp_path, "1", "2")
    neuron_cache.record(tmp_path, before, node=0, num_nodes=1)
    changed = change(tmp_path)
    asked = {"key": before.key, "versions": VERSIONS, "num_nodes": 1, **(changed if isinstance(changed, dict) else {})}
    found, _ = why_compile(tmp_path, **asked)
    assert found is not None
    assert why in found


def test_of_several_nodes_all_must_have_compiled(tmp_path: Path) -> None:
    neuron_cache.record(tmp_path, compiled(tmp_path, "1"), node=0, num_nodes=2)
    neuron_cache.record(tmp_path, compiled(tmp_path, "2"), node=1, num_nodes=2)
    assert why_compile(tmp_path, "ab" * 32, VERSIONS, 2) == (None, 2)


# ---- the command


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["neuron-cache", *arguments])
    return int(ended.value.code or 0)


def test_ls_lists_graphs_with_their_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph(tmp_path, "1", "model.neff", "model.done")
    old_lock(tmp_path, "2")
    CacheUse(tmp_path, run_dir="/runs/a").begin()
    assert run("ls", "--cache", str(tmp_path)) == 0
    out = capsys.readouterr().out
    assert "MODULE_1+4eb52b03  done" in out
    assert f"{tmp_path}: 1 done, 1 locked; 0.00 GiB\nin use by run /runs/a on" in out
    assert run("ls", "--cache", str(tmp_path), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in told["graphs"]] == ["done", "locked"]
    assert told["users"][0]["run_dir"] == "/runs/a"


def test_the_cache_of_the_environment_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path))
    lock = old_lock(tmp_path)
    assert run("clear-locks") == 0
    assert capsys.readouterr().out == f"cleared  {lock}\n"
    assert run("clear-locks", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, "cleared": [], "kept": {}}


@pytest.mark.parametrize("cache", ["s3://bucket/cache", "/nowhere/at/all"])
def test_a_cache_that_cannot_be_looked_into_is_refused(cache: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("clear-locks", "--cache", cache) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {cache}")
    assert ("--command clear-locks" in err) == cache.startswith("s3")


def test_clean_asks_and_removes_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph(tmp_path, "1", "model.neff", "model.done")
    failed = graph(tmp_path, "2", "model.log")
    (tmp_path / "precious").write_text("x")
    assert run("clean", "--cache", str(tmp_path)) == 2  # nobody is there to say yes
    assert "add --yes" in capsys.readouterr().err
    assert run("clean", "--cache", str(tmp_path), "--failed", "--yes") == 0
    assert [module.state for module in modules(tmp_path)] == ["done"]
    assert not failed.exists()
    assert run("clean", "--cache", str(tmp_path), "--yes", "--json") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_clean_leaves_a_compiler_alone_that_is_nobody_s_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = graph(tmp_path, "1", "model.hlo_module.pb.lock") / "model.hlo_module.pb.lock"
    assert run("clean", "--cache", str(tmp_path), "--yes") == 2
    assert (
        f"{tmp_path} is in use; clean it when nothing compiles any more: {lock}: it is only" in capsys.readouterr().err
    )
    os.utime(lock, (0, 0))
    assert run("clean", "--cache", str(tmp_path), "--yes") == 0
    assert modules(tmp_path) == []


def test_clean_leaves_a_cache_in_use_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph(tmp_path, "1")
    CacheUse(tmp_path, run_dir="/runs/a").begin()
    assert run("clean", "--cache", str(tmp_path), "--yes") == 2
    assert "is in use by /runs/a" in capsys.readouterr().err
    assert len(modules(tmp_path)) == 1
