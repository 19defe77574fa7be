"""NeMo's own code as the judge: it takes our exp_manager block, and leaves our run directories readable."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import yaml
from omegaconf import DictConfig, OmegaConf

from tests.conformance.environments import ENVS, python_of
from trainwright.backends.native.retention import choose_resume
from trainwright.backends.native.train import train
from trainwright.backends.nemo.constants import EXP_MANAGER_DEFAULTS
from trainwright.backends.nemo.document import document
from trainwright.backends.rendered_yaml import to_yaml
from trainwright.config import RunConfig
from trainwright.dataset.indexed import IndexedWriter
from trainwright.exp_manager import idle_keys, nemo_block
from trainwright.node.run_paths import RunPaths
from trainwright.places import CONF

Version = Literal["1.23", "2.7"]
FULL = (
    "hardware=t4",
    "run_id=r1",
    "site.vertex.bucket=bucket",
    "exp_manager.max_time_per_run=1-00:00:00",
    "exp_manager.ema.enable=true",
    "exp_manager.create_early_stopping_callback=true",
    "exp_manager.create_wandb_logger=true",
    "exp_manager.wandb_logger_kwargs={project: p, name: n}",
    "exp_manager.summary_writer_kwargs={flush_secs: 30}",
    "exp_manager.files_to_copy=[/a/b.yaml]",
    "exp_manager.checkpoint_callback_params.every_n_train_steps=50",
    "exp_manager.mlflow_logger_kwargs.tags={a: b}",
)


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What NeMo of one version said, and the run whose directory it was shown."""

    answer: dict[str, Any]
    config: RunConfig
    run_dir: Path
    own_before: Mapping[str, bytes]  # files below run/, by path
    rendered: Mapping[str, dict[str, Any]]  # what our renderer gives NeMo, by run


def _own_files(run_dir: Path) -> dict[str, bytes]:
    own = RunPaths(run_dir).own
    return {str(path.relative_to(own)): path.read_bytes() for path in own.rglob("*") if path.is_file()}


@pytest.fixture(scope="module", params=["1.23", "2.7"])
def version(request: pytest.FixtureRequest) -> Version:
    chosen: Version = request.param
    return chosen


@pytest.fixture(scope="module")
def judged(version: Version, parsed: Callable[..., RunConfig], tmp_path_factory: pytest.TempPathFactory) -> Judged:
    """Train a run of ours, show it to NeMo and return what NeMo said: once per version, since importing it is slow."""
    python = python_of(f"nemo_{version.replace('.', '_')}")
    here = tmp_path_factory.mktemp("nemo")
    config = _tiny_run(parsed, here)
    run_dir = here / "r1"
    train(config, run_dir, 1)
    (run_dir / "loose.txt").write_text("moved away by each start of NeMo")
    before = _own_files(run_dir)
    rendered = {name: document(parsed(*overrides), run_id="r1") for name, overrides in _runs(version, here).items()}
    for name, tree in rendered.items():
        (here / name).mkdir()
        (here / name / "config.yaml").write_text(to_yaml(tree, reader="NeMo", run_id="r1"))
    asked = {
        "log_dir": str(run_dir),
        "folders": {name: str(here / name) for name in rendered},
        "schedules": {name: (tree["model"]["optim"], tree["trainer"]["max_steps"]) for name, tree in rendered.items()},
        "blocks": {
            "defaults": nemo_block(parsed(), run_id="r1", nemo=version),
            "full": nemo_block(parsed(*FULL), run_id="r1", nemo=version),
            "unknown": {**nemo_block(parsed(), run_id="r1", nemo=version), "resume_if_exist": True},
            **{name: tree["exp_manager"] for name, tree in rendered.items()},
        },
    }
    subprocess.run(
        [python, Path(__file__).with_name("nemo_judge.py"), here / "answer.json"],
        input=json.dumps(asked),
        text=True,
        check=True,
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(ENVS / "stubs")},
    )
    answer = json.loads((here / "answer.json").read_text())
    return Judged(answer=answer, config=config, run_dir=run_dir, own_before=before, rendered=rendered)


def _runs(version: Version, here: Path) -> dict[str, tuple[str, ...]]:
    """Return runs by name: the first article's, the model that it is cut down from, and two unlike them."""
    site = (
        "site.vertex.bucket=bucket",
        f"exp_manager.exp_dir={here}/experiments",
        f"backend.nemo_version='{version}'",
    )
    return {
        "article": ("hardware=t4", *site),
        "gpt_5b": ("model=gpt_5b", "hardware=h100", "backend=nemo", *site),
        "linear": (
            "hardware=t4",
            "trainer.max_steps=200",
            "optim.sched.name=LinearAnnealingWithWarmUp",
            "backend.optim.constant_steps=0",
            "trainer.precision=16-mixed",
            "exp_manager.name=linear",
            "exp_manager.create_early_stopping_callback=true",
            "exp_manager.checkpoint_callback_params.every_n_train_steps=20",
            "exp_manager.max_time_per_run=10:00:00",
            *site,
        ),
        "constant": (
            "hardware=h100",
            "backend=nemo",
            "trainer.max_steps=200",
            "optim.sched.name=constant",
            "parallelism.tensor_model_parallel_size=4",
            "exp_manager.name='0012'",
            "exp_manager.log_step_timing=false",
            "exp_manager.create_tensorboard_logger=false",
            *site,
        ),
        "falling": ("hardware=t4", "trainer.max_steps=500", "exp_manager.name=falling", *site),
    }


