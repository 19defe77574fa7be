from __future__ import annotations

from pathlib import Path

import pytest

from trainwright.node.run_paths import RunPaths, SweepPaths


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (RunPaths("/r").worker, "/r/run/worker.pyz"),
        (RunPaths("/r").results, "/r/run/results.json"),
        (RunPaths("/r").record(1), "/r/run/run.yaml"),
        (RunPaths("/r").record(2), "/r/run/run-a2.yaml"),
        (RunPaths("/r").job(2, "train"), "/r/run/jobs/a2-train.json"),
        (RunPaths("/r").node_log("train", 1, 0), "/r/run/logs/train-a1-node0.log"),
        (RunPaths("/r").rank_log("train", 1, 12), "/r/run/logs/train-a1-rank12.log"),
        (RunPaths("/r").rank_record("train", 1, 12), "/r/run/ranks/train-a1-rank12.json"),
        (RunPaths("/r").checkpoint("last"), "/r/checkpoints/last"),
        (SweepPaths("/e", "gpt", "s1").sweep_dir, "/e/gpt/sweeps/s1"),
    ],
)
def test_each_file_has_its_place(path: Path, expected: str) -> None:
    assert path == Path(expected)


def test_no_file_of_ours_lies_loose_in_the_run_directory() -> None:
    paths = RunPaths("/r")
    ours = [paths.worker, paths.results, paths.events, paths.jobs, paths.logs, paths.ranks, paths.record(1)]
    assert all(path.parent.is_relative_to("/r/run") for path in ours)


def test_a_run_below_an_unset_fact_of_the_site_stays_recognisable() -> None:
    assert RunPaths("<site.slurm.shared_dir>/r").worker == Path("<site.slurm.shared_dir>/r/run/worker.pyz")


def test_a_relative_run_directory_survives_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = RunPaths("r")
    monkeypatch.chdir("/")
    assert paths.run_dir == tmp_path / "r"
