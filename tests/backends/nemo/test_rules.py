"""The rules of NeMo: what breaks each, with what it tells, and the like of it that does not."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.backends.nemo.test_render import ARTICLE, FACTS, GPT_5B_RUN
from tests.backends.rule_rows import Changes, findings
from trainwright.config import RunConfig
from trainwright.plan import make_plan
from trainwright.preflight import check
from trainwright.registry import changed_keys
from trainwright.rules import RULES, nemo

Parsed = Callable[..., RunConfig]
ROOT = Path(__file__).parents[3]
SAVING = "exp_manager.checkpoint_callback_params"
TENSOR, PIPELINE = "parallelism.tensor_model_parallel_size", "parallelism.pipeline_model_parallel_size"
H100 = {"hardware.accelerator_type": "NVIDIA_H100_80GB", "hardware.devices": 8}
ONE_NODE = {"hardware.num_nodes": 1}

# Rule, what breaks it, text that the finding holds, what does not break it.
ROWS: list[tuple[str, Changes, str, Changes]] = [
    (
        "nemo-data",
        {"data.text": "shakespeare", "data.data_prefix": None},
        "make one by `trainwright data build`",
        {"data.data_prefix": ["/gcs/b/one"]},
    ),
    ("nemo-data", {"data.shuffle_tokens": True}, "data.shuffle_tokens=true is native's", {}),
    (
        "nemo-data",
        {"model.vocab_size": 50_300},
        "but NeMo takes the tokenizer's data.tokenizer.vocab_size=50257",
        {"model.vocab_size": 50_300, "data.tokenizer.vocab_size": 50_300},
    ),
    (
        "nemo-data",
        {"data.splits_string": "100,0,0"},
        "has no validation part",
        {"data.splits_string": "100", "trainer.limit_val_batches": 0},
    ),
    ("nemo-data", {"data.tokenizer.type": "bert_wordpiece"}, "is of BERT", {"data.tokenizer.type": "huggingface"}),
    ("nemo-source", {"model.source": "me/gpt"}, "begins with random weights", {"model.revision": "main"}),
    (
        "nemo-data-copy",
        {"backend.data_copy": "rsync", "data.data_prefix": ["/d/x"]},
        "/d/x is in no bucket",
        {"backend.data_copy": "rsync"},
    ),
    (
        "nemo-data-copy",
        {"backend.data_cache_dir": "/gcs/b/cache"},
        "is in a bucket, no disk of a node",
        {"backend.data_cache_dir": "/mnt/cache"},
    ),
    (
        "nemo-index-mapping",
        {"data.index_mapping_dir": None},
        "on the disk of one of 4 nodes",
        {"data.index_mapping_dir": None, **ONE_NODE},
    ),
    (
        "nemo-index-mapping",
        {"data.index_mapping_dir": "/ssd/.cache"},
        "data.index_mapping_dir=/ssd/.cache is not below /gcs",
        {"data.index_mapping_dir": None, "backend.data_cache_dir": None},
    ),
    (
        "nemo-filename",
        {f"{SAVING}.filename": "{name}--{val_loss:.2f}-{step}"},
        "put {consumed_samples} into it",
        {f"{SAVING}.filename": "{val_loss:.3f}-{step}-{consumed_samples}"},
    ),
    (
        "nemo-filename",
        {f"{SAVING}.filename": "{val_loss:.2f}-{step}-{consumed_samples:.0f}"},
        "or begins the data anew",
        {f"{SAVING}.filename": "{val_loss:.2f}-{step}-{consumed_samples:.1f}"},
    ),
    (
        "nemo-own-resume",
        {f"{SAVING}.filename": "{val_loss:.2e}-{step}-{consumed_samples}"},
        "has no val_loss, or not as digits",
        {f"{SAVING}.filename": "{val_loss:.2e}-{step}-{consumed_samples}", f"{SAVING}.save_top_k": -1},
    ),
    (
        "nemo-own-resume",
        {f"{SAVING}.filename": "{step}-{consumed_samples}"},
        "put {val_loss:.2f} into it",
        {f"{SAVING}.filename": "{step}-{consumed_samples}", f"{SAVING}.monitor": "step"},
    ),
    (
        "nemo-filename",
        {f"{SAVING}.filename": "{val_loss:.2f}-{step}-{consumed_samples}-last"},
        "is taken for a newest",
        {f"{SAVING}.filename": "last-{val_loss:.2f}-{step}-{consumed_samples}"},
    ),
    ("nemo-filename", {f"{SAVING}.auto_insert_metric_name": False}, "looks for consumed_samples= in names", {}),
    (
        "nemo-own-resume",
        {"exp_manager.name": "val_loss_study"},
        "it reads the value of val_loss in exp_manager.name=val_loss_study",
        {"exp_manager.name": "val_loss_study", f"{SAVING}.save_top_k": -1},
    ),
    (
        "nemo-own-resume",
        {"exp_manager.exp_dir": "/gcs/b/reduced_train_loss", f"{SAVING}.monitor": "train_loss"},
        "it reads the value of reduced_train_loss",
        {"exp_manager.exp_dir": "/gcs/b/reduced_train_loss"},
    ),
    ("nemo-path", {"run_id": "tp_rank_00"}, "run_id: 'tp_rank_00' holds 'tp_rank_'", {"run_id": "tp-rank"}),
    (
        "nemo-own-resume",
        {f"{SAVING}.filename": "val_loss-{val_loss:.2f}-{step}-{consumed_samples}"},
        "where it reads what follows the first 'val_loss'",
        {f"{SAVING}.filename": "{val_loss:.2f}-val_loss-{step}-{consumed_samples}"},
    ),
    (
        "nemo-own-resume",
        {f"{SAVING}.save_top_k": 0},
        "fails to resume: exp_manager.checkpoint_callback_params.save_top_k=0",
        {f"{SAVING}.save_top_k": 0, "exp_manager.resume_if_exists": False},
    ),
    ("nemo-rarely-saves", {f"{SAVING}.save_last": False}, "goes back to the newest of the best", {}),
    (
        "nemo-path",
        {"exp_manager.exp_dir": "/gcs/b/consumed_samples=0"},
        "holds 'consumed_samples='",
        {"exp_manager.exp_dir": "/gcs/b/consumed_samples"},
    ),
    ("nemo-saves", {f"{SAVING}.dirpath": "/gcs/b/c"}, "use dirpath=null", {f"{SAVING}.prefix": "p"}),
    ("nemo-saves", {f"{SAVING}.filepath": "/gcs/b/c"}, "use filepath=null", {f"{SAVING}.postfix": ".nemo"}),
    ("nemo-saves", {f"{SAVING}.train_time_interval": 600}, "hands Lightning a text", {}),
    (
        "nemo-saves",
        {f"{SAVING}.always_save_nemo": True, TENSOR: 2},
        "is not for models in parts",
        {f"{SAVING}.always_save_nemo": True},
    ),
    (
        "nemo-saves",
        {f"{SAVING}.async_save": True, "exp_manager.ema.enable": True, "backend.nemo_version": "2.7"},
        "which NeMo refuses",
        {f"{SAVING}.async_save": True, "backend.nemo_version": "2.7"},
    ),
    (
        "nemo-validation",
        {"trainer.val_check_interval": 51},
        "NeMo would never validate; use",
        {"trainer.val_check_interval": 50},
    ),
    (
        "nemo-validation",
        {"trainer.val_check_interval": 401, "trainer.limit_val_batches": 0},
        "Lightning refuses more than its 400 micro-batches",
        {"trainer.val_check_interval": 400, "trainer.limit_val_batches": 0},
    ),
    ("nemo-precision", {"trainer.precision": "bf16-true"}, "use bf16-mixed", {}),
    (
        "nemo-precision",
        {"trainer.precision": "32-true", "backend.megatron_amp_O2": True},
        "use trainer.precision=bf16-mixed, or backend.megatron_amp_O2=false",
        {"trainer.precision": "32-true"},
    ),
    (
        "nemo-precision",
        {"trainer.precision": "16-mixed", "backend.optim.name": "fused_adam"},
        "use distributed_fused_adam",
        {"trainer.precision": "16-mixed"},
    ),
    (
        "nemo-fp8",
        {"backend.fp8": True},
        "on NVIDIA_TESLA_T4, which computes in no 8-bit type",
        {"backend.fp8": True, **H100},
    ),
    (
        "nemo-fp8",
        {"backend.fp8": True, "backend.transformer_engine": False, **H100},
        "which alone does it",
        {"backend.transformer_engine": False},
    ),
    (
        "nemo-fp8",
        {"backend.fp8": True, "backend.fp8_hybrid": False, **H100},
        "use backend.fp8_hybrid=true",
        {"backend.fp8": True, "backend.fp8_hybrid": False, "backend.fp8_e4m3": True, **H100},
    ),
    ("nemo-parallel", {"parallelism.strategy": "fsdp"}, "distributed_fused_adam shards optimizer state", {}),
    (
        "nemo-parallel",
        {TENSOR: 2, "model.num_query_groups": 1},
        "does not divide model.num_query_groups=1",
        {TENSOR: 2, "model.num_query_groups": 2},
    ),
    ("nemo-parallel", {TENSOR: 4, "model.ffn_hidden_size": 1022}, "model.ffn_hidden_size=1022", {TENSOR: 4}),
    (
        "nemo-parallel",
        {TENSOR: 4, "parallelism.sequence_parallel": True, "data.seq_length": 254},
        "does not divide data.seq_length=254",
        {TENSOR: 4, "data.seq_length": 254},
    ),
    (
        "nemo-parallel",
        {"parallelism.context_parallel_size": 2, "data.seq_length": 254},
        "use a multiple of 4",
        {"parallelism.context_parallel_size": 2},
    ),
    (
        "nemo-parallel",
        {"parallelism.context_parallel_size": 2, "backend.transformer_engine": False},
        "needs backend.transformer_engine=true",
        {},
    ),
    (
        "nemo-parallel",
        {"backend.virtual_pipeline_model_parallel_size": 2},
        "or a pipeline whose pieces divide the layers",
        {"backend.virtual_pipeline_model_parallel_size": 1},
    ),
    (
        "nemo-parallel",
        {
            "backend.virtual_pipeline_model_parallel_size": 2,
            PIPELINE: 2,
            "model.num_layers": 4,
            "backend.megatron_amp_O2": False,
        },
        "needs backend.megatron_amp_O2=true",
        {"backend.virtual_pipeline_model_parallel_size": 2, PIPELINE: 2, "model.num_layers": 4},
    ),
    (
        "nemo-schedule",
        {"trainer.max_steps": 500},
        "the learning rate falls from its peak at once",
        {"trainer.max_steps": 500, "backend.optim.constant_steps": 300},
    ),
    (
        "nemo-schedule",
        {"optim.sched.min_lr": 1.6e-4},
        "is not below optim.lr=0.00016",
        {"optim.sched.min_lr": 1.6e-4, "backend.optim.constant_steps": 0},
    ),
    (
        "nemo-schedule",
        {"optim.sched.name": "constant"},
        "use constant_steps=0",
        {"optim.sched.name": "constant", "backend.optim.constant_steps": 0},
    ),
    ("nemo-ema", {"exp_manager.ema.enable": True}, "cannot resume", {"exp_manager.ema.decay": 0.9}),
    ("nemo-seed", {"seed": 0}, "Megatron wants more than 0", {"seed": 1}),
    (
        "nemo-files",
        {"exp_manager.files_to_copy": ["/home/me/x.yaml"]},
        "/home/me/x.yaml is not below /gcs",
        {"exp_manager.files_to_copy": ["/gcs/b/x.yaml"]},
    ),
    (
        "nemo-profile",
        {"backend.nsys_profile.enabled": True, "backend.nsys_profile.ranks": [0, 8]},
        "ranks that exist",
        {"backend.nsys_profile.enabled": True, "backend.nsys_profile.ranks": [0, 7]},
    ),
    (
        "nemo-version",
        {"backend.nemo_version": "2.7"},
        "use backend.nemo_version=1.23",
        {"backend.nemo_version": "2.7", "backend.script": "/opt/mine.py"},
    ),
    (
        "nemo-uncached",
        {"backend.data_cache_dir": None},
        "samples are read at random from /gcs/nemo-megatron-demo",
        {"backend.data_cache_dir": None, "data.data_prefix": ["/mnt/x"]},
    ),
    (
        "nemo-rarely-saves",
        {"trainer.limit_val_batches": 0},
        "only at the end, at step 50",
        {"trainer.limit_val_batches": 0, f"{SAVING}.every_n_train_steps": 10, f"{SAVING}.monitor": "train_loss"},
    ),
    (
        "nemo-rarely-saves",
        {f"{SAVING}.every_n_train_steps": 15},
        "bear the val_loss of an earlier step",
        {f"{SAVING}.every_n_train_steps": 20},
    ),
    (
        "nemo-rarely-saves",
        {f"{SAVING}.monitor": "step"},
        "keeps the oldest",
        {f"{SAVING}.monitor": "step", f"{SAVING}.mode": "max"},
    ),
    ("nemo-rarely-saves", {"exp_manager.create_checkpoint_callback": False}, "begins again", {}),
    ("nemo-warm-up", {}, "the learning rate ends at 7e-05", {"optim.sched.warmup_steps": 50}),
    (
        "nemo-max-time",
        {"exp_manager.max_time_per_run": 3600},
        "is put aside by exp_manager.max_time_per_run=3600 s",
        {"exp_manager.max_time_per_run": 3600, "backend.max_time": None},
    ),
    ("nemo-idle", {"trainer.num_threads": 4}, "use launcher.env.OMP_NUM_THREADS", {}),
    (
        "nemo-idle",
        {"parallelism.sequence_parallel": True},
        "or a larger parallelism.tensor_model_parallel_size",
        {"parallelism.sequence_parallel": True, TENSOR: 2},
    ),
    ("nemo-idle", {"backend.ub_tp_comm_overlap": True}, "use parallelism.sequence_parallel=true", {}),
    ("nemo-idle", {"backend.overlap_p2p_comm": True}, "use backend.virtual_pipeline_model_parallel_size", {}),
    ("nemo-idle", {"parallelism.kv_replicator": 2}, "parallelism.kv_replicator=2 does nothing in NeMo here", {}),
    ("nemo-idle", {"data.seq_length": 128}, "it has data.seq_length=128 positions", {}),
]


@pytest.fixture(scope="module")
def article(parsed: Parsed) -> dict[str, Any]:
    """Return the config of the first article's run as a tree."""
    return parsed(*ARTICLE).to_dict()


