"""RunConfig: a value means the same from a file and from the command line, and nothing is guessed."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from trainwright.config import RunConfig
from trainwright.config_types import parse_duration
from trainwright.errors import UserError
from trainwright.places import CONF

Parsed = Callable[..., RunConfig]

# Text as a user types it, and what Hydra's command line makes of it.
SCALARS = [
    ("12:00:00", "12:00:00"),
    ("1e-5", 1e-5),
    ("1E5", 1e5),
    ("2024_05_15", 20240515),
    ("007", "007"),
    ("0o17", "0o17"),
    ("0x1f", "0x1f"),
    ("on", "on"),
    ("yes", "yes"),
    ("True", True),
    ("false", False),
    ("null", None),
    ("-3", -3),
    ("+3", 3),
    ("1_000", 1000),
    (".5", 0.5),
    ("5.", 5.0),
    ("1.5e3", 1500.0),
    ("inf", float("inf")),
    (".inf", ".inf"),
    ("2024-05-15", "2024-05-15"),
    ("1:30", "1:30"),
    ("v1", "v1"),
]


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a team's own config root with one experiment for each scalar."""
    root = tmp_path_factory.mktemp("team")
    (root / "experiment").mkdir()
    for i, (text, _) in enumerate(SCALARS):
        (root / "experiment" / f"e{i}.yaml").write_text(f"# @package _global_\noptim:\n  lr: {text}\n")
    return root


@pytest.mark.parametrize("i", range(len(SCALARS)), ids=[text for text, _ in SCALARS])
def test_a_scalar_means_the_same_from_file_and_command_line(i: int, team: Path) -> None:
    text, meaning = SCALARS[i]
    search_path = f"hydra.searchpath=[trainwright://{team}]"
    with initialize_config_dir(str(CONF), version_base="1.3"):
        from_file = compose("config", [search_path, f"experiment=e{i}", "~local"]).optim.lr
        from_command_line = compose("config", [f"optim.lr={text}", "~local"]).optim.lr
    assert (from_file, type(from_file)) == (from_command_line, type(from_command_line)) == (meaning, type(meaning))


def test_a_key_given_twice_in_a_file_is_an_error(team: Path) -> None:
    (team / "experiment" / "twice.yaml").write_text("# @package _global_\nseed: 1\nseed: 2\n")
    search_path = f"hydra.searchpath=[trainwright://{team}]"
    with (
        initialize_config_dir(str(CONF), version_base="1.3"),
        pytest.raises(Exception, match=r"key 'seed' is given twice\n.*line 3"),
    ):
        compose("config", [search_path, "experiment=twice", "~local"])


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (90, 90),
        ("12:00:00", 43200),
        ("1-00:00:00", 86400),
        ("05:00:00:00", 432000),
        ("0:00:01", 1),
        ("100:00:00", 360000),
    ],
)
def test_a_duration_has_one_meaning(value: object, seconds: int) -> None:
    assert parse_duration(value) == seconds


@pytest.mark.parametrize("value", ["12:00", "1-2", "1:60:00", "1:00:60", "", "soon", 1.5, True, None])
def test_what_is_no_duration_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="HH:MM:SS"):
        parse_duration(value)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("trainer.enable_progress_bar=yes", "trainer.enable_progress_bar: 'yes' must be true or false"),
        ("trainer.enable_progress_bar=1", "trainer.enable_progress_bar: 1 must be true or false"),
        ("trainer.max_steps=1.5", "trainer.max_steps: 1.5 must be a whole number"),
        ("trainer.max_steps='7'", "trainer.max_steps: '7' must be a whole number"),
        ("trainer.max_steps=true", "trainer.max_steps: True must be a whole number"),
        ("trainer.max_steps=0", "trainer.max_steps: 0 must be greater than or equal to 1"),
        ("optim.lr=nan", "optim.lr"),
        ("optim.lr=0", "optim.lr: 0 must be greater than 0"),
        ("optim.betas=[0.9]", "optim.betas"),
        ("run_id=2024_05_15", "run_id: 20240515 is not text; quoted it would be"),
        ("run_id=a/b", "run_id: 'a/b' has a form that is not allowed"),
        ("+trainer.max_step=3", "trainer.max_step: unknown key; did you mean trainer.max_steps?"),
        ("+launcher.partition=x", "launcher.partition: unknown key"),
        ("+launcher.max_paralel=2", "launcher.max_paralel: unknown key; did you mean launcher.max_parallel?"),
        ("++zzz.yyy=1", "zzz: unknown key; known here: allow"),
        ("+backend.packing=true", "backend.packing: unknown key; known here: base_image, image, kind"),
        ("trainer.precision=bf16", "must be '32-true', 'bf16-mixed', '16-mixed' or 'bf16-true'"),
        ("model.num_attention_heads=3", "model.num_attention_heads: 3 does not divide hidden_size=256"),
        ("model.num_query_groups=3", "model.num_query_groups: 3 does not divide num_attention_heads=4"),
        ("data.seq_length=512", "data.seq_length: 512 is more than model.max_position_embeddings=256"),
        ("optim.sched.min_lr=1", "optim.sched.min_lr: 1.0 is above optim.lr=0.003"),
        ("data.data_prefix=[a,b]", "data.data_prefix"),
        ("data.data_prefix=[x]", "give one of the two"),
        ("data.text=null", "give one of the two"),
        ("launcher.kind=slrm", "launcher.kind: 'slrm' must be one of 'local', 'slurm', 'vertex'"),
        ("exp_manager.checkpoint_callback_params.filename=x", "must hold {step}"),
        ("name=${nothing}", "name: '${nothing}' cannot be worked out"),
        ("name=???", "name: '???' cannot be worked out"),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_and_remedy(override: str, told: str, parsed: Parsed) -> None:
    with pytest.raises(UserError) as refused:
        parsed(override)
    assert told in str(refused.value)


