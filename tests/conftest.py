"""What several tests share: the command line in this process, in a directory of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from trainwright import app
from trainwright.config import RunConfig
from trainwright.places import CONF


@dataclass(frozen=True)
class Result:
    """What a command line left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Return `python train.py` as a function, run in `tmp_path` without the machine's own conf/local."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")

    def run(*arguments: str) -> Result:
        capfd.readouterr()
        try:
            code = app.run([*arguments, "~local"])
        except SystemExit as ended:  # Hydra's own --help
            code = int(ended.code or 0)
        return Result(code, *capfd.readouterr())

    return run


@pytest.fixture(scope="session")
def parsed() -> Callable[..., RunConfig]:
    """Return a function from overrides to the RunConfig that they compose."""

    def parse(*overrides: str) -> RunConfig:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return RunConfig.from_hydra(compose("config", [*overrides, "~local"]))

    return parse
