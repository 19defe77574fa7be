"""What NxDT is given for a run: the third article's file key by key, what preflight lets through, and the stages."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.backends.nxdt.nxdt_schema import leaves, problems, problems_of_text
from trainwright.backends import RENDERERS
from trainwright.backends.nxdt.document import document
from trainwright.backends.nxdt.render import cache_key_of
from trainwright.backends.rendered_yaml import to_yaml
from trainwright.config import RunConfig, register_resolvers
from trainwright.job import JobSpec
from trainwright.plan import make_plan
from trainwright.preflight import check
from trainwright.rules import Facts

Parsed = Callable[..., RunConfig]
GOLDEN = Path(__file__).parents[2] / "golden" / "nxdt" / "hf_tanuki_8B_SFT_config.yaml"
SEED = Path(__file__).parents[2] / "golden" / "nxdt" / "chat_template.txt"
SITE = ("site.slurm.shared_dir=/fsx", "site.slurm.neuron_env=/home/ubuntu/env", "site.slurm.nxdt_dir=/home/ubuntu/nxdt")
TANUKI = ("model=tanuki_8b", "hardware=trn1", *SITE)
FACTS = Facts(built_backends=("nxdt",), built_launchers=("slurm",))

# The article's shell, and the same in our keys.
ENVIRONMENT = {
    "CHECKPOINT_DIR": "/fsx/checkpoints/tanuki-8b/pretrained_model/",
    "TP_DEGREE": "32",
    "KV_REPLICATOR": "4",
    "DATA_DIR": "/fsx/examples_datasets/llama3_8b",
    "ORIGINAL_MODEL_PATH": "/fsx/models/Tanuki-8B-dpo-v1.0",
    "MODEL_CONFIG_PATH": "/fsx/models/Tanuki-8B-dpo-v1.0/config.json",
}
ARTICLE = (
    *TANUKI,
    "name=hf_tanuki",
    "exp_manager.exp_dir=/fsx/nemo_experiments/",
    "exp_manager.checkpoint_callback_params.filename='hf_tanuki_8B_SFT--{step}-{consumed_samples}'",
    "backend.model_dir=/fsx/models/Tanuki-8B-dpo-v1.0",
    "backend.pretrained_dir=/fsx/checkpoints/tanuki-8b/pretrained_model/",
    "data.train_path=/fsx/examples_datasets/llama3_8b/training.jsonl",
    "data.val_path=/fsx/examples_datasets/llama3_8b/validation.jsonl",
    "backend.compiler_cache_url=/home/ubuntu/neuron_cache",
)
ABSENT = object()
# What differs from the article's file: (theirs, ours, why).
DIFFERENCES: dict[str, tuple[object, object, str]] = {
    "model.encoder_seq_length": (8192, 4096, "NxDT asserts that a batch has this length, and data.seq_length is 4096"),
    "model.rope_theta": (500000.0, ABSENT, "Llama 3's; it would override config.json and change Tanuki silently"),
    "model.max_position_embeddings": (8192, ABSENT, "Llama 3's; it would override config.json"),
    "model.optim.eps": (ABSENT, 1e-6, "neuronx-distributed 2.29's default; that of older versions is torch's 1e-8"),
    "exp_manager.version": (ABSENT, "r1", "else a job of another id starts anew beside the checkpoints"),
    "exp_manager.exp_dir": ("/fsx/nemo_experiments/", "/fsx/nemo_experiments", "the same directory"),
    "exp_manager.resume_from_checkpoint": (
        "/fsx/checkpoints/tanuki-8b/pretrained_model/",
        "/fsx/checkpoints/tanuki-8b/pretrained_model",
        "the same directory; NxDT takes what is behind the last slash for the checkpoint's name",
    ),
}


def rendered(config: RunConfig, *, is_fresh: bool = True) -> dict[str, Any]:
    config = config.with_absolute_paths(Path("/work"))
    return document(config, make_plan(config), run_id="r1", is_fresh=is_fresh)


def jobs(config: RunConfig, attempt: int = 1) -> dict[str, JobSpec]:
    made = RENDERERS["nxdt"](config, make_plan(config), run_id="r1", run_dir="/fsx/r1", attempt=attempt)
    return {job.stage: job for job in made}


@pytest.fixture
def golden(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the article's file with its references resolved as in the article's shell."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    register_resolvers()
    tree = OmegaConf.to_container(OmegaConf.load(GOLDEN), resolve=True)
    assert isinstance(tree, dict)
    return tree  # type: ignore[return-value]


def test_the_articles_file_is_met_key_by_key_but_for_what_must_differ(golden: dict[str, Any], parsed: Parsed) -> None:
    theirs, ours = dict(leaves(golden)), dict(leaves(rendered(parsed(*ARTICLE))))
    found = {
        key: (theirs.get(key, ABSENT), ours.get(key, ABSENT))
        for key in {*theirs, *ours}
        if (theirs.get(key, ABSENT), type(theirs.get(key))) != (ours.get(key, ABSENT), type(ours.get(key)))
    }
    assert found == {key: (before, after) for key, (before, after, _) in DIFFERENCES.items()}
    assert all(reason for _, _, reason in DIFFERENCES.values())


def test_the_schema_refuses_the_articles_file_for_what_differs(golden: dict[str, Any]) -> None:
    assert set(problems(golden)) == {
        "model.encoder_seq_length: 8192, but batches have 4096",
        "exp_manager.version: a job of another id would not resume",
        "exp_manager.resume_from_checkpoint: the name behind the last slash is the checkpoint's",
    }


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("trainer.devices", 16, "trainer.devices: 16"),
        ("trainer.devices", "32", "trainer.devices: '32' is str"),
        ("trainer.precision", "bf16", "trainer.precision: unknown"),
        ("exp_manager.dry_run_dir", "x", "exp_manager.dry_run_dir: unknown"),
        ("exp_manager.checkpoint_callback_params.every_n_epochs", 1, "Lightning takes one of its triggers"),
        ("exp_manager.name", "tanuki-v1", "would be cut at -v"),
        ("seed", 0, "seed: must be above 0"),
        ("model.dpo", {"beta": 0.1}, "model.dpo: unknown"),
        ("neuron_experimental_compress_rg", "false", "neuron_experimental_compress_rg: 'false' is str"),
        ("precision.type", "mixed_precisionSR", "precision.type: mixed_precisionSR"),
        ("precision.type", "fp32", "versions before 2.29 start only with XLA_DOWNCAST_BF16=1"),
        ("data.train_dir", "/fsx/data.arrow", "data.train_dir: no jsonl"),
        ("data.global_batch_size", 0, None),
        ("model.optim.sched.min_lr", 0.1, "an unexpected argument"),
        ("trainer.num_nodes", 2, "optimizer state would be saved as if it were replicated"),
        ("name", "${oc.env:HOME}", "left to be worked out"),
    ],
)
def test_the_schema_knows_the_traps_of_the_facts(path: str, value: object, told: str | None, parsed: Parsed) -> None:
    tree = rendered(parsed(*TANUKI))
    assert list(problems(tree)) == []
    *sections, key = path.split(".")
    node = tree
    for section in sections:
        node = node[section]
    node[key] = value
    found = list(problems(tree))
    assert told is None or any(told in problem for problem in found), found


@pytest.mark.parametrize("is_fresh", [True, False])
@pytest.mark.parametrize(
    "overrides", [(), ("hardware.num_nodes=4",), ("name='1e5'",), ("backend.precision=mixed_precision_sr",)]
)
def test_the_file_is_plain_and_says_the_same_to_yaml_and_omegaconf(
    overrides: tuple[str, ...], is_fresh: bool, parsed: Parsed
) -> None:
    tree = rendered(parsed(*TANUKI, *overrides), is_fresh=is_fresh)
    text = to_yaml(tree, reader="NxDT", run_id="r1")
    assert problems_of_text(text) == []
    assert yaml.safe_load(text) == tree
    assert text.startswith("# What NxDT reads for run r1. Written by trainwright")


@st.composite
def legal_changes(draw: st.DrawFn) -> dict[str, Any]:
    """Return values for keys of a config that go together."""
    generation, lnc = draw(st.sampled_from([("trn1", None), ("trn2", 2)]))
    copies = draw(st.sampled_from([1, 2, 4])) if generation == "trn1" else 1
    tensor, pipeline, nodes = 8 * copies, draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 4]))
    devices = draw(st.sampled_from([one for one in (8, 32, 64, 128) if nodes * one % (tensor * pipeline) == 0]))
    micro, replicas = draw(st.integers(1, 2)), nodes * devices // (tensor * pipeline)
    precision = draw(st.sampled_from(["32-true", "bf16-mixed", "bf16-true"]))
    is_mixed = precision == "bf16-mixed"
    sched = draw(st.sampled_from(["LinearAnnealingWithWarmUp", "CosineAnnealing", "constant"]))
    every, max_steps = draw(st.sampled_from([None, 5, 50])), draw(st.integers(10, 200))
    has_sequence_parallel = draw(st.booleans())
    callback = "exp_manager.checkpoint_callback_params"
    return {
        "seed": draw(st.integers(1, 2**31)),
        "hardware.machine": f"{generation}.48xlarge",
        "hardware.num_nodes": nodes,
        "hardware.devices": devices,
        "hardware.device_memory_gib": 1e6,
        "hardware.lnc": lnc,
        "parallelism.tensor_model_parallel_size": tensor,
        "parallelism.kv_replicator": copies,
        "parallelism.pipeline_model_parallel_size": pipeline,
        "parallelism.sequence_parallel": has_sequence_parallel,
        "data.seq_length": draw(st.sampled_from([2048, 4096] if has_sequence_parallel else [1000, 4096])),
        "data.micro_batch_size": micro,
        "data.global_batch_size": micro * replicas * draw(st.integers(1, 4)),
        "trainer.precision": precision,
        "trainer.recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "trainer.limit_val_batches": draw(st.integers(0, 2)),
        "trainer.max_steps": max_steps,
        "trainer.gradient_clip_val": draw(st.sampled_from([None, 0.5])),
        "backend.precision": draw(st.sampled_from([None, "autocast", "mixed_precision_sr"])) if is_mixed else None,
        "backend.zero1": is_mixed or draw(st.booleans()),
        "backend.packing": draw(st.booleans()),
        "backend.virtual_pipeline_model_parallel_size": draw(st.sampled_from([1, 2])) if pipeline > 1 else 1,
        "optim.sched.name": sched,
        "optim.sched.min_lr": draw(st.sampled_from([0.0, 1e-5])) if sched == "CosineAnnealing" else 0.0,
        "exp_manager.name": draw(st.sampled_from([None, "run"])),
        "exp_manager.create_mlflow_logger": draw(st.booleans()),
        "exp_manager.log_local_rank_0_only": draw(st.booleans()),
        f"{callback}.every_n_train_steps": every,
        f"{callback}.save_last": every is None or every > max_steps or draw(st.booleans()),
        f"{callback}.filename": draw(st.sampled_from(["{name}--{step}-{consumed_samples}", "{step}"])),
    }


SPOILED = {
    "seed": 0,
    "name": "mixtral_like",
    "hardware.devices": 16,
    "hardware.num_nodes": 3,
    "parallelism.tensor_model_parallel_size": 7,
    "parallelism.context_parallel_size": 2,
    "data.seq_length": 1001,
    "data.global_batch_size": 7,
    "data.train_path": "/fsx/data.arrow",
    "trainer.precision": "16-mixed",
    "backend.precision": "autocast",
    "backend.zero1": False,
    "backend.activations_checkpoint_recompute": ["Attention"],
    "optim.sched.min_lr": 1e-5,
    "exp_manager.exp_dir": "/fsx/runs-v2",
    "exp_manager.checkpoint_callback_params.filename": None,
    "exp_manager.checkpoint_callback_params.train_time_interval": 600,
}


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changed=legal_changes(), spoiled=st.none() | st.sampled_from(sorted(SPOILED)))
def test_what_preflight_lets_through_is_what_nxdt_takes(
    changed: dict[str, Any], spoiled: str | None, tanuki: dict[str, Any]
) -> None:
    tree = json.loads(json.dumps(tanuki))
    for path, value in {**changed, **({spoiled: SPOILED[spoiled]} if spoiled else {})}.items():
        *sections, key = path.split(".")
        node = tree
        for section in sections:
            node = node[section]
        node[key] = value
    config = RunConfig.from_dict(tree)
    refused = {found.rule for found in check(config, make_plan(config), FACTS) if found.severity == "error"}
    assert spoiled or not refused
    for is_fresh in (True, False):
        found = list(problems(rendered(config, is_fresh=is_fresh)))
        assert refused or not found, found


@pytest.fixture(scope="module")
def tanuki(parsed: Parsed) -> dict[str, Any]:
    """Return the config of tanuki_8b on trn1 as a tree."""
    return parsed(*TANUKI).to_dict()


def test_the_stages_of_a_run_and_what_each_is_started_with(parsed: Parsed) -> None:
    config = parsed(
        *TANUKI,
        "hardware.num_nodes=2",
        "+launcher.env.FI_PROVIDER=sockets",
        "+launcher.env.MORE=x",
        "launcher.time=3600",
    )
    made = jobs(config)
    assert list(made) == ["fetch", "convert", "compile", "train", "export", "verify"]
    around = ("fetch", "convert", "export", "verify")
    for stage, job in made.items():
        sizes = (1, 0) if stage in around else (2, 32)
        assert (job.launch, job.num_nodes, job.devices, job.time_limit_s) == ("plain", *sizes, 3600)
        assert (job.env["FI_PROVIDER"], job.env["MORE"], job.env["MALLOC_ARENA_MAX"]) == ("sockets", "x", "128")
        assert job.command[0] == job.python == "python3"
        assert JobSpec.from_json(job.to_json()) == job
    module = ("program", "trainwright.backends.nxdt.convert", "/fsx/r1", "--attempt", "{attempt}")
    assert made["convert"].command[1:] == ("/fsx/r1/run/worker.pyz", *module)
    driver = ("-I", "-S", "/fsx/r1/run/worker.pyz", "nxdt", "/fsx/r1", "--stage", "train", "--attempt", "{attempt}")
    assert made["train"].command[1:] == driver
    assert made["convert"].outputs == (config.backend.pretrained_dir,)  # type: ignore[union-attr]
    assert made["compile"].files == made["train"].files
    assert list(made["train"].files) == ["nxdt/settings.json", "nxdt/fresh.yaml", "nxdt/resume.yaml"]
    assert all(name.startswith("nxdt-a2/") for name in jobs(config, attempt=2)["train"].files)


def test_a_resume_takes_its_own_checkpoint_with_optimizer_and_schedule(parsed: Parsed) -> None:
    fresh, resume = (dict(leaves(rendered(parsed(*TANUKI), is_fresh=fresh))) for fresh in (True, False))
    assert {key: (fresh[key], resume[key]) for key in fresh if fresh[key] != resume[key]} == {
        "exp_manager.resume_from_checkpoint": ("/fsx/shards/tanuki_8b/tp32-pp1-kv4-fusedTrue", None),
        "model.weight_init_only": (True, False),
    }


def test_the_driver_is_told_what_it_must_know_beside_the_yaml(parsed: Parsed) -> None:
    told = json.loads(jobs(parsed(*ARTICLE, "backend.reserved_port=41000"))["train"].files["nxdt/settings.json"])
    assert told["schema_version"] == 1
    assert told["python"] == "/home/ubuntu/env/bin/python3"
    assert told["orchestrator"] == "/home/ubuntu/nxdt/examples/training_orchestrator.py"
    assert (told["devices"], told["num_nodes"], told["global_batch_size"], told["max_steps"]) == (32, 1, 8, 100)
    assert (told["cache_url"], told["max_open_files"], told["reserved_port"]) == (
        "/home/ubuntu/neuron_cache",
        65535,
        41000,
    )
    assert told["checkpoint_name"] == "hf_tanuki_8B_SFT--"
    assert {"NEURON_CC_FLAGS", "XLA_DOWNCAST_BF16", "NEURON_COMPILE_CACHE_URL", "NEMO_EXPM_VERSION", "COMPILE"} <= set(
        told["unset_env"]
    )
    assert told["results"]["batch"]["accumulate_grad_batches"] == 8


SAME_GRAPHS = [
    "site.slurm.shared_dir=/other",
    "name=another",
    "seed=7",
    "optim.lr=1e-3",
    "optim.sched.warmup_steps=3",
    "trainer.max_steps=500",
    "trainer.log_every_n_steps=1",
    "data.train_path=/fsx/other.jsonl",
    "backend.compiler_cache_url=s3://bucket/cache",
    "backend.nxdt_dir=/opt/nxdt",
    "model.chat_template=null",
    "model.source=someone/else",
    "launcher.time=7200",
    "+launcher.env.FI_EFA_FORK_SAFE='0'",
    "exp_manager.checkpoint_callback_params.every_n_train_steps=10",
    "hardware.env.MALLOC_ARENA_MAX='64'",
]
OTHER_GRAPHS = [
    "model.num_layers=16",
    "model.rope_theta=500000",
    "parallelism.tensor_model_parallel_size=16",
    "parallelism.kv_replicator=2",
    "parallelism.pipeline_model_parallel_size=2",
    "parallelism.sequence_parallel=false",
    "hardware.num_nodes=2",
    "hardware.devices=64",
    "hardware.lnc=2",
    "hardware.machine=trn2.48xlarge",
    "data.micro_batch_size=2",
    "data.global_batch_size=16",
    "data.seq_length=2048",
    "trainer.precision=bf16-true",
    "trainer.recompute=full",
    "trainer.gradient_clip_val=null",
    "trainer.limit_val_batches=1",
    "backend.precision=mixed_precision_sr",
    "backend.compiler_flags='--model-type transformer -O2'",
    "backend.packing=false",
    "backend.fuse_qkv=false",
    "backend.zero1=false",
    "backend.fusions.softmax=false",
    "backend.activations_checkpoint_recompute=[LlamaMLP]",
    "backend.bucket_size_collectives=512",
    "backend.log_gradient_norm=false",
    "+launcher.env.XLA_DISABLE_FUNCTIONALIZATION='1'",
]


def cache_key(config: RunConfig) -> str:
    told = json.loads(jobs(config)["compile"].files["nxdt/settings.json"])
    assert told["cache_key_of"] == json.loads(json.dumps(cache_key_of(config, make_plan(config))))
    assert len(told["cache_key"]) == 64
    key: str = told["cache_key"]
    return key


def test_runs_with_the_same_graphs_have_the_same_key(parsed: Parsed, tanuki: dict[str, Any]) -> None:
    assert cache_key(parsed(*TANUKI, *SAME_GRAPHS)) == cache_key(RunConfig.from_dict(tanuki))


@pytest.mark.parametrize("override", OTHER_GRAPHS)
def test_what_changes_graphs_changes_the_key(override: str, parsed: Parsed, tanuki: dict[str, Any]) -> None:
    assert cache_key(parsed(*TANUKI, override)) != cache_key(RunConfig.from_dict(tanuki))


@pytest.mark.parametrize(
    ("hardware", "machine", "devices", "generation"),
    [
        ("trn1", "trn1.32xlarge", 32, "trn1"),
        ("trn1n", "trn1n.32xlarge", 32, "trn1"),
        ("trn2", "trn2.48xlarge", 64, "trn2"),
    ],
)
def test_an_instance_type_brings_its_sizes_and_environment(
    hardware: str, machine: str, devices: int, generation: str, parsed: Parsed
) -> None:
    config = parsed("model=tanuki_8b", f"hardware={hardware}", *SITE)
    found = config.hardware
    assert (found.name, found.machine, found.devices, found.neuron_generation) == (
        hardware,
        machine,
        devices,
        generation,
    )
    # NxDT 2.26, examples/train_setup.sh.
    assert jobs(config)["train"].env == {
        "FI_PROVIDER": "efa",
        "FI_EFA_USE_DEVICE_RDMA": "1",
        "FI_EFA_FORK_SAFE": "1",
        "MALLOC_ARENA_MAX": "128",
        "XLA_DISABLE_FUNCTIONALIZATION": "0",
        "HYDRA_FULL_ERROR": "1",
    }
    assert rendered(config)["trainer"].get("lnc") == (2 if hardware == "trn2" else None)


def test_the_model_is_exported_with_the_articles_chat_template(parsed: Parsed) -> None:
    template = parsed(*TANUKI).model.chat_template
    assert template == SEED.read_text(encoding="utf-8").rstrip("\n")


def test_the_recipe_sets_nothing_that_another_backend_lacks(parsed: Parsed) -> None:
    assert parsed(*TANUKI, "backend=native").backend.kind == "native"


def test_a_sharded_optimizer_on_several_replicas_is_marked_in_both_places(parsed: Parsed) -> None:
    tree = rendered(parsed(*TANUKI, "hardware.num_nodes=2"))
    assert (tree["wrap_with_zero"], tree["model"]["wrap_with_zero"]) == (True, True)
    assert "wrap_with_zero" not in rendered(parsed(*TANUKI, "hardware.num_nodes=2", "backend.zero1=false"))


def test_stochastic_rounding_is_written_out_since_nxdts_own_name_for_it_loses_master_weights(parsed: Parsed) -> None:
    tree = rendered(parsed(*TANUKI, "backend.precision=mixed_precision_sr"))
    assert tree["precision"] == {
        "type": "manual",
        "master_weights": True,
        "fp32_grad_acc": True,
        "xla_use_bf16": "0",
        "xla_downcast_bf16": "1",
        "neuron_rt_stochastic_rounding_en": "1",
    }
    assert tree["compiler_flags"] == "--model-type transformer --enable-mixed-precision-accumulation"


@pytest.mark.parametrize(
    ("precision", "kind", "optimizer"),
    [
        ("bf16-mixed", "mixed_precision", "adamw_fp32OptState"),
        ("bf16-true", "bf16SR", "adamw"),
        ("32-true", "fp32", "adamw"),
    ],
)
def test_precision_chooses_the_type_and_the_optimizer_that_works_with_it(
    precision: str, kind: str, optimizer: str, parsed: Parsed
) -> None:
    tree = rendered(parsed(*TANUKI, f"trainer.precision={precision}"))
    assert (tree["precision"]["type"], tree["model"]["optim"]["name"]) == (kind, optimizer)
