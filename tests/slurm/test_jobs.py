"""Runs on a real Slurm: nodes, chains, lanes, cancelling, and who is to blame when one fails."""

from dataclasses import replace

import pytest

from tests.slurm.cluster import Cluster, wait_for
from tests.slurm.runs import BOOM, OK, WAITS, Runs, await_log, history, job_id, log, processes, stages
from trainwright import dispatch, registry
from trainwright.node.run_paths import RunPaths

# Node 0 listens where the nodes are to meet, the others connect.
MEETS = """
    import os, socket
    place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if os.environ["NODE_RANK"] == "0":
        with socket.create_server(("", place[1])) as server:
            peer, _ = server.accept()
            peer.sendall(os.environ["MARK"].encode())
            peer.close()
    else:
        while True:
            try:
                with socket.create_connection(place) as to_first:
                    print(to_first.recv(1000).decode())
                break
            except ConnectionRefusedError:
                pass
"""


def test_two_jobs_on_the_same_nodes_each_meet_their_own_peer(runs: Runs) -> None:
    outcomes = runs.follow((MEETS,), (MEETS,), num_nodes=2, overrides=('launcher.nodelist="n[1-2]"',))
    assert [outcome.state for outcome in outcomes] == ["SUCCEEDED", "SUCCEEDED"]
    assert [log(outcome, rank=1) for outcome in outcomes] == [f"{outcome.run_id}\n" for outcome in outcomes]


def test_the_submitted_script_is_the_recorded_one(runs: Runs, slurm: Cluster) -> None:
    (outcome,) = runs.follow((OK,))
    script = RunPaths(outcome.run_dir).job_script(1, "s0").read_text()
    assert slurm.ask("scontrol", "write", "batch_script", job_id(outcome), "-") == script


def test_a_directory_with_blanks_quotes_and_percents_works(slurm: Cluster, runs: Runs) -> None:
    (outcome,) = replace(runs, shared=runs.shared / 'it\'s "a" $HOME, 100%j').follow(
        ("import sys; print(sys.argv[1])",)
    )
    assert outcome.state == "SUCCEEDED"
    assert log(outcome) == f"{outcome.run_dir}\n"
    assert RunPaths(outcome.run_dir).job_log("s0", 1).exists()


def test_no_stage_starts_behind_a_failed_one_and_the_next_attempt_goes_on_there(
    runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    (record,) = runs.make((OK, BOOM, OK))
    (outcome,) = dispatch.submit_and_follow([record])
    assert (outcome.state, outcome.exit_code) == ("FAILED", 1)
    assert stages(outcome) == {"s0": "SUCCEEDED", "s1": "FAILED", "s2": "CANCELLED"}
    assert "DependencyNeverSatisfied" in history(outcome)[-1].extra["reason"]
    assert log(outcome, "s2") == ""

    capfd.readouterr()
    (outcome,) = dispatch.submit_and_follow([runs.again(record, (BOOM, OK, OK))])
    assert outcome.state == "SUCCEEDED"
    assert f"skipped  {record.run_id} s0: it is done; stages_from=s0 repeats it" in capfd.readouterr().out
    assert (log(outcome, "s1", attempt=2), log(outcome, "s2", attempt=2)) == ("fine\n", "fine\n")


def test_runs_of_a_sweep_queue_in_lanes(runs: Runs) -> None:
    outcomes = runs.follow(*[(OK, OK)] * 4, overrides=("launcher.max_parallel=2",))
    assert [outcome.state for outcome in outcomes] == ["SUCCEEDED"] * 4
    spans = []
    for outcome in outcomes:
        times = [event.time for event in history(outcome) if event.node == 0]
        spans.append((min(times), max(times)))
    assert max(sum(start <= at <= end for start, end in spans) for at, _ in spans) == 2
    assert spans[0][1] < spans[2][0]
    assert spans[1][1] < spans[3][0]


def test_on_failure_stop_ends_the_lane_behind_a_failed_run(runs: Runs) -> None:
    outcomes = runs.follow((OK,), (BOOM,), (OK,), overrides=("launcher.max_parallel=1", "on_failure=stop"))
    assert [outcome.state for outcome in outcomes] == ["SUCCEEDED", "FAILED", "CANCELLED"]


def test_one_failure_on_any_node_ends_the_job_with_its_code_and_blames_the_rank(runs: Runs) -> None:
    code = """
        import os, signal, sys
        if os.environ["NODE_RANK"] == "1":
            print("step 7")
            sys.exit(9)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pause()
    """
    (outcome,) = runs.follow((code,), num_nodes=3)
    state = registry.refresh(outcome.run_dir)
    assert (state.state, state.exit_code, state.first_failing_rank) == ("FAILED", 9, 1)
    assert (state.reason, state.last_lines) == ("rank 1 ended with exit code 9", ("step 7",))
    assert state.stages[0].nodes == {0: "CANCELLED", 1: "FAILED", 2: "CANCELLED"}
    assert runs.slurm.job(job_id(outcome))["ExitCode"] == "9:0"
    assert processes(outcome.run_id) == []


def test_a_cancelled_job_leaves_no_process_and_says_that_it_was_cancelled(runs: Runs, slurm: Cluster) -> None:
    record = runs.start((WAITS,), num_nodes=2)
    await_log(record, "ready", rank=0)
    await_log(record, "ready", rank=1)
    slurm.ask("scancel", job_id(record))
    wait_for(lambda: processes(record.run_id) == [], "no process is left")
    wait_for(lambda: stages(record) == {"s0": "CANCELLED"}, "the run is CANCELLED")


def test_a_worker_that_is_killed_leaves_slurms_word(runs: Runs) -> None:
    code = """
        import os, signal
        status = open(f"/proc/{os.getppid()}/status").read()
        os.kill(int(status.split("PPid:")[1].split()[0]), signal.SIGKILL)
        signal.pause()
    """
    (outcome,) = runs.follow((code,))
    assert outcome.state == "FAILED"
    assert "Slurm says NonZeroExitCode" in str(outcome.reason)
    assert str(RunPaths(outcome.run_dir).job_log("s0", 1)) in str(outcome.reason)
    assert registry.refresh(outcome.run_dir).exit_code == 137
