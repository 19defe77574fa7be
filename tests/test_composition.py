"""What users of Hydra expect of a config tree, and what becomes of every pair of model and hardware."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.conftest import Result
from trainwright.config import RunConfig
from trainwright.errors import UserError
from trainwright.places import CONF, EXPERIMENTS
from trainwright.plan import make_plan
from trainwright.preflight import check
from trainwright.rules import Facts

Train = Callable[..., Result]
TRAIN_PY = Path(__file__).parents[1] / "train.py"
MODELS = ("gpt_small", "gpt_5b", "bert_large", "bert_tiny", "tanuki_8b", "llama_tiny")
HARDWARE = ("cpu", "t4", "h100", "trn1", "trn1n", "trn2")
LAUNCHERS = ("local", "slurm", "vertex")
EXPERIMENT_NAMES = ("null", *sorted(path.stem for path in (EXPERIMENTS / "experiment").iterdir()))
WILL_BE_BUILT = Facts(built_backends=("native", "nemo", "nxdt"), built_launchers=LAUNCHERS)

# What refuses a pair for good; a pair that is not here composes and is recorded.
REFUSED = {
    ("gpt_5b", "cpu"): {"memory"},
    ("gpt_5b", "t4"): {"memory"},
    ("bert_large", "t4"): {"architecture"},
    ("bert_tiny", "t4"): {"architecture"},
    ("tanuki_8b", "cpu"): {"memory"},
    ("tanuki_8b", "t4"): {"architecture", "memory"},
    ("tanuki_8b", "trn2"): {"memory", "batch-divides", "nxdt-heads", "nxdt-path", "nxdt-weight-decay"},
    ("llama_tiny", "t4"): {"architecture"},
}
for _trainium in ("trn1", "trn1n", "trn2"):
    REFUSED |= {
        (model, _trainium): {"architecture", "batch-divides"} for model in ("gpt_small", "bert_large", "bert_tiny")
    }
    REFUSED["gpt_5b", _trainium] = {"architecture", "memory"}
    REFUSED["llama_tiny", _trainium] = {"batch-divides"} | {
        f"nxdt-{rule}" for rule in ("data", "heads", "path", "source", "tied", "weight-decay")
    }


def test_every_option_is_in_the_tables_of_this_test() -> None:
    options = {group: {path.stem for path in (CONF / group).iterdir()} for group in ("model", "hardware", "launcher")}
    assert options == {"model": set(MODELS), "hardware": set(HARDWARE), "launcher": set(LAUNCHERS)}


@pytest.mark.parametrize(("model", "hardware"), list(itertools.product(MODELS, HARDWARE)))
def test_a_pair_is_recorded_or_refused_with_what_to_use_instead(
    model: str, hardware: str, parsed: Callable[..., RunConfig]
) -> None:
    config = parsed(f"model={model}", f"hardware={hardware}", "dry_run=true")
    errors = [found for found in check(config, make_plan(config), WILL_BE_BUILT) if found.severity == "error"]
    assert {found.rule for found in errors} == REFUSED.get((model, hardware), set())
    assert all(found.remedy for found in errors)
    hints = " ".join(found.remedy for found in errors if found.rule in ("memory", "architecture"))
    assert all(name in hints for name in config.model.trains_on if hints)


@pytest.mark.parametrize("experiment", EXPERIMENT_NAMES)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_experiment_composes_on_every_launcher_and_model(
    launcher: str, experiment: str, parsed: Callable[..., RunConfig]
) -> None:
    for model, hardware in itertools.product(MODELS, HARDWARE):
        named = [] if experiment == "null" else [f"experiment={experiment}"]
        config = parsed(*named, f"launcher={launcher}", f"model={model}", f"hardware={hardware}")
        assert (config.launcher.kind, config.model.name, config.hardware.name) == (launcher, model, hardware)


@pytest.mark.parametrize(
    ("overrides", "chosen"),
    [
        ((), ("gpt_small", "cpu", "local", "native", "shakespeare")),
        (("model=tanuki_8b",), ("tanuki_8b", "cpu", "local", "native", "tanuki_sft")),
        (("hardware=t4",), ("gpt_small", "t4", "vertex", "nemo", "shakespeare")),
        (("model=tanuki_8b", "hardware=trn1"), ("tanuki_8b", "trn1", "slurm", "nxdt", "tanuki_sft")),
        (("hardware=trn1", "launcher=local"), ("gpt_small", "trn1", "local", "nxdt", "shakespeare")),
        (("model=tanuki_8b", "data=wikipedia"), ("tanuki_8b", "cpu", "local", "native", "wikipedia")),
        (("experiment=tanuki_8b_sft",), ("tanuki_8b", "trn1", "slurm", "nxdt", "tanuki_sft")),
        (("experiment=tanuki_8b_sft", "hardware=h100"), ("tanuki_8b", "h100", "vertex", "native", "tanuki_sft")),
        (("experiment=tanuki_8b_sft", "debug=fast"), ("tanuki_8b", "cpu", "local", "native", "shakespeare")),
        (("debug=fast", "launcher=slurm"), ("gpt_small", "cpu", "slurm", "native", "shakespeare")),
    ],
)
def test_a_later_group_chooses_and_the_command_line_wins(
    overrides: tuple[str, ...], chosen: tuple[str, ...], parsed: Callable[..., RunConfig]
) -> None:
    config = parsed(*overrides)
    names = (config.model.name, config.hardware.name, config.launcher.kind, config.backend.kind, config.data.name)
    assert names == chosen


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (("optim.lr=7e-4",), "optim.lr", 7e-4),
        (("experiment=llama_tiny_ddp",), "hardware.num_nodes", 2),
        (("experiment=llama_tiny_ddp", "hardware.num_nodes=3"), "hardware.num_nodes", 3),
        (("debug=fast",), "trainer.max_steps", 3),
        (("debug=fast", "trainer.max_steps=4"), "trainer.max_steps", 4),
        (("model=tanuki_8b", "hardware=trn1"), "parallelism.tensor_model_parallel_size", 32),
        (("model=tanuki_8b", "hardware=h100"), "parallelism.strategy", "fsdp"),
    ],
)
def test_values_follow_the_defaults_order(
    overrides: tuple[str, ...], key: str, value: object, parsed: Callable[..., RunConfig]
) -> None:
    found: object = parsed(*overrides)
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize(
    ("arguments", "runs"),
    [
        ((), 1),
        (("-m", "optim.lr=1e-3,3e-4"), 2),
        (("-m", "hardware=cpu,t4"), 2),
        (("experiment=llama_tiny_ddp",), 1),
        (("+sweep=lr",), 3),
        (("+sweep=lr", "optim.lr=1e-3"), 1),
        (("+sweep=clusters", "seed=1"), 4),
        (("debug=fast",), 1),
        (("hydra/sweeper=basic", "-m", "seed=1,2"), 2),
        (("hydra.mode=RUN",), 1),
        (("data.splits_string='99,1,0'",), 1),
        (("-m", "seed=range(0,70)", "--yes"), 70),
    ],
)
def test_a_command_line_makes_so_many_recorded_runs(
    arguments: tuple[str, ...], runs: int, train: Train, tmp_path: Path
) -> None:
    result = train(*arguments, "dry_run=true")
    assert result.code == 0, result.err
    records = list(tmp_path.glob("dry_runs/*/*/run/run.yaml"))
    assert len(records) == runs
    assert {path.name for path in tmp_path.iterdir()} <= {"dry_runs", "outputs"}  # basic sweeper's own file in outputs


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--cfg", "job"), "gradient_clip_val"),
        (("--cfg", "job", "--resolve", "hardware=trn1"), "exp_dir: <site.slurm.shared_dir>/experiments"),
        (("--info", "searchpath"), "experiments"),
        (("--info", "defaults"), "recipe/gpt_small_cpu"),
        (("--help",), "train is powered by Hydra"),
        (("--shell-completion", "install=bash"), "complete"),
    ],
)
def test_hydras_own_flags_work(arguments: tuple[str, ...], told: str, tmp_path: Path) -> None:
    """In a process of its own: --info sets up logging for good."""
    asked = subprocess.run(
        [sys.executable, TRAIN_PY, "~local", *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert told in asked.stdout


def test_completion_offers_the_options_of_a_group(tmp_path: Path) -> None:
    line = "python train.py model="
    asked = subprocess.run(
        [sys.executable, TRAIN_PY, "--shell-completion", "query=bash"],
        env={**os.environ, "COMP_LINE": line, "COMP_POINT": str(len(line))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert {f"model={name}" for name in MODELS} <= set(asked.stdout.split())


def test_a_comma_without_m_is_refused_with_both_spellings(train: Train, tmp_path: Path) -> None:
    result = train("data.splits_string=99990,8,2")
    assert result.code == 2
    assert "-m data.splits_string=99990,8,2" in result.err
    assert "'data.splits_string=\"99990,8,2\"'" in result.err
    assert not list(tmp_path.iterdir())


def test_the_quoted_spelling_of_a_comma_is_one_run(train: Train, tmp_path: Path) -> None:
    assert train('data.splits_string="99990,8,2"', "dry_run=true").code == 0
    (record,) = tmp_path.glob("dry_runs/*/*/run/run.yaml")
    assert yaml.safe_load(record.read_text())["config"]["data"]["splits_string"] == "99990,8,2"


def test_too_many_jobs_need_yes(train: Train, tmp_path: Path) -> None:
    result = train("-m", "seed=range(0,65)", "dry_run=true")
    assert (result.code, "65 runs, 64 are allowed; add --yes" in result.err) == (2, True)
    assert not list(tmp_path.iterdir())


def test_duplicate_points_and_a_key_given_twice_are_told(train: Train, tmp_path: Path) -> None:
    result = train("-m", "optim.lr=1e-3,1e-3,3e-4", "seed=1", "seed=2", "dry_run=true")
    assert result.code == 0
    assert "3 points, but only 2 differ" in result.err
    assert "seed is given twice, as seed=1 and seed=2; the last counts" in result.err
    records = [yaml.safe_load(path.read_text()) for path in tmp_path.glob("dry_runs/*/*/run/run.yaml")]
    assert [record["config"]["seed"] for record in records] == [2, 2]


def test_a_dry_run_in_a_sweep_leaves_the_real_runs_real(train: Train, tmp_path: Path) -> None:
    """The real one is stopped by its broken text, after it was recorded: that it started is what counts."""
    (tmp_path / "short.txt").write_text("too short\n")
    result = train("-m", "dry_run=true,false", "data.text=short.txt", "debug=fast")
    assert result.code == 1
    assert len(list(tmp_path.glob("dry_runs/*/*/run/run.yaml"))) == 1
    assert len(list(tmp_path.glob("outputs/debug/gpt_small/*/run/run.yaml"))) == 1


def test_one_run_id_cannot_be_several_runs_of_a_sweep(train: Train, tmp_path: Path) -> None:
    result = train("-m", "run_id=x", "seed=1,2")
    assert result.code == 2
    assert "run_id: x would be several runs of one sweep" in result.err
    assert not list(tmp_path.iterdir())


def test_one_job_does_not_leak_into_the_next(train: Train, tmp_path: Path) -> None:
    assert train("-m", "hardware=t4,cpu", "dry_run=true").code == 0
    records = [yaml.safe_load(path.read_text())["config"] for path in tmp_path.glob("dry_runs/*/*/run/run.yaml")]
    seen = {record["hardware"]["name"]: (record["launcher"]["kind"], record["backend"]["kind"]) for record in records}
    assert seen == {"t4": ("vertex", "nemo"), "cpu": ("local", "native")}
    assert {record["hardware"]["name"]: record["trainer"]["max_steps"] for record in records} == {"t4": 50, "cpu": 240}


def test_every_unknown_key_and_wrong_value_is_reported_at_once(train: Train) -> None:
    result = train("optim.lr=abc", "trainer.max_stepz=3", "seed=-1")
    assert result.code == 2
    told = result.err.splitlines()
    assert "error: optim.lr: 'abc' must be a number" in told
    assert "error: trainer.max_stepz: unknown key; did you mean trainer.max_steps?" in told
    assert "error: seed: -1 must be greater than or equal to 0" in told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("modle=gpt_small",), "did you mean model?"),
        (("model=gpt_smal",), "gpt_small"),
        (("hardware=cpu,",), "cpu,"),
        (("experiment=absent",), "llama_tiny_ddp"),
        (("+sweep=absent",), "clusters"),
        (("allow=[memry]",), "did you mean memory?"),
        (("optim.lr=${optim.nothing}",), "optim.lr: '${optim.nothing}' cannot be worked out"),
    ],
)
def test_an_override_that_names_nothing_is_refused_by_name(
    arguments: tuple[str, ...], told: str, train: Train, tmp_path: Path
) -> None:
    result = train(*arguments)
    assert result.code == 2, result.err
    assert told in result.err
    assert "Traceback" not in result.err
    assert not list(tmp_path.iterdir())


def test_unreadable_yaml_names_file_and_line(train: Train, tmp_path: Path) -> None:
    folder = tmp_path / "team" / "experiment"
    folder.mkdir(parents=True)
    (folder / "broken.yaml").write_text("# @package _global_\noptim:\n  lr: [1\n")
    result = train(f"hydra.searchpath=[trainwright://{tmp_path}/team]", "experiment=broken")
    assert result.code == 2
    assert f"{folder}/broken.yaml: not readable as YAML" in result.err
    assert "line 4" in result.err


def test_the_refusals_of_all_jobs_come_before_any_is_recorded(train: Train, tmp_path: Path) -> None:
    result = train("-m", "model=gpt_small,tanuki_8b,bert_tiny", "trainer.max_steps=1")
    assert result.code == 3
    assert "[model=tanuki_8b" in result.err
    assert "use hardware=h100 or hardware=trn1" in result.err
    assert "bert training is not built yet" in result.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("data.text=/absent.txt",), 3, "data.text: /absent.txt does not exist"),
        (("data.text=null", "data.data_prefix=[/absent]"), 3, "data.data_prefix: /absent.bin does not exist"),
        (("data.global_batch_size=3",), 3, "use 2 or 4"),
        (("model.vocab_size=1000",), 3, "set model.vocab_size=50257"),
        (("model=tanuki_8b",), 3, "use hardware=h100 or hardware=trn1"),
        (("hardware=trn1", "model=bert_large"), 3, "no bert recipe"),
        (("optim.lr=0",), 2, "optim.lr: 0 must be greater than 0"),
    ],
)
def test_bad_input_is_one_clear_error_and_leaves_nothing(
    arguments: tuple[str, ...], code: int, told: str, train: Train, tmp_path: Path
) -> None:
    result = train(*arguments)
    assert result.code == code
    assert told in result.err
    assert "Traceback" not in result.err
    assert not list(tmp_path.iterdir())


def test_parsing_needs_every_key(parsed: Callable[..., RunConfig]) -> None:
    tree = parsed().to_dict()
    del tree["optim"]["lr"]
    with pytest.raises(UserError, match=r"optim\.lr: missing"):
        RunConfig.from_dict(tree)
