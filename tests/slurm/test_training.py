"""Our own backend on a real Slurm: the same losses as on this machine, and a requeue that goes on where it saved."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.conftest import Result
from tests.slurm.cluster import Cluster, wait_for
from trainwright.node.events import read_events
from trainwright.node.run_paths import RunPaths
from trainwright.registry import refresh

Train = Callable[..., Result]
TWO_NODES = ("debug=fast", "hardware.num_nodes=2", "trainer.num_threads=1", "exp_manager.log_step_timing=false")


def arguments(on_slurm: tuple[str, ...], shared: Path) -> tuple[str, ...]:
    site = (f"site.slurm.shared_dir={shared}", f"exp_manager.exp_dir={shared}/experiments")
    return (*on_slurm, *site, "launcher.grace_s=20", "launcher.signal_s=30")


def runs_below(folder: Path) -> list[RunPaths]:
    return [RunPaths(path.parents[1]) for path in sorted(folder.glob("experiments/*/*/run/run.yaml"))]


def losses(paths: RunPaths, attempt: int = 1) -> dict[int, Any]:
    import json

    lines = (paths.own / f"metrics-a{attempt}.jsonl").read_text().splitlines()
    return {line["step"]: line["train_loss"] for line in map(json.loads, lines) if "train_loss" in line}


def test_two_nodes_of_a_cluster_train_as_two_of_this_machine(
    train: Train, on_slurm: tuple[str, ...], tmp_path: Path, slurm: Cluster
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    local = train(*TWO_NODES, f"exp_manager.exp_dir={here}/experiments")
    assert local.code == 0, local.err
    remote = train(*TWO_NODES, *arguments(on_slurm, there), "launcher.wait=true")
    assert remote.code == 0, remote.err
    assert "succeeded" in remote.out
    (one,), (other,) = runs_below(here), runs_below(there)
    assert len(losses(one)) == 3
    assert losses(one) == losses(other)


def test_a_requeued_training_goes_on_from_the_step_that_it_saved(
    train: Train, on_slurm: tuple[str, ...], tmp_path: Path, slurm: Cluster
) -> None:
    endless = ("debug=fast", "trainer.max_steps=1000000", "trainer.val_check_interval=1000000")
    result = train(*endless, *arguments(on_slurm, tmp_path))
    assert result.code == 0, result.err
    (paths,) = runs_below(tmp_path)
    job_id = next(event.extra["job_id"] for event in read_events(paths).events if event.state == "SUBMITTED")
    await_steps(paths, attempt=1)
    slurm.ask("scancel", "--signal=USR1", job_id)
    await_steps(paths, attempt=2)
    slurm.ask("scancel", job_id)
    wait_for(lambda: refresh(paths.run_dir).state in ("PREEMPTED", "CANCELLED"), "it is cancelled")
    saved = max(losses(paths, 1))
    assert f"resuming from step {saved}" in paths.rank_log("train", 2, 0).read_text()
    assert min(losses(paths, 2)) == saved + 1
    assert list(paths.run_dir.glob("events.out.tfevents.*"))


def await_steps(paths: RunPaths, attempt: int) -> None:
    metrics = paths.own / f"metrics-a{attempt}.jsonl"
    wait_for(lambda: metrics.exists() and "train_loss" in metrics.read_text(), f"attempt {attempt} makes steps")
