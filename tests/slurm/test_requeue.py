"""Jobs that Slurm starts again: before the time limit, on request, after a node's failure; and how often."""

from concurrent.futures import ThreadPoolExecutor

from tests.slurm.cluster import Cluster, wait_for
from tests.slurm.runs import COUNTS, Runs, await_log, await_state, history, job_id, log, processes, stages
from trainwright import dispatch, registry
from trainwright.node.run_paths import RunPaths
from trainwright.registry import RunRecord


def test_a_run_told_often_enough_is_a_timeout(runs: Runs, slurm: Cluster) -> None:
    record = runs.start((COUNTS, "print('never')"), overrides=("launcher.max_requeues=1",))
    await_log(record, "attempt 1 from 0")
    slurm.ask("scancel", "--signal=USR1", job_id(record))
    await_state(record, "REQUEUED")
    await_log(record, "attempt 2 from 1", attempt=2)
    assert stages(record)["s0"] == "RUNNING"
    slurm.ask("scancel", "--signal=USR1", job_id(record))
    wait_for(lambda: stages(record)["s0"] == "TIMEOUT", "it is a timeout")
    (last,) = [event for event in history(record) if event.state == "TIMEOUT"]
    assert (last.attempt, last.extra["exit_code"]) == (2, 75)
    assert "after 1 of launcher.max_requeues=1 restarts; its state is saved" in last.extra["reason"]
    wait_for(lambda: slurm.job(job_id(record, "s1"))["JobState"] == "CANCELLED", "the stage behind is cancelled")
    assert registry.last_attempt(record.run_dir) == 2
    assert registry.read_record(record.run_dir, 2) == {**registry.read_record(record.run_dir, 1), "attempt": 2}


def test_without_requeues_the_limit_is_a_timeout_at_once(runs: Runs, slurm: Cluster) -> None:
    record = runs.start((COUNTS,), overrides=("launcher.max_requeues=0",))
    await_log(record, "attempt 1 from 0")
    slurm.ask("scancel", "--signal=USR1", job_id(record))
    await_state(record, "TIMEOUT")
    assert slurm.job(job_id(record))["Requeue"] == "0"


def test_a_cancelled_job_is_not_started_again_though_it_saved(runs: Runs, slurm: Cluster) -> None:
    saves = COUNTS.replace("SIGUSR1", "SIGTERM")
    record = runs.start((saves,))
    await_log(record, "attempt 1 from 0")
    slurm.ask("scancel", job_id(record))
    await_state(record, "PREEMPTED")  # all that the node knows
    wait_for(lambda: slurm.job(job_id(record))["JobState"] == "CANCELLED", "Slurm cancels it")
    assert slurm.job(job_id(record))["Restarts"] == "0"
    assert processes(record.run_id) == []


def test_a_node_that_goes_down_starts_the_next_attempt_elsewhere(runs: Runs, slurm: Cluster) -> None:
    code = """
        import signal, sys
        print("attempt", sys.argv[2], flush=True)
        if sys.argv[2] == "1":
            signal.pause()
    """
    record = runs.start((code,), num_nodes=2, overrides=('launcher.exclude="n[3-4]"', "launcher.cpus_per_task=2"))
    await_log(record, "attempt 1", rank=0)
    await_log(record, "attempt 1", rank=1)
    slurm.lose("n2")
    await_state(record, "SUCCEEDED")
    assert [log(record, attempt=2, rank=rank) for rank in (0, 1)] == ["attempt 2\n"] * 2
    assert log(record) == "attempt 1\n"
    assert slurm.job(job_id(record))["Restarts"] == "1"


def test_a_node_that_goes_down_too_often_ends_the_run_as_a_timeout(runs: Runs, slurm: Cluster) -> None:
    only_n2 = ("launcher.nodelist=n2", "launcher.max_requeues=1")
    record = runs.start(("import signal; print('up', flush=True); signal.pause()",), overrides=only_n2)
    for attempt in (1, 2):
        await_log(record, "up", attempt=attempt)
        slurm.lose("n2")
    await_state(record, "TIMEOUT")
    reason = registry.refresh(record.run_dir).reason
    assert reason == "it was started again 2 times, launcher.max_requeues=1 are allowed"


def test_a_controller_that_restarts_in_mid_run_changes_nothing(runs: Runs, slurm: Cluster) -> None:
    code = """
        import pathlib, sys
        print("ready", flush=True)
        while not pathlib.Path(sys.argv[1], "go").exists():
            pass
    """
    (record,) = runs.make((code, "print('second')"))
    with ThreadPoolExecutor() as beside:
        followed = beside.submit(dispatch.submit_and_follow, [record])
        await_log(record, "ready")
        slurm.stop("slurmctld")
        (record.run_dir / "go").touch()
        wait_for(lambda: stages(record)["s0"] == "SUCCEEDED", "the stage ends while nobody controls it")
        slurm.start_controller()
        (outcome,) = followed.result()
    assert outcome.state == "SUCCEEDED"
    assert log(record, "s1") == "second\n"


def test_before_the_time_limit_a_run_saves_and_goes_on_in_the_next_attempt(short_of_time: RunRecord) -> None:
    await_state(short_of_time, "SUCCEEDED")
    for rank in (0, 1):
        assert log(short_of_time, rank=rank) == "attempt 1 from 0\n"
        assert log(short_of_time, rank=rank, attempt=2) == "attempt 2 from 1\n"
    told = [(event.state, event.attempt) for event in history(short_of_time) if event.stage == "s0"]
    assert told.count(("PREEMPTED", 1)) == 2
    assert told.count(("REQUEUED", 2)) == 1
    reasons = {event.extra["reason"] for event in history(short_of_time) if event.state == "PREEMPTED"}
    assert reasons == {"stopped by SIGUSR1; Slurm starts it again"}
    assert log(short_of_time, "s1") == "fine\n"
    assert RunPaths(short_of_time.run_dir).job(2, "s0").exists()
