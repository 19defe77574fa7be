"""The rule table: each rule has a config that breaks it and one that does not, and `allow` relaxes exactly one."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.dataset.words import save_words
from trainwright import storage
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
SITE = (
    "site.slurm.shared_dir=/fsx",
    "site.slurm.neuron_env=/env",
    "site.slurm.nxdt_dir=/nxdt",
    "site.vertex.project=p",
    "site.vertex.bucket=b",
)


def findings(config: RunConfig, **facts: object) -> list[Finding]:
    return check(config, make_plan(config), Facts(**{**BUILT, **facts}))  # type: ignore[arg-type]


TANUKI = ("model=tanuki_8b", "hardware=trn1")
TENSORBOARD = "projects/p/locations/us-central1/tensorboards/1"
FLEX = ("hardware=h100", "launcher.strategy=FLEX_START")
CHANGED = CodeState(
    top=Path("/repo"), commit="abc", changed=("a.py",), untracked=("b.py",), tracked=("a.py",), diff=b"..."
)

# Rule, overrides that break it, facts, text that the finding holds.
BROKEN = [
    ("not-built", ("hardware=t4",), {}, "backend=nemo is not built yet"),
    ("not-built", ("hardware=h100",), {}, "launcher=vertex is not built yet"),
    ("not-built", ("model=bert_tiny",), {}, "bert training is not built yet"),
    ("not-built", ("parallelism.tensor_model_parallel_size=2", "hardware.devices=2"), {}, "set all three to 1"),
    ("not-built", ("data=bert_wikipedia", "model=llama_tiny"), {}, "data.kind=bert"),
    ("not-built", ("trainer.recompute=selective",), {}, "use full or none"),
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
    ("vocabulary", (), {"tokenizer_vocab_size": 60_000}, "set both to 60000"),
    (
        "empty-split",
        ("data.text=null", "data.data_prefix=[/d/x]", "data.splits_string='99990,8,2'"),
        {"num_sequences": {"/d/x": 1000}},
        "the 1000 sequences of /d/x.idx become train 1000, validation 0, test 0; give a larger weight",
    ),
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
    ("on-failure", ("hardware=t4", "on_failure=stop"), {}, "launcher=vertex takes all runs of a sweep at once"),
    ("code", ("code=require_clean",), {"code": CHANGED}, "code=require_clean, but /repo has changed a.py, new b.py"),
    ("code", ("code=snapshot",), {}, "not started in a git repository"),
    ("env-from", (), {"unset_env": ("TOKEN",)}, "export TOKEN or leave it out"),
    ("env-from", (), {"exposed_env": (("TOKEN", "launcher.env.X"),)}, "launcher.env.X spells out the value of TOKEN"),
    ("still-running", ("run_id=x",), {"holder": "process 7 on here"}, "still worked on by process 7 on here"),
    ("resume-config", ("run_id=x",), {"changed_keys": ("seed: 1 -> 2",)}, "seed: 1 -> 2"),
    # One for each; all that breaks them: tests/backends/nxdt/test_rules.py.
    ("nxdt-path", (*TANUKI, "exp_manager.name=run-v2"), {}, "'run-v2' holds '-v'"),
    ("nxdt-heads", (*TANUKI, "parallelism.kv_replicator=2"), {}, "or parallelism.kv_replicator=4"),
    ("nxdt-parallel", (*TANUKI, "parallelism.strategy=fsdp"), {}, "use ddp"),
    ("nxdt-devices", (*TANUKI, "hardware.devices=96"), {}, "use 1, 2, 8, 32, 64, 128"),
    ("nxdt-seed", (*TANUKI, "seed=0"), {}, "NxDT wants more than 0"),
    ("nxdt-tied", ("model=llama_tiny", "hardware=trn1"), {}, "would train as two"),
    ("nxdt-name", (*TANUKI, "name=mixtral"), {}, "choose another name"),
    ("nxdt-data", (*TANUKI, "data=shakespeare"), {}, "use data=tanuki_sft"),
    ("nxdt-source", (*TANUKI, "model.source=null"), {}, "has no trained weights to begin with"),
    ("nxdt-other-run", (*TANUKI, "exp_manager.resume_from_checkpoint=/fsx/x.ckpt"), {}, "by run_id=ID"),
    ("nxdt-precision", (*TANUKI, "trainer.precision=16-mixed"), {}, "use bf16-mixed"),
    ("nxdt-schedule", (*TANUKI, "optim.sched.min_lr=1e-5"), {}, "use optim.sched.min_lr=0"),
    ("nxdt-weight-decay", (*TANUKI, "optim.weight_decay=0.1"), {}, "use optim.weight_decay=0.01"),
    ("nxdt-saves", (*TANUKI, "trainer.max_steps=40"), {}, "saves nothing"),
    ("nxdt-ranking", (*TANUKI, "name=tanuki_100steps"), {}, "choose run_id without it"),
    ("nxdt-recompute", (*TANUKI, "backend.activations_checkpoint_recompute=[]"), {}, "name what"),
    (
        "nxdt-cache",
        (*TANUKI, "backend.compiler_cache_url=/tmp/x", "site.slurm.shared_dir=/fsx"),
        {},
        "use an s3:// URL",
    ),
    ("nxdt-env", (*TANUKI, "+launcher.env.COMPILE='1'"), {}, "launcher.env: COMPILE"),
    ("nxdt-ema", (*TANUKI, "exp_manager.ema.enable=true"), {}, "use false"),
    (
        "nxdt-shared-dir",
        (*TANUKI, "backend.model_dir=/x", "site.slurm.shared_dir=/fsx"),
        {},
        "choose backend.model_dir",
    ),
    # One for each; all that breaks them: tests/backends/nemo/test_rules.py.
    ("nemo-data", ("hardware=t4", "data.shuffle_tokens=true"), {}, "data.shuffle_tokens=true is native's"),
    ("nemo-source", ("hardware=t4", "model.source=me/gpt"), {}, "begins with random weights"),
    ("nemo-data-copy", ("hardware=t4", "backend.data_cache_dir=/gcs/b/c"), {}, "no disk of a node"),
    ("nemo-index-mapping", ("hardware=t4", "data.index_mapping_dir=null"), {}, "on the disk of one of 4 nodes"),
    (
        "nemo-filename",
        ("hardware=t4", "exp_manager.checkpoint_callback_params.auto_insert_metric_name=false"),
        {},
        "looks for consumed_samples=",
    ),
    ("nemo-path", ("hardware=t4", "exp_manager.name=mp_rank_00"), {}, "by which NeMo takes paths apart"),
    (
        "nemo-saves",
        ("hardware=t4", "exp_manager.checkpoint_callback_params.train_time_interval=600"),
        {},
        "a text where it wants a time",
    ),
    ("nemo-validation", ("hardware=t4", "trainer.val_check_interval=51"), {}, "NeMo would never validate"),
    ("nemo-precision", ("hardware=t4", "trainer.precision=bf16-true"), {}, "know mixed precision only"),
    ("nemo-fp8", ("hardware=t4", "backend.fp8=true"), {}, "on NVIDIA_TESLA_T4, which computes in no 8-bit type"),
    ("nemo-parallel", ("hardware=t4", "parallelism.strategy=fsdp"), {}, "shards optimizer state"),
    ("nemo-schedule", ("hardware=t4", "trainer.max_steps=500"), {}, "the learning rate falls from its peak at once"),
    ("nemo-ema", ("hardware=t4", "exp_manager.ema.enable=true"), {}, "cannot resume"),
    ("nemo-seed", ("hardware=t4", "seed=0"), {}, "Megatron wants more than 0"),
    ("nemo-files", ("hardware=t4", "exp_manager.files_to_copy=[/home/me/x.yaml]"), {}, "is not below /gcs"),
    (
        "nemo-profile",
        ("hardware=t4", "backend.nsys_profile.enabled=true", "backend.nsys_profile.ranks=[0,8]"),
        {},
        "ranks that exist",
    ),
    ("nemo-version", ("hardware=t4", "backend.nemo_version='2.7'"), {}, "use backend.nemo_version=1.23"),
    ("vertex-machine", ("launcher=vertex",), {}, "use launcher.machine=n1-standard-8"),
    (
        "vertex-machine",
        ("hardware=t4", "hardware.accelerator_type=nvidia_tesla_t4"),
        {},
        "did you mean NVIDIA_TESLA_T4?",
    ),
    (
        "vertex-machine",
        ("hardware=t4", "hardware.accelerator_type=null"),
        {},
        "accelerator_type=None is no accelerator",
    ),
    ("vertex-machine", ("hardware=t4", "hardware.machine=c2-standard-8"), {}, "takes no accelerators"),
    (
        "vertex-machine",
        ("hardware=t4", "hardware.machine=n1-standard-64"),
        {},
        "takes 4 NVIDIA_TESLA_T4, not 2; use n1-",
    ),
    ("vertex-machine", ("hardware=t4", "hardware.devices=3"), {}, "takes 1 or 2 or 4 NVIDIA_TESLA_T4, not 3"),
    ("vertex-machine", ("hardware=h100", "hardware.devices=4"), {}, "use hardware.devices=8"),
    ("vertex-machine", ("hardware=h100", "hardware.machine=a2-highgpu-8g"), {}, "has 8 NVIDIA_TESLA_A100"),
    ("vertex-machine", ("launcher=vertex", "launcher.machine=g2-standard-8"), {}, "but hardware.accelerator=cpu"),
    ("vertex-bucket", ("hardware=t4", "exp_manager.exp_dir=/tmp/me"), {}, "is not below launcher.bucket_mount=/gcs"),
    ("vertex-bucket", ("hardware=t4", "launcher.scratch_dir=null"), {}, "use launcher.scratch_dir=/tmp/trainwright"),
    ("vertex-env", ("hardware=t4", "+launcher.env={a.b: x}"), {}, "'a.b' is no name that Vertex AI takes"),
    ("vertex-env", ("hardware=t4", *(f"+launcher.env.V{i}=x" for i in range(101))), {}, "Vertex AI takes 100"),
    ("vertex-labels", ("hardware=t4", "+launcher.labels.team=Speech"), {}, "team=Speech is no label"),
    ("vertex-labels", ("hardware=t4", "+launcher.labels.trainwright_run=x"), {}, "jobs are found by it"),
    ("vertex-labels", ("hardware=t4", *(f"+launcher.labels.l{i}=x" for i in range(62))), {}, "has 62 labels"),
    ("vertex-region", ("hardware=t4", f"launcher.tensorboard={TENSORBOARD}"), {}, "needs launcher.service_account"),
    (
        "vertex-region",
        ("hardware=t4", f"launcher.tensorboard={TENSORBOARD}", "launcher.location=us-east4"),
        {},
        "is not in launcher.location=us-east4",
    ),
    ("vertex-region", ("hardware=t4", "launcher.tensorboard=mine"), {}, "launcher.tensorboard=mine is no full name"),
    (
        "vertex-region",
        ("hardware=t4", "launcher.persistent_resource=m", "launcher.locations=[us-east4]"),
        {},
        "launcher.persistent_resource lies in one region",
    ),
    (
        "vertex-strategy",
        ("hardware=t4", "launcher.strategy=FLEX_START"),
        {},
        "brings no hardware.accelerator_type=NVIDIA",
    ),
    ("vertex-strategy", (*FLEX, "launcher.time=8-00:00:00"), {}, "more than the 7 days of FLEX_START"),
    ("vertex-strategy", (*FLEX, "launcher.reservation=any"), {}, "takes other machines than launcher.reservation"),
    ("bucket", ("launcher=vertex",), {"bucket_problems": (("no gs://b", "create it"),)}, "no gs://b; create it"),
]


# Rules that only warn: as above.
DOUBTFUL = [
    ("bf16-on-t4", ("hardware=t4",), "compute capability 7.5): bfloat16 begins with 8.0"),
    ("vertex-machine-doubt", ("hardware=t4", "hardware.machine=n9-new-4"), "n9-new-4 is not among the machine types"),
    (
        "vertex-machine-doubt",
        ("hardware=t4", "launcher.locations=[mars-1]"),
        "NVIDIA_TESLA_T4 is not known to be in mars-1",
    ),
    (
        "vertex-machine-doubt",
        ("hardware=h100", "hardware.machine=a3-highgpu-1g", "hardware.devices=1"),
        "SPOT or FLEX_START only",
    ),
    (
        "vertex-strategy-doubt",
        ("hardware=t4", "launcher.max_wait_s=60"),
        "counts with launcher.strategy=FLEX_START only",
    ),
    (
        "vertex-strategy-doubt",
        ("hardware=t4", "launcher.strategy=SPOT", "launcher.disable_retries=true"),
        "the first machine taken away ends the run",
    ),
    (
        "vertex-strategy-doubt",
        ("hardware=t4", "launcher.restart_on_worker_restart=false"),
        "the others wait for it for ever",
    ),
    ("vertex-strategy-doubt", ("hardware=t4", f"launcher.tensorboard={TENSORBOARD}"), "where NeMo writes no curves"),
    ("vertex-env-from", ("hardware=t4", "launcher.env_from=[HF_TOKEN]"), "Vertex AI keeps HF_TOKEN in the job"),
]


@pytest.mark.parametrize(("rule", "overrides", "told"), DOUBTFUL)
def test_what_is_doubtful_warns_and_allow_silences_it(
    rule: str, overrides: tuple[str, ...], told: str, parsed: Parsed
) -> None:
    found = [one for one in findings(parsed(*overrides)) if one.rule == rule]
    assert [one.severity for one in found] == ["warning"]
    assert told in found[0].message
    assert not [one for one in findings(parsed(*overrides, f"allow=[{rule}]")) if one.rule == rule]


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
    assert {one.rule for one in findings(parsed(*dry))} == {"not-built", "site-unset", "nxdt-sft"}
    assert {one.rule for one in findings(parsed(*dry, "allow=[site-unset,nxdt-sft]"))} == {"not-built"}


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
    "overrides",
    [
        ("hardware=t4",),
        ("model=tanuki_8b", "hardware=h100", "launcher.image=i"),
        ("model=tanuki_8b", "hardware=trn1"),
    ],
)
def test_a_recipe_for_a_cluster_breaks_no_rule_but_that_it_is_not_built(
    overrides: tuple[str, ...], parsed: Parsed
) -> None:
    assert {one.rule for one in findings(parsed(*overrides, *SITE), **FUTURE)} <= {
        "not-built",
        "sft-unmasked",
        "bf16-on-t4",
        "nemo-warm-up",
        "nxdt-sft",
    }


def test_look_finds_missing_files_of_a_local_run(parsed: Parsed, tmp_path: Path) -> None:
    gone = parsed(f"data.text={tmp_path}/gone.txt", f"exp_manager.exp_dir={tmp_path}/a/b")
    facts = look(gone, **BUILT)  # type: ignore[arg-type]
    assert facts.missing_files == {"data.text": f"{tmp_path}/gone.txt"}
    assert facts.free_bytes
    assert look(parsed("hardware=t4", "dry_run=true"), **BUILT).free_bytes is None  # type: ignore[arg-type]


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
    config = parsed("data.text=null", f"data.data_prefix=[{prefix}]", "data.splits_string='1,0,0'")
    facts = look(config, **BUILT)  # type: ignore[arg-type]
    assert facts.max_token_id == 70_000
    (found,) = check(config, make_plan(config), facts)
    assert "data.data_prefix holds token 70000, but model.vocab_size=50257" in found.message


def test_look_counts_the_sequences_that_splits_would_leave_empty(parsed: Parsed, tmp_path: Path) -> None:
    for name in ("bucket", "local"):
        (tmp_path / name).mkdir()
        with IndexedWriter(tmp_path / name / "tokens", np.dtype(np.uint16)) as writer:
            for _ in range(1000):
                writer.add_sequence(np.array([1]))
                writer.end_document()
    mounted = ("hardware=t4", "data.data_prefix=[1.0,/gcs/bucket/tokens]", f"launcher.bucket_url={tmp_path}")
    for where in (mounted, ("data.text=null", f"data.data_prefix=[{tmp_path}/local/tokens]")):
        config = parsed(*where, "data.splits_string='99990,8,2'", "model.vocab_size=50257")
        facts = look(config, **BUILT)  # type: ignore[arg-type]
        assert list(facts.num_sequences.values()) == [1000]
        (found,) = (one for one in check(config, make_plan(config), facts) if one.rule == "empty-split")
        assert "validation 0, test 0" in found.message
    gone = look(parsed("data.text=null", f"data.data_prefix=[{tmp_path}/gone]"), **BUILT)  # type: ignore[arg-type]
    assert gone.num_sequences == {}


def test_look_reads_an_index_in_a_bucket_unless_the_run_is_dry_or_refused_anyway(
    parsed: Parsed, tmp_path: Path
) -> None:
    with IndexedWriter(tmp_path / "x", np.dtype(np.uint16)) as writer:
        writer.add_sequence(np.array([1]))
        writer.end_document()
    storage.write_all({storage.at("memory://split-bucket/x.idx"): (tmp_path / "x.idx").read_bytes()})
    bucket = ("hardware=t4", "data.data_prefix=[/gcs/split-bucket/x]", "launcher.bucket_url=memory://")
    mine = "site.vertex.bucket=mine"
    assert look(parsed(*bucket, mine), **BUILT).num_sequences == {"/gcs/split-bucket/x": 1}  # type: ignore[arg-type]
    assert look(parsed(*bucket), **BUILT).num_sequences == {}  # type: ignore[arg-type]  # no bucket is named: refused anyway
    assert look(parsed(*bucket, mine, "dry_run=true"), **BUILT).num_sequences == {}  # type: ignore[arg-type]


def test_instruction_data_on_native_warns_that_prompts_are_trained_on(parsed: Parsed) -> None:
    nameless = ("model=llama_tiny", "data=tanuki_sft", "data.tokenizer.vocab_size=100", *SITE)
    assert [one.message for one in findings(parsed(*nameless)) if one.severity == "error"] == [
        "data.tokenizer.name=null, but the records are tokenized with it"
    ]
    sft = (*nameless, "data.tokenizer.name=someone/words")
    (found,) = findings(parsed(*sft))
    assert (found.rule, found.severity) == ("sft-unmasked", "warning")
    assert findings(parsed(*sft, "allow=[sft-unmasked]")) == []


def test_look_finds_a_tokenizer_or_that_it_is_missing(parsed: Parsed, tmp_path: Path) -> None:
    sft = ("model=llama_tiny", "data=tanuki_sft", "data.tokenizer.vocab_size=100", "model.vocab_size=99", *SITE)
    absent = look(parsed(*sft, f"data.tokenizer.name={tmp_path}/no"), **BUILT)  # type: ignore[arg-type]
    assert absent.missing_files == {
        "data.train_path": "/fsx/data/training.jsonl",
        "data.val_path": "/fsx/data/validation.jsonl",
        "data.tokenizer.name": f"{tmp_path}/no/tokenizer.json",
    }
    there = parsed(*sft, f"data.tokenizer.name={save_words(tmp_path / 'words', num_words=100)}")
    facts = look(there, **BUILT)  # type: ignore[arg-type]
    assert facts.tokenizer_vocab_size == 103
    told = [found.message for found in check(there, make_plan(there), facts) if found.rule == "vocabulary"]
    assert any("has 103 tokens, but model.vocab_size=99" in line for line in told)
