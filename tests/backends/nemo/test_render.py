"""What NeMo is given for a run: the first article's file key by key, what preflight lets through, and the job."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from tests.backends.nemo.nemo_schema import leaves, problems, problems_of_text
from trainwright.backends import RENDERERS
from trainwright.backends.nemo.constants import EXP_MANAGER_DEFAULTS, EXP_MANAGER_WRITTEN
from trainwright.backends.nemo.document import document
from trainwright.config import RunConfig, register_resolvers
from trainwright.exp_manager import run_dir
from trainwright.image import dockerfile, image_of
from trainwright.job import JobSpec
from trainwright.places import CONF
from trainwright.plan import make_plan
from trainwright.preflight import check
from trainwright.rules import Facts

Parsed = Callable[..., RunConfig]
GOLDEN = Path(__file__).parents[2] / "golden" / "nemo" / "gpt-small.yaml"
SITE = ("site.vertex.bucket=my-bucket", "site.vertex.project=my-project")
ARTICLE = ("model=gpt_small", "hardware=t4", *SITE)
GPT_5B_RUN = ("model=gpt_5b", "hardware=h100", "backend=nemo")
FACTS = Facts(built_backends=("nemo",), built_launchers=("vertex",))
ABSENT = object()

# What the article gives on the command line, and what NeMo's hydra_runner appends to it.
COMMAND_LINE: dict[str, object] = {
    "trainer.num_nodes": 4,
    "exp_manager.version": "r1",
    "exp_manager.exp_dir": "/gcs/my-bucket/nemo-experiments",  # the article's ends in a slash
    "model.data.data_prefix": [1.0, "/ssd/.cache/wikipedia-tokenized-for-gpt2"],
    "hydra.run.dir": ".",
    "hydra.output_subdir": None,
}
# The file that the article's is cut down from: where it differs.
GPT_5B: dict[str, object] = {
    "run.name": "GPT-5B",
    "trainer.val_check_interval": 50,
    "trainer.limit_val_batches": 0.0,
    "trainer.enable_progress_bar": False,
    "model.global_batch_size": 2048,
    "model.encoder_seq_length": 2048,
    "model.max_position_embeddings": 2048,
    "model.num_layers": 24,
    "model.hidden_size": 4096,
    "model.ffn_hidden_size": 16384,
    "model.num_attention_heads": 32,
    "model.data.seq_length": 2048,
}


def rendered(config: RunConfig) -> dict[str, Any]:
    return document(config.with_absolute_paths(Path("/work")), run_id="r1")


def job_of(config: RunConfig, attempt: int = 1) -> JobSpec:
    place = str(run_dir(config, "r1"))
    (job,) = RENDERERS["nemo"](config, make_plan(config), run_id="r1", run_dir=place, attempt=attempt)
    return job


def golden() -> dict[str, Any]:
    """Return the leaves of the article's file, its references resolved and its bucket filled in."""
    register_resolvers()
    tree = OmegaConf.create(GOLDEN.read_text().replace("__BUCKET__", "my-bucket"))
    return dict(leaves(OmegaConf.to_container(tree, resolve=True)))


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Return our value where it is another, or of another type."""
    return {
        key: ours.get(key, ABSENT)
        for key in {*theirs, *ours}
        if (theirs.get(key, ABSENT), type(theirs.get(key))) != (ours.get(key, ABSENT), type(ours.get(key)))
    }


@pytest.mark.parametrize("first", [("hardware=t4",), ("experiment=gpt_small_t4",)])
def test_the_articles_file_and_its_command_line_are_met_key_by_key(first: tuple[str, ...], parsed: Parsed) -> None:
    ours = dict(leaves(rendered(parsed(*first, *SITE))))
    assert differences(golden(), ours) == COMMAND_LINE


def test_the_file_that_the_article_starts_from_comes_from_the_same_code(parsed: Parsed) -> None:
    ours = dict(leaves(rendered(parsed(*GPT_5B_RUN, *SITE))))
    assert differences(golden(), ours) == {**COMMAND_LINE, **GPT_5B, "trainer.num_nodes": 1}


def test_the_article_raises_only_the_warnings_that_matter(parsed: Parsed) -> None:
    config = parsed(*ARTICLE)
    found = check(config, make_plan(config), FACTS)
    assert {(one.rule, one.severity) for one in found} == {("bf16-on-t4", "warning"), ("nemo-warm-up", "warning")}
    numbers = make_plan(config)
    assert (numbers.data_parallel_size, numbers.accumulate_grad_batches, numbers.consumed_samples) == (8, 8, 12_800)


OPTIONS: list[tuple[str, ...]] = [
    ("hardware=t4",),
    GPT_5B_RUN,
    ("hardware=h100", "backend=nemo"),
    ("hardware=t4", "backend.nemo_version='2.7'", "backend.script=/opt/mine.py"),
    ("hardware=t4", "exp_manager.version='1e5'", "exp_manager.name='0012'"),
    ("hardware=t4", "backend.max_time=12:00:00:00", "exp_manager.max_time_per_run=12:00:00"),
    (
        "hardware=t4",
        "exp_manager.create_wandb_logger=true",
        "exp_manager.create_mlflow_logger=true",
        "exp_manager.create_early_stopping_callback=true",
        "exp_manager.summary_writer_kwargs={flush_secs: 30}",
    ),
    (
        "hardware=t4",
        "parallelism.tensor_model_parallel_size=2",
        "parallelism.sequence_parallel=true",
        "hardware.num_nodes=2",
    ),
    ("hardware=t4", "data.tokenizer={type: huggingface, name: openai-community/gpt2}", "trainer.recompute=full"),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_the_file_is_plain_and_says_the_same_to_yaml_and_omegaconf(options: tuple[str, ...], parsed: Parsed) -> None:
    config = parsed(*options, *SITE)
    text = job_of(config).files["nemo/config.yaml"]
    assert problems_of_text(text, config.backend.nemo_version) == []  # type: ignore[union-attr]
    assert yaml.safe_load(text) == document(config, run_id="r1")
    assert text.startswith("# What NeMo reads for run r1. Written by trainwright")


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("trainer.num_node", 4, "trainer.num_node: unknown"),
        ("trainer.strategy", "ddp", "trainer.strategy: unknown"),
        ("exp_manager.dry_run_dir", "x", "exp_manager.dry_run_dir: unknown"),
        ("exp_manager.log_tflops_per_sec_per_gpu", False, "exp_manager.log_tflops_per_sec_per_gpu: unknown"),
        ("exp_manager.checkpoint_callback_params.async_save", False, "async_save: unknown"),
        ("exp_manager.version", None, "ranks would disagree"),
        ("exp_manager.name", "consumed_samples=0.0", "data would begin anew"),
        ("exp_manager.checkpoint_callback_params.filename", "m--{val_loss:.2f}-{step}", "data would begin anew"),
        ("exp_manager.checkpoint_callback_params.every_n_train_steps", 10, "Lightning takes one of its triggers"),
        ("model.seed", 0, "Seed should be a positive integer"),
        ("model.data.index_mapping_dir", 3, "model.data.index_mapping_dir: 3 is int"),
        ("model.optim.sched.max_lr", 1.0, "an unexpected argument"),
        ("trainer.precision", "bf16-mixed", "trainer.precision: bf16-mixed"),
        ("trainer.val_check_interval", 51, "trainer.val_check_interval: never"),
        ("hydra.run.dir", "outputs", "refuses another working directory"),
    ],
)
def test_the_schema_knows_the_traps_of_nemo(path: str, value: object, told: str, parsed: Parsed) -> None:
    tree = rendered(parsed(*ARTICLE))
    assert list(problems(tree)) == []
    *sections, key = path.split(".")
    node = tree
    for section in sections:
        node = node[section]
    node[key] = value
    found = list(problems(tree))
    assert any(told in problem for problem in found), found


SAVING = "exp_manager.checkpoint_callback_params"
# Values of which any number may be combined; preflight refuses some.
VALUES: dict[str, tuple[object, ...]] = {
    "seed": (0, 1),
    "parallelism.context_parallel_size": (2,),
    "parallelism.sequence_parallel": (True,),
    "trainer.precision": ("32-true", "16-mixed", "bf16-true"),
    "trainer.recompute": ("selective", "full"),
    "trainer.max_steps": (1, 7, 130, 20_000),
    "trainer.val_check_interval": (1, 100),
    "trainer.limit_val_batches": (0, 2),
    "trainer.gradient_clip_val": (None, 0.5),
    "optim.sched.name": ("LinearAnnealingWithWarmUp", "constant"),
    "optim.sched.min_lr": (0.0, 1.6e-4),
    "optim.sched.warmup_steps": (0, 20),
    "optim.eps": (1e-6,),
    "backend.nemo_version": ("2.7",),
    "backend.optim.name": ("fused_adam",),
    "backend.optim.constant_steps": (0, 10),
    "backend.megatron_amp_O2": (False, True),
    "backend.fp8": (True,),
    "backend.fp8_hybrid": (False,),
    "backend.virtual_pipeline_model_parallel_size": (1, 2),
    "backend.max_time": (None, 3600),
    "backend.transformer_engine": (False,),
    "hardware.accelerator_type": ("NVIDIA_H100_80GB", "NVIDIA_L4", None),
    "exp_manager.name": ("run", "val_loss_run", "mp_rank_00"),
    "exp_manager.ema.enable": (True,),
    "exp_manager.resume_if_exists": (False,),
    "exp_manager.create_mlflow_logger": (True,),
    "exp_manager.create_wandb_logger": (True,),
    "exp_manager.log_local_rank_0_only": (True,),
    f"{SAVING}.monitor": ("train_loss", "step"),
    f"{SAVING}.save_top_k": (-1, 0),
    f"{SAVING}.save_last": (False,),
    f"{SAVING}.every_n_train_steps": (5, 10),
    f"{SAVING}.train_time_interval": (600,),
    f"{SAVING}.always_save_nemo": (True,),
    f"{SAVING}.async_save": (True,),
    f"{SAVING}.filename": (
        "{name}--{step}",
        "{val_loss:.1e}-{step}-{consumed_samples}",
        "{step}-{consumed_samples:.0f}-{val_loss:.2f}",
        "{step}-{consumed_samples}",
        "{train_loss:.3f}-{step}-{consumed_samples}",
        "{train_loss:.2f}-{val_loss:.2f}-{step}-{consumed_samples}-last",
    ),
}


@st.composite
def changes(draw: st.DrawFn) -> dict[str, Any]:
    """Return sizes that mostly fit, and up to four other changes."""
    tensor, pipeline = draw(st.sampled_from([1, 1, 2, 4])), draw(st.sampled_from([1, 1, 2, 3]))
    nodes, devices = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([8, 8, 8, 6]))
    micro, accumulate = draw(st.integers(1, 2)), draw(st.integers(1, 4))
    replicas = max(1, nodes * devices // (tensor * pipeline))
    chosen = draw(st.sets(st.sampled_from(sorted(VALUES)), max_size=4))
    return {
        "hardware.num_nodes": nodes,
        "hardware.devices": devices,
        "model.num_layers": draw(st.sampled_from([12, 12, 4])),
        "parallelism.tensor_model_parallel_size": tensor,
        "parallelism.pipeline_model_parallel_size": pipeline,
        "data.micro_batch_size": micro,
        "data.global_batch_size": micro * replicas * accumulate + draw(st.sampled_from([0, 0, 0, 1])),
        **{key: draw(st.sampled_from(VALUES[key])) for key in sorted(chosen)},
    }


@pytest.fixture(scope="module")
def article(parsed: Parsed) -> dict[str, Any]:
    """Return the config of the article's run, with another hardware than Vertex AI's, as a tree."""
    return parsed("hardware=t4", "launcher=local", *SITE, "exp_manager.exp_dir=/runs").to_dict()


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changed=changes())
def test_what_preflight_lets_through_is_what_nemo_takes(changed: dict[str, Any], article: dict[str, Any]) -> None:
    tree = json.loads(json.dumps(article))
    for path, value in {**changed, "backend.script": "/opt/script.py"}.items():
        *sections, key = path.split(".")
        node = tree
        for section in sections:
            node = node[section]
        node[key] = value
    config = RunConfig.from_dict(tree)
    facts = Facts(built_backends=("nemo",), built_launchers=("local",))
    refused = {found.rule for found in check(config, make_plan(config), facts) if found.severity == "error"}
    found = list(problems(rendered(config), changed.get("backend.nemo_version", "1.23")))
    assert refused or not found, found


# Two runs with little in common with the article's.
LEGAL: list[tuple[str, ...]] = [
    (
        "model=gpt_5b",
        "hardware=h100",
        "backend=nemo",
        "backend.optim.constant_steps=0",
        "parallelism.tensor_model_parallel_size=4",
        "parallelism.pipeline_model_parallel_size=2",
        "parallelism.sequence_parallel=true",
        "hardware.num_nodes=2",
        "data.global_batch_size=64",
        "data.micro_batch_size=2",
        "backend.virtual_pipeline_model_parallel_size=3",
        "backend.fp8=true",
        "backend.ub_tp_comm_overlap=true",
        "trainer.recompute=selective",
        "trainer.max_steps=1000",
        "data.splits_string='90,5,5'",
        "exp_manager.checkpoint_callback_params.monitor=step",
        "exp_manager.checkpoint_callback_params.mode=max",
        "exp_manager.checkpoint_callback_params.every_n_train_steps=100",
    ),
    (
        "hardware=t4",
        "trainer.precision=16-mixed",
        "trainer.recompute=full",
        "trainer.max_steps=2000",
        "optim.sched.name=LinearAnnealingWithWarmUp",
        "backend.optim.constant_steps=0",
        "backend.transformer_engine=false",
        "backend.data_cache_dir=null",
        "exp_manager.create_early_stopping_callback=true",
        "exp_manager.early_stopping_callback_params.patience=3",
        "exp_manager.create_wandb_logger=true",
        "exp_manager.max_time_per_run=20:00:00",
        "backend.max_time=null",
    ),
]


@pytest.mark.parametrize("options", LEGAL)
def test_other_legal_runs_come_from_the_same_code(options: tuple[str, ...], parsed: Parsed) -> None:
    config = parsed(*options, *SITE)
    errors = [one for one in check(config, make_plan(config), FACTS) if one.severity == "error"]
    assert errors == []
    assert problems_of_text(job_of(config).files["nemo/config.yaml"]) == []


def test_torchrun_starts_nemos_own_script_with_the_file_of_the_attempt(parsed: Parsed) -> None:
    config = parsed(*ARTICLE, "backend.script=/opt/NeMo/examples/nlp/language_modeling/megatron_bert_pretraining.py")
    job, second = job_of(config), job_of(config, attempt=2)
    place = "/gcs/my-bucket/nemo-experiments/megatron_gpt/r1"
    assert (job.stage, job.launch, job.python, job.num_nodes, job.devices) == ("train", "torchrun", "python3", 4, 2)
    assert job.command == (
        "/opt/NeMo/examples/nlp/language_modeling/megatron_bert_pretraining.py",
        f"--config-path={place}/run/nemo",
        "--config-name=config-a{attempt}",
    )
    assert second.command[1] == f"--config-path={place}/run/nemo-a2"
    assert job.prepare == (
        "python3", "-I", "-S", f"{place}/run/worker.pyz", "nemo", place, "--stage", "train", "--attempt", "{attempt}",
    )  # fmt: skip
    assert (job.foreign, second.foreign) == ("nemo/settings.json", "nemo-a2/settings.json")
    assert set(second.files) == {"nemo-a2/config.yaml", "nemo-a2/settings.json"}
    assert JobSpec.from_json(job.to_json()) == job


def test_an_older_record_of_a_job_is_still_read(parsed: Parsed) -> None:
    tree = json.loads(job_of(parsed(*ARTICLE)).to_json())
    del tree["prepare"], tree["foreign"]
    job = JobSpec.from_json(json.dumps(tree))
    assert (job.prepare, job.foreign) == (None, None)


def test_nodes_are_told_what_they_must_know_beside_the_yaml(parsed: Parsed) -> None:
    told = json.loads(job_of(parsed(*ARTICLE, "launcher.debug=true")).files["nemo/settings.json"])
    prefix = "nemo-megatron-demo/training-data/tokenized/bpe2gpt/wikipedia/wikipedia-tokenized-for-gpt2"
    assert told["data"] == [
        {
            "from": f"/gcs/{prefix}",
            "to": "/ssd/.cache/wikipedia-tokenized-for-gpt2",
            "url": f"gs://{prefix}",
            "copy": "mount",
        }
    ]
    assert (told["schema_version"], told["nemo"], told["python"], told["debug"]) == (1, "1.23", "python3", True)
    assert (told["monitor"], told["checkpoint_name"]) == ("val_loss", "megatron_gpt--")
    assert (told["global_batch_size"], told["max_steps"]) == (256, 50)
    assert told["results"]["batch"]["accumulate_grad_batches"] == 8


@pytest.mark.parametrize(
    ("prefixes", "targets"),
    [
        ("[/d/a/text]", ["/ssd/.cache/text"]),
        ("[0.7, /d/a/text, 0.3, /d/b/code]", [0.7, "/ssd/.cache/text", 0.3, "/ssd/.cache/code"]),
        ("[0.7, /d/a/text, 0.3, /d/b/text]", [0.7, "/ssd/.cache/0/text", 0.3, "/ssd/.cache/1/text"]),
        ("[0.7, /d/a/text, 0.3, /d/a/text]", [0.7, "/ssd/.cache/text", 0.3, "/ssd/.cache/text"]),
    ],
)
def test_each_data_set_has_its_own_place_on_a_nodes_disk(prefixes: str, targets: list[object], parsed: Parsed) -> None:
    config = parsed(*ARTICLE, f"data.data_prefix={prefixes}")
    assert rendered(config)["model"]["data"]["data_prefix"] == targets
    told = json.loads(job_of(config).files["nemo/settings.json"])["data"]
    assert [one["to"] for one in told] == list(dict.fromkeys(part for part in targets if isinstance(part, str)))
    assert all(one["url"] is None for one in told)


def test_data_that_is_not_copied_is_read_where_it_is(parsed: Parsed) -> None:
    config = parsed(*ARTICLE, "backend.data_cache_dir=null", "data.data_prefix=[/gcs/b/text]")
    assert rendered(config)["model"]["data"]["data_prefix"] == ["/gcs/b/text"]
    assert json.loads(job_of(config).files["nemo/settings.json"])["data"] == []


@pytest.mark.parametrize(
    ("overrides", "present", "absent"),
    [
        ((), {}, {"CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_ALGO", "NCCL_GPUDIRECTTCPX_CTRL_DEV"}),
        (
            ("parallelism.tensor_model_parallel_size=2", "+launcher.env.NCCL_DEBUG=INFO"),
            {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_DEBUG": "INFO", "NCCL_SOCKET_IFNAME": "eth0"},
            {"NCCL_ALGO"},
        ),
        (("parallelism.context_parallel_size=2",), {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, set()),
    ],
)
def test_the_environment_is_the_machines_and_what_parallelism_needs(
    overrides: tuple[str, ...], present: dict[str, str], absent: set[str], parsed: Parsed
) -> None:
    env = job_of(parsed(*ARTICLE, *overrides)).env
    assert present.items() <= env.items()
    assert not absent & set(env)
    assert env["HYDRA_FULL_ERROR"] == "1"


# GKE tutorial nvidia-nemo-on-gke, "do not adjust", "tunable" and GPUDirect-TCPX; the article's list for T4 is the first
# two, of which plain TCP needs none.
A3 = {
    "NCCL_SOCKET_IFNAME": "eth0",
    "GLOO_SOCKET_IFNAME": "eth0",
    "OMP_NUM_THREADS": "12",
    "NCCL_CHECK_POINTERS": "0",
    "NCCL_DYNAMIC_CHUNK_SIZE": "524288",
    "NCCL_P2P_NET_CHUNKSIZE": "524288",
    "NCCL_P2P_PCI_CHUNKSIZE": "524288",
    "NCCL_P2P_NVL_CHUNKSIZE": "1048576",
    "NCCL_CROSS_NIC": "0",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_NET_GDR_LEVEL": "PIX",
    "NCCL_P2P_PXN_LEVEL": "0",
    "NCCL_DEBUG": "VERSION",
    "NCCL_MIN_NCHANNELS": "8",
    "NCCL_MAX_NCHANNELS": "8",
    "NCCL_SOCKET_NTHREADS": "1",
    "NCCL_NSOCKS_PERTHREAD": "4",
    "NCCL_GPUDIRECTTCPX_CTRL_DEV": "eth0",
    "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME": "eth1,eth2,eth3,eth4",
    "NCCL_GPUDIRECTTCPX_TX_BINDINGS": "eth1:8-21,112-125;eth2:8-21,112-125;eth3:60-73,164-177;eth4:60-73,164-177",
    "NCCL_GPUDIRECTTCPX_RX_BINDINGS": "eth1:22-35,126-139;eth2:22-35,126-139;eth3:74-87,178-191;eth4:74-87,178-191",
    "NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS": "1000000",
    "NCCL_GPUDIRECTTCPX_FORCE_ACK": "0",
    "NCCL_GPUDIRECTTCPX_TX_COMPLETION_NANOSLEEP": "1000",
}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), {}),
        (
            ("backend.max_time=3600", "exp_manager.create_early_stopping_callback=true"),
            {"max_time": 3600, "early_stopping": None},
        ),
        (("backend.max_time=3600", "exp_manager.max_time_per_run=60"), {"max_time_per_run": 60}),
    ],
)
def test_nodes_know_why_nemo_may_end_before_its_last_step(
    overrides: tuple[str, ...], expected: dict[str, float | None], parsed: Parsed
) -> None:
    config = parsed(*ARTICLE, "backend.max_time=null", *overrides)
    assert json.loads(job_of(config).files["nemo/settings.json"])["early_ends"] == expected


@pytest.mark.parametrize("backend", ["native", "nemo"])
def test_an_h100_brings_its_network_settings_to_every_backend(backend: str, parsed: Parsed) -> None:
    few = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_DEBUG", "OMP_NUM_THREADS"}
    for num_nodes, expected in ((2, set(A3)), (1, few & set(A3))):  # inside of a machine they would slow NVLink down
        config = parsed("hardware=h100", f"hardware.num_nodes={num_nodes}", f"backend={backend}", *SITE)
        (job,) = RENDERERS[backend](config, make_plan(config), run_id="r1", run_dir="/gcs/b/r1", attempt=1)
        assert {name: job.env[name] for name in job.env if name in A3} == {name: A3[name] for name in expected}
    assert set(parsed("hardware=t4").hardware.rank_env) == few


def test_lightning_is_told_of_torchrun_where_it_would_see_slurm(parsed: Parsed) -> None:
    config = parsed("hardware=t4", "launcher=slurm", "site.slurm.shared_dir=/fsx", *SITE)
    tree = rendered(config)
    assert tree["cluster_type"] == "BCP"
    assert tree["trainer"]["devices"] == 2  # a machine of the cluster may have more
    assert image_of(config) is None


def test_the_image_is_named_by_its_content(parsed: Parsed) -> None:
    first, same = image_of(parsed(*ARTICLE)), image_of(parsed(*ARTICLE, "seed=7", "trainer.max_steps=9"))
    other = image_of(parsed(*ARTICLE, "backend.base_image=nvcr.io/nvidia/nemo:24.05"))
    assert first is not None
    assert other is not None
    repository = "us-central1-docker.pkg.dev/my-project/container-image-repo/trainwright-nemo"
    assert first.rpartition(":")[0] == other.rpartition(":")[0] == repository
    assert first == same != other
    assert image_of(parsed(*ARTICLE, "backend.image=mine:1")) == "mine:1"
    assert dockerfile(parsed(*ARTICLE)).startswith("FROM nvcr.io/nvidia/nemo:24.03.01.framework\n")
    assert "trainwright" not in dockerfile(parsed(*ARTICLE))


def test_nemos_defaults_are_those_that_our_config_lists() -> None:
    ours = dict(leaves(yaml.safe_load((CONF / "exp_manager" / "default.yaml").read_text())))
    own = {"dry_run_dir", "resume_ignore_damaged"}
    assert set(ours) - own == set(EXP_MANAGER_DEFAULTS) | EXP_MANAGER_WRITTEN
    assert {key: ours[key] for key in EXP_MANAGER_DEFAULTS} == dict(EXP_MANAGER_DEFAULTS)
