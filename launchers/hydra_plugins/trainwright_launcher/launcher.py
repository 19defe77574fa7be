"""The Hydra launcher: composes each job of a batch once and hands all of them to dispatch."""

from collections.abc import Sequence
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class LauncherNode:
    """What `hydra/launcher: trainwright` selects. Resources are read from each job's own config, never from here."""

    _target_: str = "hydra_plugins.trainwright_launcher.launcher.TrainwrightLauncher"


ConfigStore.instance().store(group="hydra/launcher", name="trainwright", node=LauncherNode, provider="trainwright")


class TrainwrightLauncher(Launcher):
    """Dispatches a batch: all of it is checked before the first job starts. The job's value is its validation loss."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._loader = hydra_context.config_loader
        self._config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from trainwright.dispatch import Composed, dispatch, refuse_too_many
        from trainwright.errors import RunFailedError

        refuse_too_many(len(job_overrides), self._config.get("max_jobs"))
        jobs = [
            Composed(
                number=initial_job_idx + i,
                overrides=tuple(overrides),
                tree=self._loader.load_sweep_config(self._config, list(overrides)),
            )
            for i, overrides in enumerate(job_overrides)
        ]
        returns = []
        for job, outcome in zip(jobs, dispatch(jobs), strict=True):
            failed = outcome.exit_code != 0
            result = JobReturn(
                overrides=job.overrides,
                cfg=job.tree,
                task_name=outcome.run_id,
                working_dir=str(outcome.run_dir),
                status=JobStatus.FAILED if failed else JobStatus.COMPLETED,
            )
            result.return_value = RunFailedError(outcome.failure, outcome.exit_code) if failed else outcome.val_loss
            returns.append(result)
        return returns