def _tiny_run(parsed: Callable[..., RunConfig], here: Path) -> RunConfig:
    with IndexedWriter(here / "tokens", np.dtype(np.uint16)) as writer:
        for _ in range(100):
            writer.add_sequence(np.arange(100))
            writer.end_document()
    return parsed(
        "debug=fast",
        "model=llama_tiny",
        "data.text=null",
        f"data.data_prefix=[{here}/tokens]",
        "data.splits_string='90,10,0'",
        "model.vocab_size=512",
        "exp_manager.checkpoint_callback_params.every_n_train_steps=1",
        "exp_manager.checkpoint_callback_params.save_top_k=-1",
    )


def test_nemo_takes_the_block_that_we_render_for_it(judged: Judged) -> None:
    for name in ("defaults", "full"):
        assert isinstance(judged.answer["merged"][name], dict), judged.answer["merged"][name]
    full = judged.answer["merged"]["full"]
    assert (full["name"], full["version"], full["exp_dir"]) == ("megatron_gpt", "r1", "/gcs/bucket/nemo-experiments")
    assert full["max_time_per_run"] == "01:00:00:00"
    assert full["ema"]["enable"]


@pytest.mark.parametrize("name", ["article", "gpt_5b", "linear", "constant"])
def test_nemos_script_reads_our_file_as_it_stands(name: str, judged: Judged) -> None:
    started, tree = judged.answer["started"][name], dict(judged.rendered[name])
    assert started["hydra"] == {"run_dir": tree["hydra"]["run"]["dir"], "output_subdir": None}
    del tree["hydra"]
    assert started["config"] == tree
    assert isinstance(judged.answer["merged"][name], dict), judged.answer["merged"][name]
    manager = tree["exp_manager"]
    assert started["log_dir"] == f"{manager['exp_dir']}/{manager['name']}/r1"
    assert started["checkpoint"] == f"{manager['name']}--{{val_loss:.2f}}-{{step}}-{{consumed_samples}}"
    assert "NeMoModelCheckpoint" in started["callbacks"]


def test_what_is_not_written_is_what_nemo_takes_by_itself(judged: Judged, version: Version) -> None:
    shown = dict(_flat(judged.answer["merged"]["article"]))
    ours = dict(_flat(yaml.safe_load((CONF / "exp_manager" / "default.yaml").read_text())))
    for key in set(EXP_MANAGER_DEFAULTS) & set(shown):
        assert shown[key] == EXP_MANAGER_DEFAULTS[key] == ours[key], key


def test_the_schedules_are_those_that_our_rules_speak_of(judged: Judged) -> None:
    rates = judged.answer["rates"]
    assert rates["article"][-1] == pytest.approx(1.6e-4 * 49 / 115)
    assert max(rates["falling"]) == pytest.approx(1.6e-4)
    assert rates["falling"][120] == pytest.approx(1.6e-5), "nemo-schedule: from the peak to the end at once"
    assert rates["linear"][115] == pytest.approx(1.6e-4)
    assert rates["linear"][-1] < 1.9e-5
    assert rates["constant"][116:] == pytest.approx([1.6e-4] * 84)


def test_nemo_itself_refuses_an_unknown_key(judged: Judged) -> None:
    assert "resume_if_exist" in judged.answer["merged"]["unknown"]


def test_every_key_of_nemos_is_one_of_ours_with_its_default(judged: Judged) -> None:
    ours = yaml.safe_load((CONF / "exp_manager" / "default.yaml").read_text())
    # Where ours differ, the comments in conf/ say so; cwd is where NeMo would put its directory.
    own = {"exp_dir", "resume_if_exists", "resume_ignore_no_checkpoint", "checkpoint_callback_params.filename"}
    theirs = dict(_flat(judged.answer["defaults"]))
    mine = dict(_flat(ours))
    assert set(theirs) <= set(mine)
    assert {key for key in theirs if theirs[key] != mine[key]} == own


def test_a_block_of_nemos_defaults_is_idle_nowhere(judged: Judged, parsed: Callable[..., RunConfig]) -> None:
    ours = OmegaConf.create(parsed().to_dict())
    merged = OmegaConf.merge(ours, {"exp_manager": {**judged.answer["defaults"], "exp_dir": "outputs"}})
    assert isinstance(merged, DictConfig)
    assert idle_keys(RunConfig.from_hydra(merged)) == ()


def test_check_resume_leaves_a_finished_run_readable(judged: Judged, version: Version) -> None:
    assert judged.answer["resumed"] is None, "our checkpoints are not NeMo's"
    assert (judged.run_dir / "run_0" / "loose.txt").is_file()
    moved_events = list((judged.run_dir / "run_0").glob("events.out.tfevents.*"))
    assert bool(moved_events) == (version == "1.23")
    assert _own_files(judged.run_dir) == judged.own_before
    resumed = choose_resume(RunPaths(judged.run_dir).checkpoints, may_be_none=False, may_ignore_damaged=False)
    assert resumed is not None
    assert resumed.step == 3


def test_our_run_goes_on_where_nemo_has_looked(judged: Judged) -> None:
    longer = judged.config.model_copy(update={"trainer": judged.config.trainer.model_copy(update={"max_steps": 4})})
    assert train(longer, judged.run_dir, 2)["steps"] == 4


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
