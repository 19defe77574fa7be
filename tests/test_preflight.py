"""The rule table: each rule has a config that breaks it and one that does not, and `allow` relaxes exactly one."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trainwright.code_state import CodeState
from trainwright.config import RunConfig
from trainwright.dataset.indexed import IndexedWriter
from trainwright.errors import UserError
from trainwright.plan import make_plan
from trainwright.preflight import Finding, check, look
from trainwright.rules import RULES, Facts

Parsed = Callable[..., RunConfig]
BUILT = {"built_backends": ("native",), "built_launchers": ("local",)}
FUTURE = {"built_backends": ("native", "nemo", "nxdt"), "built_launchers": ("local", "slurm", "vertex")}
SITE = ("site.slurm.shared_dir=/fsx", "site.vertex.project=p", "site.vertex.bucket=b")


def findings(config: RunConfig, **facts: object) -> list[Finding]:
    return check(config, make_plan(config), Facts(**{**BUILT, **facts}))  # type: ignore[arg-type]


CHANGED = CodeState(
    top=Path("/repo"), commit="abc", changed=("a.py",), untracked=("b.py",), tracked=("a.py",), diff=b"..."
)

# Rule, overrides that break it, facts, text that the finding holds.
BROKEN = [
    ("not-built", ("hardware=t4",), {}, "backend=nemo is not built yet"),
    ("not-built", ("hardware=h100",), {}, "launcher=vertex is not built yet"),
    ("not-built", ("model=bert_tiny",), {}, "bert training is not built yet"),
    ("not-built", ("parallelism.tensor_model_parallel_size=2", "hardware.devices=2"), {}, "set all three to 1"),
    ("not-built", ("data=tanuki_sft", "model=llama_tiny"), {}, "data.kind=sft"),
    ("not-built", ("exp_manager.resume_from_checkpoint=/x",), {}, "native begins no run with another's checkpoint"),
    (
        "architecture",
        ("hardware=trn1",),
        {},
        "no gpt2 recipe, which model=gpt_small needs; use hardware=cpu or hardware=t4",
    ),
    ("architecture", ("model=bert_large", "hardware=trn1"), {}, "no hardware has a recipe for bert_large yet"),
    ("accelerator", ("backend=nxdt",), {}, "use backend=native"),
    ("accelerator", ("hardware=trn1", "launcher=vertex"), {}, "use launcher=slurm"),
    ("memory", ("model=tanuki_8b",), {}, "use hardware=h100 or hardware=trn1"),
    ("world-divides", ("hardware=trn1", "parallelism.tensor_model_parallel_size=24"), {}, "use a world of 24 or 48"),
    ("world-divides", ("parallelism.tensor_model_parallel_size=4",), {}, "use a world of 4"),
    ("batch-divides", ("data.global_batch_size=3",), {}, "use 2 or 4"),
    ("batch-divides", ("data.micro_batch_size=4",), {}, "use 4"),
    (
        "shards-divide",
        ("model=gpt_5b", "hardware=trn1", "parallelism.pipeline_model_parallel_size=32"),
        {},
        "num_layers=24",
    ),
    ("shards-divide", ("hardware=t4", "parallelism.tensor_model_parallel_size=8"), {}, "num_attention_heads=4"),
    ("shards-divide", ("hardware=trn1", "parallelism.tensor_model_parallel_size=2"), {}, "which NxDT does not pad"),
    ("vocabulary", ("model.vocab_size=1000",), {}, "set model.vocab_size=50257"),
    ("vocabulary", (), {"max_token_id": 50_257}, "set model.vocab_size=50258"),
    ("missing-file", (), {"missing_files": {"data.text": "/no"}}, "data.text: /no does not exist"),
    ("missing-package", (), {"missing_packages": (("torch", "native"),)}, "pip install 'trainwright[native]'"),
    ("missing-package", (), {"missing_packages": (("mlflow", "mlflow"),)}, "pip install 'trainwright[mlflow]'"),
    ("site-unset", ("hardware=trn1",), {}, "site.slurm.shared_dir is unset"),
    ("site-unset", ("hardware=t4",), {}, "site.vertex.bucket is unset"),
    ("disk-space", (), {"free_bytes": 1000}, "choose another exp_manager.exp_dir"),
    ("scheduler", ("launcher=slurm",), {"scheduler_problems": (("no sbatch here", "go there"),)}, "no sbatch here; go"),
    (
        "shared-dir",
        ("launcher=slurm", "site.slurm.shared_dir=/fsx", "exp_manager.exp_dir=/home/me/outputs"),
        {},
        "exp_manager.exp_dir=/home/me/outputs is not below site.slurm.shared_dir=/fsx",
    ),
    ("on-failure", ("launcher=slurm", "on_failure=stop"), {}, "set launcher.max_parallel"),
    ("code", ("code=require_clean",), {"code": CHANGED}, "code=require_clean, but /repo has changed a.py, new b.py"),
    ("code", ("code=snapshot",), {}, "not started in a git repository"),
    ("env-from", (), {"unset_env": ("TOKEN",)}, "export TOKEN or leave it out"),
    ("env-from", (), {"exposed_env": (("TOKEN", "launcher.env.X"),)}, "launcher.env.X spells out the value of TOKEN"),
    ("still-running", ("run_id=x",), {"holder": "process 7 on here"}, "still worked on by process 7 on here"),
    ("resume-config", ("run_id=x",), {"changed_keys": ("seed: 1 -> 2",)}, "seed: 1 -> 2"),
]


def test_every_rule_is_broken_by_a_row_of_this_table() -> None:
    warnings = {rule.id for rule in RULES if rule.severity == "warning"}
    assert {rule.id for rule in RULES} == {row[0] for row in BROKEN} | warnings
    assert len({rule.id for rule in RULES}) == len(RULES)
    assert all(rule.condition and rule.source for rule in RULES)


@pytest.mark.parametrize(("rule", "overrides", "facts", "told"), BROKEN)
def test_a_broken_rule_stops_the_run_and_says_what_to_change(
    rule: str, overrides: tuple[str, ...], facts: dict[str, object], told: str, parsed: Parsed
) -> None:
    found = [str(one) for one in findings(parsed(*overrides), **facts) if one.rule == rule and one.severity == "error"]
    assert any(told in line for line in found), found


@pytest.mark.parametrize(("rule", "overrides", "facts", "told"), BROKEN)
def test_allow_turns_just_that_error_into_a_warning(
    rule: str, overrides: tuple[str, ...], facts: dict[str, object], told: str, parsed: Parsed
) -> None:
    strict = findings(parsed(*overrides), **facts)
    allowed = findings(parsed(*overrides, f"allow=[{rule}]"), **facts)
    assert all(one.severity == "warning" and one.is_allowed for one in allowed if one.rule == rule)
    assert {one.rule for one in allowed if one.severity == "error"} == {
        one.rule for one in strict if one.severity == "error"
    } - {rule}


def test_allow_silences_a_warning(parsed: Parsed) -> None:
    dry = ("hardware=trn1", "model=tanuki_8b", "dry_run=true")
    assert {one.rule for one in findings(parsed(*dry))} == {"not-built", "site-unset"}
    assert {one.rule for one in findings(parsed(*dry, "allow=[site-unset]"))} == {"not-built"}


def test_allow_with_an_unknown_rule_is_an_error(parsed: Parsed) -> None:
    with pytest.raises(UserError, match=r"allow: 'memmory' is no rule; did you mean memory\?"):
        findings(parsed("allow=[memmory]"))


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("model=llama_tiny", "hardware.num_nodes=2"),
        ("debug=fast",),
        ("experiment=llama_tiny_ddp",),
        ("model=tanuki_8b", "debug=fast"),
    ],
)
def test_what_runs_here_has_no_finding(overrides: tuple[str, ...], parsed: Parsed) -> None:
    assert findings(parsed(*overrides)) == []


@pytest.mark.parametrize(
    "overrides", [("hardware=t4",), ("model=tanuki_8b", "hardware=h100"), ("model=tanuki_8b", "hardware=trn1")]
)
def test_a_recipe_for_a_cluster_breaks_no_rule_but_that_it_is_not_built(
    overrides: tuple[str, ...], parsed: Parsed
) -> None:
    assert {one.rule for one in findings(parsed(*overrides, *SITE), **FUTURE)} <= {"not-built"}


def test_look_finds_missing_files_of_a_local_run(parsed: Parsed, tmp_path: Path) -> None:
    gone = parsed(f"data.text={tmp_path}/gone.txt", f"exp_manager.exp_dir={tmp_path}/a/b")
    facts = look(gone, **BUILT)  # type: ignore[arg-type]
    assert facts.missing_files == {"data.text": f"{tmp_path}/gone.txt"}
    assert facts.free_bytes
    assert look(parsed("hardware=t4"), **BUILT).free_bytes is None  # type: ignore[arg-type]


def test_look_sees_what_slurms_nodes_see_only_below_the_shared_directory(parsed: Parsed, tmp_path: Path) -> None:
    slurm = ("launcher=slurm", f"site.slurm.shared_dir={tmp_path}")
    shared = look(parsed(*slurm, f"data.text={tmp_path}/gone.txt"), **BUILT)  # type: ignore[arg-type]
    assert (shared.missing_files, bool(shared.free_bytes)) == ({"data.text": f"{tmp_path}/gone.txt"}, True)
    elsewhere = look(parsed(*slurm, "data.text=/scratch/of/a/node.txt"), **BUILT)  # type: ignore[arg-type]
    assert (elsewhere.missing_files, elsewhere.missing_packages) == ({}, ())


def test_look_reads_the_largest_token_of_a_data_set(parsed: Parsed, tmp_path: Path) -> None:
    prefix = tmp_path / "tokens"
    with IndexedWriter(prefix, np.dtype(np.int32)) as writer:
        writer.add_sequence(np.array([1, 70_000, 2]))
        writer.end_document()
    config = parsed("data.text=null", f"data.data_prefix=[{prefix}]")
    facts = look(config, **BUILT)  # type: ignore[arg-type]
    assert facts.max_token_id == 70_000
    (found,) = check(config, make_plan(config), facts)
    assert "data.data_prefix holds token 70000, but model.vocab_size=50257" in found.message