@pytest.mark.parametrize(("rule", "broken", "told", "fitting"), ROWS)
def test_a_rule_finds_what_breaks_it_and_nothing_where_it_is_kept(
    rule: str, broken: Changes, told: str, fitting: Changes, article: dict[str, Any]
) -> None:
    found = findings(article, broken, FACTS)
    assert any(told in line for line in found[rule]), found
    assert rule not in findings(article, fitting, FACTS)


def test_every_rule_of_nemo_is_in_the_table() -> None:
    assert {rule.id for rule in nemo.RULES} == {row[0] for row in ROWS}


def test_other_backends_and_architectures_are_not_judged(parsed: Parsed) -> None:
    for overrides in (("hardware=h100",), ("model=llama_tiny", "hardware=t4")):
        config = parsed(*overrides)
        assert not [one for one in check(config, make_plan(config), FACTS) if one.rule.startswith("nemo-")]


def test_keys_that_this_version_of_nemo_does_not_know_are_named_once(article: dict[str, Any]) -> None:
    changed = {
        "exp_manager.log_delta_step_timing": True,
        f"{SAVING}.async_save": True,
        "exp_manager.log_local_rank_0_only": True,
    }
    (warning,) = findings(article, changed, FACTS)["idle-keys"]
    assert "exp_manager.log_delta_step_timing=true, exp_manager.checkpoint_callback_params.async_save=true" in warning
    newer = {**changed, "backend.nemo_version": "2.7", "backend.script": "/opt/mine.py"}
    assert "idle-keys" not in findings(article, newer, FACTS)


