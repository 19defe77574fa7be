"""What trains: our own Lightning backend, and the frameworks that we configure and start."""

from collections.abc import Mapping
from typing import Protocol

from trainwright.backends.native.render import render as render_native
from trainwright.backends.nemo.render import render as render_nemo
from trainwright.backends.nxdt.render import render as render_nxdt
from trainwright.config import RunConfig
from trainwright.job import JobSpec
from trainwright.plan import Plan


class Render(Protocol):
    """Turns a run into its stages: values in, values out."""

    def __call__(
        self, config: RunConfig, plan: Plan, *, run_id: str, run_dir: str, attempt: int
    ) -> tuple[JobSpec, ...]: ...


RENDERERS: Mapping[str, Render] = {"native": render_native, "nemo": render_nemo, "nxdt": render_nxdt}
