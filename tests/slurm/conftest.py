"""One Slurm for all tests here, and runs of Python snippets that go to it through dispatch's own code."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, cluster
from tests.slurm.runs import COUNTS_TWO, OK, Runs
from trainwright.config import RunConfig
from trainwright.registry import RunRecord


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Return the running cluster; a service that does not start fails the tests."""
    with cluster(tmp_path_factory.mktemp("slurm")) as started, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(started.config))
        yield started


@pytest.fixture(scope="session")
def shared_runs(slurm: Cluster, parsed: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Return a maker of runs for the whole session."""
    return Runs(slurm, parsed, tmp_path_factory.mktemp("shared"))


@pytest.fixture(scope="session", autouse=True)
def short_of_time(shared_runs: Runs) -> RunRecord:
    """Return a run with a short time limit, submitted before the first test: Slurm looks at limits every 30 s."""
    limit = ("launcher.time=60", "launcher.signal_s=58", 'launcher.nodelist="n[3-4]"')
    return shared_runs.start((COUNTS_TWO, OK), num_nodes=2, overrides=limit)


@pytest.fixture
def runs(slurm: Cluster, parsed: Callable[..., RunConfig], tmp_path: Path) -> Runs:
    """Return a maker of runs in a shared directory of this test."""
    return Runs(slurm, parsed, tmp_path)


@pytest.fixture(scope="session")
def on_slurm(slurm: Cluster) -> tuple[str, ...]:
    """Return the overrides that send a run of our own backend to this cluster."""
    return ("launcher=slurm", f"launcher.python={sys.executable}", "launcher.exclusive=false", "launcher.time=600")