def test_whole_numbers_become_floats_and_lists_become_tuples(parsed: Parsed) -> None:
    config = parsed("optim.lr=1", "optim.betas=[0,0]", "data.text=null", "data.data_prefix=[1,/a,2,/b]")
    assert (config.optim.lr, type(config.optim.lr)) == (1.0, float)
    assert config.optim.betas == (0.0, 0.0)
    assert config.data.data_prefix == (1.0, "/a", 2.0, "/b")


def test_a_slurm_time_reads_the_same_in_every_spelling(parsed: Parsed) -> None:
    for text in ("12:00:00", "43200", "0-12:00:00", "00:12:00:00"):
        launcher = parsed("hardware=trn1", f"launcher.time={text}").launcher
        assert launcher.kind == "slurm"
        assert launcher.time == 43200


def test_nemos_resolvers_are_known_wherever_we_compose(parsed: Parsed) -> None:
    config = parsed("seed=${multiply:3,4}", "trainer.max_steps='${sum:1,${seed}}'")
    assert (config.seed, config.trainer.max_steps) == (12, 13)


def test_a_record_parses_back_to_an_equal_config(parsed: Parsed) -> None:
    config = parsed("hardware=t4")
    assert RunConfig.from_dict(config.to_dict()) == config


def test_paths_become_absolute_but_shipped_names_and_unset_sites_stay(parsed: Parsed, tmp_path: Path) -> None:
    here = parsed().with_absolute_paths(tmp_path)
    assert here.exp_manager.exp_dir == f"{tmp_path}/outputs"
    assert here.data.cache_dir == f"{tmp_path}/outputs/data"
    assert here.data.text == "shakespeare"
    assert parsed("data.text=a/b.txt").with_absolute_paths(tmp_path).data.text == f"{tmp_path}/a/b.txt"
    there = parsed("hardware=trn1").with_absolute_paths(tmp_path)
    assert there.exp_manager.exp_dir == "<site.slurm.shared_dir>/experiments"
    assert there.backend.model_dir == "<site.slurm.shared_dir>/models/gpt_small"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("override", "key", "path"),
    [
        ("backend.pretrained_dir=shards/", "backend.pretrained_dir", "/here/shards"),
        ("backend.compiler_cache_url=s3://bucket/cache", "backend.compiler_cache_url", "s3://bucket/cache"),
        ("backend.python=python3", "backend.python", "python3"),
        ("data.train_source=gs://bucket/a.jsonl", "data.train_source", "gs://bucket/a.jsonl"),
        ("data.train_source=a.jsonl", "data.train_source", "/here/a.jsonl"),
        ("model.source=someone/model", "model.source", "someone/model"),
        ("model.source=./someone/model", "model.source", "/here/someone/model"),
        ("model.source=/models/mine/", "model.source", "/models/mine"),
        ("data.tokenizer.name=someone/model", "data.tokenizer.name", "someone/model"),
        ("data.tokenizer.name=./mine", "data.tokenizer.name", "/here/mine"),
        ("data.tokenizer.name=/models/mine/", "data.tokenizer.name", "/models/mine"),
    ],
)
def test_a_path_is_made_absolute_and_a_url_or_a_model_of_the_hub_is_not(
    override: str, key: str, path: str, parsed: Parsed
) -> None:
    found: object = parsed("hardware=trn1", override).with_absolute_paths(Path("/here"))
    for part in key.split("."):
        found = getattr(found, part)
    assert found == path


def test_every_key_of_conf_is_commented() -> None:
    """Plain data with what, unit and legal values, behind or above; recipes, experiments and debug only repeat keys."""
    groups = ("model", "data", "optim", "trainer", "parallelism", "exp_manager", "backend", "launcher", "hardware")
    files = [CONF / "config.yaml", CONF / "site.yaml", *(path for group in groups for path in (CONF / group).iterdir())]
    for path in files:
        lines = path.read_text().splitlines()
        bare = [
            line
            for above, line in zip(["", *lines], lines, strict=False)
            if re.match(r"\s*[a-z]\w*: ", line) and "#" not in line and not above.lstrip().startswith("#")
        ]
        allowed = ("dir:", "subdir:", "name: ${model.name}")
        assert not [line for line in bare if not line.lstrip().startswith(allowed)], path
        assert "_target_" not in path.read_text()


def test_the_local_example_composes(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "default.yaml").write_text((CONF / "local" / "example.yaml").read_text())
    with initialize_config_dir(str(CONF), version_base="1.3"):
        tree = compose("config", [f"hydra.searchpath=[trainwright://{tmp_path}]", "hardware=trn1"])
    assert OmegaConf.select(tree, "exp_manager.exp_dir") == "/fsx/experiments"
    assert RunConfig.from_hydra(tree).site.vertex.bucket == "my-bucket"
