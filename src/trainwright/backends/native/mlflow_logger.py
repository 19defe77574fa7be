"""MLflow as a logger: one MLflow run for all attempts of a run."""

import os
from collections.abc import Mapping
from pathlib import Path

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient
from mlflow.utils.time import get_current_time_millis

from trainwright.backends.native.event_files import hyperparameters
from trainwright.config import RunConfig
from trainwright.exp_manager import run_name

_RUN_ID_TAG = "trainwright.run_dir"


class MlflowLogger:
    """Writes scalars to the MLflow run that bears this run's directory as a tag, made when there is none."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        options = config.exp_manager.mlflow_logger_kwargs
        self._prefix = f"{options.prefix}-" if options.prefix else ""
        # A directory is what save_dir means; newer versions of MLflow want to be told that one is meant.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = MlflowClient(options.tracking_uri or Path(options.save_dir).absolute().as_uri())
        self._run_id = options.run_id or self._find_or_create(config, run_dir)
        self._logged: dict[str, int] = {}  # last step by metric, of earlier attempts

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        now = get_current_time_millis()
        new = [
            Metric(f"{self._prefix}{tag}", value, now, step)
            for tag, value in values.items()
            if step > self._last_logged(f"{self._prefix}{tag}")
        ]
        self._client.log_batch(self._run_id, metrics=new)

    def flush(self) -> None:
        """Do nothing: each call is written when it returns."""

    def close(self) -> None:
        self._client.set_terminated(self._run_id)

    def _last_logged(self, metric: str) -> int:
        """Return the last step that an earlier attempt logged: MLflow keeps every value it is given, the same too."""
        if metric not in self._logged:
            history = self._client.get_metric_history(self._run_id, metric)
            self._logged[metric] = max((point.step for point in history), default=-1)
        return self._logged[metric]

    def _find_or_create(self, config: RunConfig, run_dir: Path) -> str:
        options = config.exp_manager.mlflow_logger_kwargs
        name = options.experiment_name or run_name(config)
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            experiment_id = self._client.create_experiment(name, artifact_location=options.artifact_location)
        else:
            experiment_id = experiment.experiment_id
            found = self._client.search_runs([experiment_id], f"tags.`{_RUN_ID_TAG}` = '{run_dir}'", max_results=1)
            if found:
                return str(found[0].info.run_id)
        tags = {**(options.tags or {}), _RUN_ID_TAG: str(run_dir)}
        run_id = str(
            self._client.create_run(experiment_id, tags=tags, run_name=options.run_name or run_dir.name).info.run_id
        )
        params = [Param(key, str(value)) for key, value in hyperparameters(config).items()]
        self._client.log_batch(run_id, params=params)
        return run_id
