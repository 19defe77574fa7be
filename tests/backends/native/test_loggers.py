"""Weights & Biases and MLflow, without a network, where the extra is installed (CI installs neither)."""

from pathlib import Path

import pytest

from tests.backends.native.runs import MakeConfig, forget_after
from trainwright.backends.native.train import train
from trainwright.config import RunConfig

SAVING = {
    "trainer__log_every_n_steps": 1,
    "exp_manager__checkpoint_callback_params__every_n_train_steps": 4,
    "exp_manager__checkpoint_callback_params__save_top_k": -1,
}


def _train_and_resume_from_4(config: RunConfig, run_dir: Path) -> None:
    train(config, run_dir, 1)
    forget_after(run_dir, 4)
    train(config, run_dir, 2)


@pytest.mark.filterwarnings("default")  # theirs, not ours
def test_mlflow_goes_on_in_the_same_run_with_no_step_twice(make_config: MakeConfig, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs the extra `mlflow`")
    config = make_config(
        **SAVING,
        exp_manager__create_mlflow_logger=True,
        exp_manager__mlflow_logger_kwargs__save_dir=str(tmp_path / "mlruns"),
        exp_manager__mlflow_logger_kwargs__tags={"team": "a"},
    )
    _train_and_resume_from_4(config, tmp_path / "run-1")
    client = mlflow.MlflowClient((tmp_path / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("llama_tiny")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status, run.data.tags["team"]) == ("run-1", "FINISHED", "a")
    assert run.data.params["optim.lr"] == "0.01"
    steps = [point.step for point in client.get_metric_history(run.info.run_id, "train_loss")]
    assert steps == list(range(1, 9))
    assert [point.step for point in client.get_metric_history(run.info.run_id, "val_loss")] == [4, 8]


@pytest.mark.filterwarnings("default")  # theirs, not ours
def test_wandb_goes_on_in_the_same_run(make_config: MakeConfig, tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs the extra `wandb`")
    config = make_config(
        **SAVING,
        exp_manager__create_wandb_logger=True,
        exp_manager__wandb_logger_kwargs={"offline": True, "project": "tests", "name": None},
    )
    _train_and_resume_from_4(config, tmp_path / "run-1")
    left = sorted((tmp_path / "run-1" / "run" / "wandb").glob("offline-run-*-run-1/run-run-1.wandb"))
    assert len(left) == 2