def test_bfloat16_and_transformer_engine_on_a_t4_are_one_warning(article: dict[str, Any]) -> None:
    (warning,) = findings(article, {}, FACTS)["bf16-on-t4"]
    assert "trainer.precision=bf16-mixed and backend.transformer_engine=true on NVIDIA_TESLA_T4" in warning
    (warning,) = findings(article, {"trainer.precision": "16-mixed"}, FACTS)["bf16-on-t4"]
    assert warning.endswith("use backend.transformer_engine=false, or allow=[bf16-on-t4]")
    assert "bf16-on-t4" not in findings(article, {**H100}, FACTS)


def test_the_optimizer_state_of_a_5b_model_fits_because_it_is_spread(parsed: Parsed) -> None:
    spread, whole = (
        make_plan(parsed(*GPT_5B_RUN, f"backend.optim.name={name}"))
        for name in ("distributed_fused_adam", "fused_adam")
    )
    assert whole.state_bytes == 18 * whole.num_parameters
    assert spread.state_bytes == 6 * spread.num_parameters + 12 * spread.num_parameters // 8


def test_a_resume_may_have_another_image_disk_and_limit_but_not_train_otherwise(article: dict[str, Any]) -> None:
    longer = json.loads(json.dumps(article))
    longer["backend"].update(max_time=None, image="mine:2", data_cache_dir="/mnt/disk", data_copy="rsync")
    assert changed_keys(article, longer) == ()
    longer["backend"]["optim"]["constant_steps"] = 0
    assert changed_keys(article, longer) == ("backend.optim.constant_steps: 12500 -> 0",)


def test_the_comparison_names_every_rule_of_nemo() -> None:
    text = (ROOT / "docs" / "compared.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(nemo-[a-z0-9-]+)`", text)) == {rule.id for rule in nemo.RULES}
    assert set(re.findall(r"[Rr]ules? `([a-z0-9-]+)`", text)) <= {rule.id for rule in RULES}
