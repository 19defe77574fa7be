"""What a run of our own backend needs: one stage, ranks under torchrun. No torch: this runs where jobs are sent."""

import sys

from trainwright.config import RunConfig
from trainwright.image import image_of
from trainwright.job import JobSpec
from trainwright.plan import Plan


def render(config: RunConfig, plan: Plan, *, run_id: str, run_dir: str, attempt: int) -> tuple[JobSpec, ...]:
    """Return the stages of the run: training only."""
    launcher = config.launcher
    train = JobSpec(
        run_id=run_id,
        run_dir=run_dir,
        stage="train",
        attempt=attempt,
        launch="torchrun",
        command=("-m", "trainwright.backends.native.train", run_dir, "--attempt", "{attempt}"),
        python=launcher.python or sys.executable,
        env={**config.hardware.rank_env, **launcher.env},
        num_nodes=config.hardware.num_nodes,
        devices=config.hardware.devices,
        image=image_of(config),
        time_limit_s=None if launcher.kind == "local" else launcher.time,
        grace_s=launcher.grace_s,
        files={},
    )
    return (train,)
