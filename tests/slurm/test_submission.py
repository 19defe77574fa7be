"""What happens between sbatch and us: crashes, refusals, answers that are lost, jobs that wait."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Result
from tests.fakes import sbatch_on_path
from tests.slurm.cluster import Cluster, wait_for
from tests.slurm.runs import BOOM, OK, WAITS, Runs, await_log, job_id, log, stages
from trainwright import dispatch, registry
from trainwright.node.run_paths import RunPaths
from trainwright.scheduler import open_scheduler

Train = Callable[..., Result]


def test_a_crash_between_sbatch_and_our_event_leads_to_no_second_job(runs: Runs, slurm: Cluster) -> None:
    (record,) = runs.make((OK, OK))
    first = open_scheduler(record.config).submit(record.jobs[0], after=())  # and here the command died
    (outcome,) = dispatch.submit_and_follow([record])
    assert outcome.state == "SUCCEEDED"
    assert slurm.jobs(record.run_id) == [first, job_id(record, "s1")]


def test_a_comment_of_the_users_own_does_not_hide_the_job(runs: Runs, slurm: Cluster) -> None:
    (record,) = runs.make((OK,), overrides=('launcher.comment="it\'s \\"ours\\" $HOME # 100%"',))
    first = open_scheduler(record.config).submit(record.jobs[0], after=())
    assert open_scheduler(record.config).submit(record.jobs[0], after=()) == first
    assert "# 100%" in slurm.ask("squeue", "--all", "--states=all", "--noheader", f"--jobs={first}", "--format=%k")


@pytest.mark.parametrize("is_taken", [True, False], ids=["taken all the same", "not taken"])
def test_an_answer_that_is_lost_leads_to_one_job(
    is_taken: bool, runs: Runs, slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = sbatch_on_path(
        tmp_path / "bin",
        monkeypatch,
        refusals=["Batch job submission failed: Socket timed out on send/recv operation"],
        is_taken=is_taken,
    )
    (outcome,) = runs.follow((OK,))
    assert outcome.state == "SUCCEEDED"
    assert slurm.jobs(outcome.run_id) == [job_id(outcome)]
    assert asked() == (1 if is_taken else 2)


def test_a_refusal_of_the_third_of_four_runs_is_recorded_with_its_message(runs: Runs) -> None:
    good = runs.make((OK,), (OK,))
    bad = runs.make((OK, OK), overrides=("launcher.partition=gone",))
    outcomes = dispatch.submit_and_follow([*good, *bad, *runs.make((OK,))])
    assert [outcome.state for outcome in outcomes] == ["SUCCEEDED", "SUCCEEDED", "NOT_SUBMITTED", "SUCCEEDED"]
    assert "Invalid partition name specified" in str(outcomes[2].reason)
    assert stages(outcomes[2]) == {"s0": "NOT_SUBMITTED", "s1": "NOT_SUBMITTED"}
    assert [outcome.exit_code for outcome in outcomes] == [0, 0, 1, 0]


def test_a_detached_run_returns_at_once_and_says_what_it_waits_for(
    runs: Runs, slurm: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    overrides = ("launcher.wait=false", "launcher.cpus_per_task=64")
    (outcome,) = dispatch.submit_and_follow(runs.make((OK,), overrides=overrides))
    assert (outcome.state, outcome.exit_code) == ("SUBMITTED", 0)
    told = capfd.readouterr().out
    assert f"job {job_id(outcome)}  {outcome.run_id} s0" in told
    assert f"job {job_id(outcome)} waits  PartitionConfig: the partition has no such nodes" in told
    assert "lower hardware.num_nodes, launcher.cpus_per_task or launcher.mem" in told
    slurm.ask("scancel", job_id(outcome))


def test_what_the_submitters_environment_says_does_not_change_the_job(
    runs: Runs, slurm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "short")
    monkeypatch.setenv("SLURM_NODEID", "3")
    (outcome,) = runs.follow((OK,))
    assert outcome.state == "SUCCEEDED"
    assert slurm.job(job_id(outcome))["Partition"] == "main"


def test_cancel_may_be_asked_for_twice(runs: Runs) -> None:
    record = runs.start((WAITS,))
    await_log(record, "ready")
    opened = open_scheduler(record.config)
    for _ in range(2):
        open_scheduler(record.config).cancel([job_id(record)])  # type: ignore[attr-defined]
        wait_for(lambda: opened.look_up([job_id(record)])[job_id(record)].state == "CANCELLED", "it is cancelled")


def test_a_job_that_slurm_forgot_is_unknown_to_it(runs: Runs) -> None:
    (record,) = runs.make((OK,))
    assert open_scheduler(record.config).look_up(["999999"]) == {}


# ---- the command line


@pytest.fixture
def arguments(slurm: Cluster, tmp_path: Path) -> tuple[str, ...]:
    return (
        "launcher=slurm",
        "debug=fast",
        f"launcher.python={sys.executable}",
        "launcher.exclusive=false",
        f"site.slurm.shared_dir={tmp_path}/shared",
        f"exp_manager.exp_dir={tmp_path}/shared/experiments",
    )


@pytest.mark.parametrize("key", ["launcher.partition", "launcher.cpu_partition"])
def test_a_partition_that_does_not_exist_is_refused_before_anything_is_recorded(
    key: str, train: Train, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    result = train(*arguments, f"{key}=mian")
    assert result.code == 3
    assert f"error [scheduler] {key}=mian does not exist; did you mean main?" in result.err
    assert not list(tmp_path.iterdir())


def test_a_machine_without_slurm_says_so(
    train: Train, arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = train(*arguments)
    assert result.code == 3
    assert "launcher=slurm: sbatch is not on this machine; go to its login node" in result.err


def test_a_controller_that_does_not_answer_is_named(
    train: Train, arguments: tuple[str, ...], slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = tmp_path / "slurm.conf"
    dead.write_text(slurm.config.read_text().replace("SlurmctldPort=", "SlurmctldPort=1 #"))
    monkeypatch.setenv("SLURM_CONF", str(dead))
    result = train(*arguments)
    assert result.code == 3
    assert "launcher=slurm: sinfo: slurm_load_partitions: Unable to contact slurm controller" in result.err


def test_a_run_that_is_still_in_the_queue_is_not_resumed(
    train: Train, arguments: tuple[str, ...], runs: Runs, tmp_path: Path
) -> None:
    record = runs.start((WAITS,))
    result = train(*arguments, f"run_id={record.run_id}")
    assert result.code == 3
    assert f"run_id={record.run_id} is still in Slurm: job {job_id(record)}" in result.err
    runs.slurm.ask("scancel", job_id(record))


def test_a_stage_that_is_none_is_refused_by_name(train: Train, arguments: tuple[str, ...], tmp_path: Path) -> None:
    result = train(*arguments, "stages=[trian]")
    assert (result.code, "stages: trian is no stage of this run; use train" in result.err) == (2, True)
    assert not list(tmp_path.iterdir())


def test_a_stage_whose_output_is_complete_is_skipped_and_says_so(
    runs: Runs, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from trainwright.node.commit import write_commit

    output = tmp_path / "fetched"
    output.mkdir()
    write_commit(output, {})
    (outcome,) = runs.follow((BOOM,), outputs=(str(output),))
    assert outcome.state == "SUCCEEDED"
    assert f"skipped  {outcome.run_id} s0: complete already: {output}" in capfd.readouterr().out
    assert registry.refresh(outcome.run_dir).stages[0].reason == f"skipped: complete already: {output}"
    assert log(outcome) == ""
    assert not RunPaths(outcome.run_dir).job_log("s0", 1).exists()
