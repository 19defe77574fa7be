"""The exp_manager section: NeMo users' blocks parse, what does nothing is named, and a run lives where it is told."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

from tests.conftest import Result
from trainwright.config import RunConfig
from trainwright.errors import UserError
from trainwright.exp_manager import fixed_run_id, idle_keys, nemo_block, run_dir
from trainwright.node.run_paths import RunPaths
from trainwright.places import CONF
from trainwright.plan import make_plan
from trainwright.preflight import check
from trainwright.registry import changed_keys
from trainwright.rules import Facts

GOLDEN = Path(__file__).parent / "golden" / "nemo"
Parsed = Callable[..., RunConfig]


def _merged(block: object, *overrides: str) -> RunConfig:
    """Return the config of a run whose exp_manager block is laid over our defaults."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        tree = compose("config", [*overrides, "~local"])
    merged = OmegaConf.merge(tree, {"exp_manager": block})
    assert isinstance(merged, DictConfig)
    return RunConfig.from_hydra(merged)


def _golden(name: str) -> object:
    tree = OmegaConf.load(GOLDEN / f"{name}.yaml")
    return OmegaConf.to_container(tree, resolve=True)["exp_manager"]  # type: ignore[index, call-overload]


def test_the_first_articles_block_parses_and_names_what_native_ignores(parsed: Parsed) -> None:
    parsed()  # registers NeMo's resolvers
    config = _merged(_golden("gpt-small"), "run_id=r1")
    assert config.exp_manager.step_timing_kwargs.buffer_size == 5
    assert run_dir(config, "r1") == Path("outputs/megatron_gpt/r1")
    assert idle_keys(config) == (
        "exp_manager.checkpoint_callback_params.save_nemo_on_train_end=false",
        "exp_manager.checkpoint_callback_params.model_parallel_size=1",
    )
    (warning,) = check(config, make_plan(config), Facts(built_backends=("native",), built_launchers=("local",)))
    assert (warning.rule, warning.severity) == ("idle-keys", "warning")


def test_the_third_articles_common_keys_parse_for_its_backend() -> None:
    config = _merged(_golden("tanuki-sft"), "model=tanuki_8b", "hardware=trn1")
    assert run_dir(config, "r1") == Path("/fsx/nemo_experiments/hf_tanuki/r1")
    assert config.exp_manager.checkpoint_callback_params.model_parallel_size == 32
    assert idle_keys(config) == ()


def test_our_own_defaults_hold_nothing_idle(parsed: Parsed) -> None:
    assert idle_keys(parsed()) == ()


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("+exp_manager.resume_if_exist=true", "did you mean exp_manager.resume_if_exists?"),
        ("+exp_manager.ema.decy=0.9", "did you mean exp_manager.ema.decay?"),
        ("+exp_manager.save_top_k=3", "exp_manager.save_top_k: unknown key"),
        ("exp_manager.max_time_per_run=soon", "write seconds, HH:MM:SS"),
        ("exp_manager.step_timing_kwargs.reduction=median", "must be 'mean', 'sum', 'min', 'max' or 'none'"),
        ("exp_manager.summary_writer_kwargs={log_dir: /tmp}", "log_dir may not be given; use max_queue"),
        ("exp_manager.files_to_copy=[a/x.yaml,b/x.yaml]", "x.yaml is named twice"),
        ("exp_manager.explicit_log_dir='/runs/no name'", "its last part becomes the run id"),
    ],
)
def test_a_wrong_key_or_value_is_refused(override: str, told: str, parsed: Parsed) -> None:
    with pytest.raises(UserError) as refused:
        parsed(override)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("run_id=a", "exp_manager.version=b"), "exp_manager.version: b with run_id=a"),
        (("run_id=a", "exp_manager.explicit_log_dir=/x/b"), "exp_manager.explicit_log_dir: /x/b with run_id=a"),
        (("exp_manager.version=a", "exp_manager.explicit_log_dir=/x/a"), "give one of the two"),
        (("exp_manager.create_early_stopping_callback=true", "trainer.limit_val_batches=0"), "is never looked at"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(overrides: tuple[str, ...], told: str, parsed: Parsed) -> None:
    with pytest.raises(UserError) as refused:
        parsed(*overrides)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "run_id", "directory"),
    [
        ((), None, "outputs/gpt_small/new"),
        (("run_id=r1",), "r1", "outputs/gpt_small/r1"),
        (("exp_manager.version=v1", "exp_manager.name=n"), "v1", "outputs/n/v1"),
        (("exp_manager.explicit_log_dir=/runs/mine",), "mine", "/runs/mine"),
    ],
)
def test_name_version_and_explicit_log_dir_place_a_run(
    overrides: tuple[str, ...], run_id: str | None, directory: str, parsed: Parsed
) -> None:
    config = parsed(*overrides)
    assert fixed_run_id(config) == run_id
    assert run_dir(config, run_id or "new") == Path(directory)


def test_a_version_that_exists_is_a_resume(train: Callable[..., Result], tmp_path: Path, parsed: Parsed) -> None:
    record = RunPaths(tmp_path / "outputs" / "gpt_small" / "v1").record(1)
    record.parent.mkdir(parents=True)
    record.write_text(yaml.safe_dump({"config": parsed().to_dict()}), encoding="utf-8")
    refused = train("exp_manager.version=v1", "dry_run=true", "exp_manager.resume_if_exists=false")
    assert refused.code == 2
    assert "run_id: v1 exists and exp_manager.resume_if_exists=false" in refused.err


def test_ema_is_part_of_what_a_run_is_and_its_other_keys_are_not(parsed: Parsed) -> None:
    before, ema = parsed().to_dict(), parsed("exp_manager.ema.enable=true").to_dict()
    logging = parsed("exp_manager.create_tensorboard_logger=false").to_dict()
    assert changed_keys(before, ema) == ("exp_manager.ema.enable: false -> true",)
    assert changed_keys(before, logging) == ()


def test_a_missing_logger_names_its_extra(parsed: Parsed) -> None:
    config = parsed("exp_manager.create_wandb_logger=true")
    facts = Facts(built_backends=("native",), built_launchers=("local",), missing_packages=(("wandb", "wandb"),))
    (finding,) = check(config, make_plan(config), facts)
    assert "needs wandb" in finding.message
    assert finding.remedy == "pip install 'trainwright[wandb]'"


def test_nemo_is_given_our_place_and_its_own_spelling(parsed: Parsed) -> None:
    config = parsed(
        "hardware=t4",
        "name=megatron_gpt",
        "exp_manager.exp_dir=/gcs/bucket/experiments",
        "exp_manager.max_time_per_run=1-02:03:04",
        "exp_manager.checkpoint_callback_params.monitor=train_loss",
        "parallelism.tensor_model_parallel_size=2",
    )
    block = nemo_block(config, run_id="r1", nemo="1.23")
    assert (block["exp_dir"], block["name"], block["version"]) == ("/gcs/bucket/experiments", "megatron_gpt", "r1")
    assert block["max_time_per_run"] == "01:02:03:04"
    params = block["checkpoint_callback_params"]
    assert params["filename"] == "megatron_gpt--{val_loss:.2f}-{step}-{consumed_samples}"
    assert (params["model_parallel_size"], params["monitor"]) == (2, "reduced_train_loss")
    assert "dry_run_dir" not in block
    assert "async_save" not in params
    assert "async_save" in nemo_block(config, run_id="r1", nemo="2.7")["checkpoint_callback_params"]
