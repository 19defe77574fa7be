"""End runs before their time, whatever they run on."""

import getpass
import socket
from dataclasses import dataclass

from trainwright import scheduler
from trainwright.errors import UserError
from trainwright.follow import overview
from trainwright.follow.observe import config_of
from trainwright.follow.overview import Overview
from trainwright.node import events
from trainwright.node.run_paths import RunPaths


@dataclass(frozen=True, kw_only=True)
class Cancelled:
    """What a cancellation found and did."""

    run: Overview  # as it stands afterwards
    state_before: str
    is_cancelled_now: bool  # False: it was over already


def cancel(run: Overview) -> Cancelled:
    """End all stages of a run that are not over. One that is over stays as it is.

    Raises UserError when its processes cannot be reached from here: then nothing has changed.
    """
    open_stages = [stage for stage in run.state.stages if stage.state not in events.ENDED]
    if run.is_over or not open_stages:
        return Cancelled(run=run, state_before=run.state.state, is_cancelled_now=False)
    opened = scheduler.open_scheduler(config_of(run.run_dir))
    of_stages = [run.job_ids[str(stage.stage)] for stage in open_stages if str(stage.stage) in run.job_ids]
    job_ids = list(dict.fromkeys(of_stages))  # several stages may be one job
    if not job_ids and run.state.state == events.RUNNING:
        raise UserError(_out_of_reach(run))
    if job_ids:
        opened.cancel(job_ids)
    for stage in open_stages:
        events.append(
            RunPaths(run.run_dir),
            events.CANCELLED,
            who=events.SUBMIT,
            stage=stage.stage,
            attempt=stage.attempt,
            reason=f"cancelled by {getpass.getuser()} on {socket.gethostname()}",
        )
    # A job that started in the meantime either sees the event or is there to be found now.
    if job_ids:
        opened.cancel(job_ids)
    return Cancelled(run=overview.look(run.run_dir), state_before=run.state.state, is_cancelled_now=True)


def _out_of_reach(run: Overview) -> str:
    if run.launcher in (None, "local"):
        return f"{run.run_id} trains inside its own command (hydra.mode=RUN); press Ctrl-C there"
    return (
        f"{run.run_id} runs, but the command that submitted it was cut short before it noted the job's id; end the job "
        f"of that name by launcher={run.launcher}'s own means"
    )
