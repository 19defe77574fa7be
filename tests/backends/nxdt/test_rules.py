"""The rules of NxDT: what breaks each, with what it tells, and the like of it that does not."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.backends.nxdt.test_render import FACTS, TANUKI
from tests.backends.rule_rows import Changes, findings
from trainwright.config import RunConfig
from trainwright.plan import make_plan
from trainwright.preflight import check, look
from trainwright.rules import RULES, nxdt

Parsed = Callable[..., RunConfig]
ROOT = Path(__file__).parents[3]
CALLBACK = "exp_manager.checkpoint_callback_params"
TENSOR, COPIES = "parallelism.tensor_model_parallel_size", "parallelism.kv_replicator"
TRN2 = {"hardware.machine": "trn2.48xlarge", "hardware.devices": 64, "hardware.lnc": 2}

# Rule, what breaks it, text that the finding holds, what does not break it.
ROWS: list[tuple[str, Changes, str, Changes]] = [
    (
        "nxdt-path",
        {"exp_manager.exp_dir": "/fsx/tanuki-v1"},
        "holds '-v', where NxDT cuts",
        {"exp_manager.exp_dir": "/fsx/v-1"},
    ),
    ("nxdt-path", {"exp_manager.name": "run-v2"}, "exp_manager.name: 'run-v2'", {"exp_manager.name": "run_v2"}),
    ("nxdt-path", {"run_id": "a-vb"}, "run_id: 'a-vb'", {"run_id": "a-b"}),
    (
        "nxdt-path",
        {f"{CALLBACK}.filename": "{name}-{val_loss:.2f}-{step}"},
        "such as {name}--{step}-{consumed_samples}",
        {f"{CALLBACK}.filename": "{name}_{val_loss:.2f}-{step}"},
    ),
    (
        "nxdt-path",
        {"backend.pretrained_dir": "/fsx/a-v0.1"},
        "backend.pretrained_dir",
        {"backend.model_dir": "/fsx/a-v0.1"},
    ),
    (
        "nxdt-path",
        {"exp_manager.resume_from_checkpoint": "/fsx/a-v0.1/x.ckpt"},
        "exp_manager.resume_from_checkpoint: '/fsx/a-v0.1/x.ckpt'",
        {"exp_manager.resume_from_checkpoint": "/fsx/a/x.ckpt"},
    ),
    ("nxdt-path", {"exp_manager.exp_dir": "/fsx/tp_rank"}, "holds 'tp_rank'", {"exp_manager.exp_dir": "/fsx/tp-rank"}),
    (
        "nxdt-heads",
        {TENSOR: 32, COPIES: 2},
        "tensor_model_parallel_size=16 or parallelism.kv_replicator=4",
        {TENSOR: 16, COPIES: 2},
    ),
    (
        "nxdt-heads",
        {"model.ffn_hidden_size": 14337},
        "does not divide model.ffn_hidden_size=14337",
        {"model.ffn_hidden_size": 32},
    ),
    ("nxdt-heads", TRN2, "which rank of a trn2 holds which head is unverified", {**TRN2, TENSOR: 8, COPIES: 1}),
    ("nxdt-parallel", {"parallelism.strategy": "fsdp"}, "use ddp", {"parallelism.strategy": "ddp"}),
    ("nxdt-parallel", {"parallelism.context_parallel_size": 2}, "ring attention", {}),
    ("nxdt-parallel", {"data.seq_length": 1000}, "data.seq_length=1000 is no multiple", {"data.seq_length": 1024}),
    (
        "nxdt-parallel",
        {"backend.virtual_pipeline_model_parallel_size": 2},
        "use 1, or a pipeline whose pieces divide the layers",
        {"backend.virtual_pipeline_model_parallel_size": 2, "parallelism.pipeline_model_parallel_size": 2},
    ),
    ("nxdt-devices", {"hardware.devices": 16}, "use 1, 2, 8, 32, 64, 128", {"hardware.devices": 128}),
    ("nxdt-seed", {"seed": 0}, "NxDT wants more than 0", {"seed": 1}),
    ("nxdt-tied", {"model.share_embeddings_and_output_weights": True}, "would train as two", {}),
    ("nxdt-name", {"name": "my_mixtral"}, "choose another name", {"name": "my_mistral"}),
    (
        "nxdt-data",
        {"data.train_path": "/fsx/a.arrow"},
        "reads .jsonl and .json only",
        {"data.train_path": "/fsx/a.JSON"},
    ),
    ("nxdt-data", {"data.tokenizer.type": "gpt2_bpe"}, "use huggingface", {}),
    (
        "nxdt-data",
        {"data.tokenizer.name": "someone/else"},
        "each rank would ask the hub for it",
        {"data.tokenizer.name": "/fsx/tokenizer"},
    ),
    (
        "nxdt-data",
        {"model.source": "someone/else"},
        "is neither model.source=someone/else",
        {"data.tokenizer.name": None},
    ),
    ("nxdt-data", {"data.kind": "gpt", "data.text": "shakespeare"}, "use data=tanuki_sft", {}),
    ("nxdt-source", {"model.source": None}, "model.source=null", {"model.source": "/fsx/models/mine"}),
    (
        "nxdt-other-run",
        {"exp_manager.resume_from_checkpoint": "/fsx/x.ckpt"},
        "counts on from the step of another run's checkpoint",
        {"backend.pretrained_dir": "/fsx/x"},
    ),
    ("nxdt-precision", {"trainer.precision": "16-mixed"}, "use bf16-mixed", {"trainer.precision": "32-true"}),
    (
        "nxdt-precision",
        {"trainer.precision": "bf16-true", "backend.precision": "autocast"},
        "backend.precision=autocast with trainer.precision=bf16-true",
        {"backend.precision": "autocast"},
    ),
    (
        "nxdt-precision",
        {"backend.zero1": False},
        "keeps no fp32 master weights",
        {"backend.zero1": False, "trainer.precision": "bf16-true"},
    ),
    ("nxdt-schedule", {"optim.sched.warmup_steps": 101}, "is never reached", {"optim.sched.warmup_steps": 100}),
    (
        "nxdt-schedule",
        {"optim.sched.min_lr": 1e-5},
        "ends at 0 and knows no other end",
        {"optim.sched.min_lr": 1e-5, "optim.sched.name": "CosineAnnealing"},
    ),
    ("nxdt-weight-decay", {"optim.weight_decay": 0.1}, "NxDT always takes 0.01", {"optim.weight_decay": 0.01}),
    ("nxdt-saves", {"exp_manager.create_checkpoint_callback": False}, "leaves nothing to export", {}),
    (
        "nxdt-saves",
        {"trainer.max_steps": 40},
        "saves nothing in",
        {"trainer.max_steps": 40, f"{CALLBACK}.save_last": True},
    ),
    ("nxdt-saves", {f"{CALLBACK}.save_top_k": 0}, "save_top_k=0", {f"{CALLBACK}.save_top_k": -1}),
    (
        "nxdt-saves",
        {f"{CALLBACK}.every_n_train_steps": None},
        "every_n_train_steps=500 saves nothing",
        {f"{CALLBACK}.every_n_train_steps": None, "trainer.val_check_interval": 100},
    ),
    ("nxdt-saves", {f"{CALLBACK}.train_time_interval": 60}, "of which Lightning takes one", {}),
    (
        "nxdt-saves",
        {f"{CALLBACK}.monitor": "val_loss"},
        "but trainer.limit_val_batches=0",
        {f"{CALLBACK}.monitor": "train_loss"},
    ),
    ("nxdt-saves", {f"{CALLBACK}.mode": "min"}, "keeps the oldest", {f"{CALLBACK}.mode": "max"}),
    ("nxdt-ranking", {"exp_manager.name": "a_step"}, "exp_manager.name=a_step holds 'step'", {"exp_manager.name": "a"}),
    (
        "nxdt-ranking",
        {"exp_manager.exp_dir": "/fsx/steps"},
        "behind which NeMo wants a number on a restart",
        {"exp_manager.exp_dir": "/fsx/steps", f"{CALLBACK}.save_top_k": -1},
    ),
    (
        "nxdt-ranking",
        {f"{CALLBACK}.filename": "{name}--{step}--{consumed_samples}"},
        "no plain number",
        {f"{CALLBACK}.filename": "{name}_{step}"},
    ),
    (
        "nxdt-ranking",
        {f"{CALLBACK}.monitor": "train_loss", f"{CALLBACK}.filename": "{step}-{train_loss:.1e}"},
        "what follows the first 'reduced_train_loss'",
        {f"{CALLBACK}.monitor": "train_loss", f"{CALLBACK}.filename": "{step}-{train_loss:.2f}"},
    ),
    ("nxdt-last-steps", {"trainer.max_steps": 120}, "the last 20 steps are lost", {"trainer.max_steps": 150}),
    ("nxdt-async", {f"{CALLBACK}.async_save": True}, "counts as incomplete until the next save", {}),
    (
        "nxdt-validation",
        {"trainer.limit_val_batches": 2, "trainer.val_check_interval": 50},
        "training stops for it",
        {"trainer.limit_val_batches": 2},
    ),
    ("nxdt-zero1", {"hardware.num_nodes": 2}, "look for optim/dp_rank_01_*", {}),
    (
        "nxdt-recompute",
        {"backend.activations_checkpoint_recompute": ["Attention"]},
        "Attention is no class of NxDT's",
        {"backend.activations_checkpoint_recompute": ["LlamaMLP"]},
    ),
    (
        "nxdt-recompute",
        {"backend.activations_checkpoint_recompute": []},
        "name what, or use none",
        {"backend.activations_checkpoint_recompute": [], "trainer.recompute": "full"},
    ),
    (
        "nxdt-cache",
        {"backend.compiler_cache_url": "/home/me/cache", "hardware.num_nodes": 2},
        "may not be the same on all nodes",
        {"backend.compiler_cache_url": "/home/me/cache"},
    ),
    (
        "nxdt-cache",
        {"backend.compiler_cache_url": "/var/tmp/cache"},
        "use an s3:// URL",
        {"backend.compiler_cache_url": "s3://b/c"},
    ),
    (
        "nxdt-env",
        {"launcher.env": {"NEURON_CC_FLAGS": "-O1"}},
        "launcher.env: NEURON_CC_FLAGS",
        {"launcher.env": {"A": "b"}},
    ),
    ("nxdt-env", {"launcher.env_from": ["COMPILE"]}, "launcher.env_from: COMPILE", {"launcher.env_from": ["HF_TOKEN"]}),
    ("nxdt-ema", {"exp_manager.ema.enable": True}, "and fails", {"exp_manager.ema.decay": 0.9}),
    ("nxdt-shared-dir", {"backend.model_dir": "/home/me/m"}, "is not below site.slurm.shared_dir=/fsx", {}),
    (
        "nxdt-shared-dir",
        {"exp_manager.resume_from_checkpoint": "/home/me/x.ckpt"},
        "exp_manager.resume_from_checkpoint=/home/me/x.ckpt is not below",
        {"exp_manager.resume_from_checkpoint": "/fsx/x.ckpt"},
    ),
    ("nxdt-dev-samples", {"backend.dev_choose_samples": 10}, "IndexError", {}),
    (
        "nxdt-sft",
        {"backend.packing": False},
        "records of data.seq_length tokens or more end the run",
        {"allow": ["nxdt-sft"]},
    ),
]


@pytest.fixture(scope="module")
def tanuki(parsed: Parsed) -> dict[str, Any]:
    """Return the config of tanuki_8b on trn1 as a tree."""
    return parsed(*TANUKI).to_dict()


@pytest.mark.parametrize(("rule", "broken", "told", "fitting"), ROWS)
def test_a_rule_finds_what_breaks_it_and_nothing_where_it_is_kept(
    rule: str, broken: Changes, told: str, fitting: Changes, tanuki: dict[str, Any]
) -> None:
    found = findings(tanuki, broken, FACTS)
    assert any(told in line for line in found[rule]), found
    assert rule not in findings(tanuki, fitting, FACTS)


def test_every_rule_of_nxdt_is_in_the_table() -> None:
    assert {rule.id for rule in nxdt.RULES} == {row[0] for row in ROWS}


def test_the_recipe_as_it_is_shipped_has_one_warning(parsed: Parsed) -> None:
    for hardware in ("trn1", "trn1n"):
        config = parsed("model=tanuki_8b", f"hardware={hardware}", *TANUKI[2:])
        found = check(config, make_plan(config), FACTS)
        assert [(one.rule, one.severity) for one in found] == [("nxdt-sft", "warning")]


def test_other_backends_and_architectures_are_not_judged(parsed: Parsed) -> None:
    for overrides in (("model=tanuki_8b", "hardware=h100"), ("model=gpt_5b", "hardware=trn1")):
        config = parsed(*overrides)
        assert not [one for one in check(config, make_plan(config), FACTS) if one.rule.startswith("nxdt-")]


def test_keys_of_nemo_that_nxdt_does_not_heed_are_named_once(tanuki: dict[str, Any]) -> None:
    ignored = {
        "exp_manager.create_early_stopping_callback": True,
        "trainer.limit_val_batches": 1,
        f"{CALLBACK}.prefix": "x",
    }
    (warning,) = findings(tanuki, ignored, FACTS)["idle-keys"]
    assert "exp_manager.create_early_stopping_callback=true, exp_manager.checkpoint_callback_params.prefix=x" in warning
    assert "idle-keys" not in findings(tanuki, {"exp_manager.log_local_rank_0_only": False}, FACTS)


def test_look_asks_for_what_a_chain_begins_with_not_for_what_it_fetches(parsed: Parsed, tmp_path: Path) -> None:
    site = (
        "model=tanuki_8b",
        "hardware=trn1",
        f"site.slurm.shared_dir={tmp_path}",
        "site.slurm.neuron_env=/home/me/env",
    )
    built = {"built_backends": ("nxdt",), "built_launchers": ("slurm",)}
    chain = look(parsed(*site, f"site.slurm.nxdt_dir={tmp_path}/nxdt"), **built)  # type: ignore[arg-type]
    assert chain.missing_files == {"backend.nxdt_dir": f"{tmp_path}/nxdt/examples/training_orchestrator.py"}
    local = ("data.train_source=null", f"data.val_source={tmp_path}/val.jsonl", f"model.source={tmp_path}/model")
    given = look(parsed(*site, "site.slurm.nxdt_dir=/home/me/nxdt", *local), **built)  # type: ignore[arg-type]
    assert given.missing_files == {
        "data.train_path": f"{tmp_path}/data/training.jsonl",
        "data.val_source": f"{tmp_path}/val.jsonl",
        "model.source": f"{tmp_path}/model/config.json",
    }


def test_the_comparison_names_every_rule_and_only_files_that_exist() -> None:
    text = (ROOT / "docs" / "compared.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(nxdt-[a-z0-9-]+)`", text)) == {rule.id for rule in nxdt.RULES}
    assert set(re.findall(r"[Rr]ules? `([a-z0-9-]+)`", text)) <= {rule.id for rule in RULES}
    files = re.findall(r"`([a-z_/0-9]+\.py)`", text)
    folders = (ROOT / "src" / "trainwright", ROOT / "tests", ROOT / "tests" / "backends" / "nxdt")
    assert [file for file in files if not any((folder / file).is_file() for folder in folders)] == []
