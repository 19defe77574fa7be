"""The fetch stage: model and data arrive, and a model that is not the config's ends the chain before it costs."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.backends.nxdt.runs import CONFIG, Record, tiny_model
from tests.fakes import HubServer, WebServer
from trainwright.backends.nxdt.fetch import main
from trainwright.backends.nxdt.model_config import differences, rope_theta, tokenizer_size
from trainwright.config import RunConfig
from trainwright.node import commit

LINES = b'{"input": "a", "output": "b"}\n'
PATHS = ("data.train_source=s3://bucket/training.jsonl", "data.val_source=s3://bucket/validation.jsonl")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in tiny_model(tmp_path / "made").iterdir()}


def test_model_and_data_are_fetched_once_for_all_runs(
    hub: HubServer,
    web: WebServer,
    files: dict[str, bytes],
    record: Record,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    sha = hub.publish("team/tiny", files)
    web.objects.update({"/bucket/training.jsonl": LINES * 9, "/bucket/validation.jsonl": LINES})
    run = record("model.source=team/tiny", *PATHS)
    assert run.stage(main) == 0
    metadata = commit.read_commit(tmp_path / "fsx" / "models" / "tanuki_8b")
    assert metadata is not None
    assert metadata["resolved"] == sha
    assert (tmp_path / "fsx" / "data" / "training.jsonl").read_bytes() == LINES * 9
    assert commit.read_commit(tmp_path / "fsx" / "data" / "validation.jsonl") is not None
    hub.requests.clear()
    web.requests.clear()
    capsys.readouterr()
    assert run.stage(main) == 0
    assert capsys.readouterr().out.count(" is there, from ") == 3
    assert hub.requests == web.requests == []


def test_what_is_wrong_with_model_and_data_is_told_together(
    hub: HubServer, web: WebServer, files: dict[str, bytes], record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.publish("team/tiny", files)
    run = record("model.source=team/tiny", *PATHS, "model.rope_theta=500000.0", "model.num_layers=3")
    assert run.stage(main) == 2
    told = capsys.readouterr().err.splitlines()
    assert [line for line in told if line.startswith("error: ")] == told[-4:]
    assert told[-4] == "error: data.train_source: s3://bucket/training.jsonl does not exist"
    assert "num_hidden_layers=2, but model.num_layers=3; set model.num_layers=2, or name another model" in told[-2]
    assert "rope_theta=10000.0, but model.rope_theta=500000.0; set model.rope_theta=10000.0" in told[-1]
    assert not any(path.startswith("/stored/") for _, path in hub.requests)  # no weights
    in_status = run.paths.rank_reason("fetch", 1, 0).read_text()
    assert in_status == "; ".join(line.removeprefix("error: ") for line in told[-4:]) + "\n"


def test_a_model_that_is_there_is_compared_at_each_run(
    record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model(tmp_path / "fsx" / "models" / "tanuki_8b")
    no_data = ("data.train_source=null", "data.val_source=null", "model.source=null")
    assert record(*no_data).stage(main) == 0
    (model / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 2}))
    assert record(*no_data).stage(main) == 2
    assert "has ids up to 3, but config.json's vocab_size=2 has rows up to 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, None),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}, None),
        ({"rope_theta": None}, None),  # the default of transformers
        ({"num_key_value_heads": None}, "num_key_value_heads=4, but model.num_query_groups=2"),
        ({"model_type": "mistral"}, 'model_type="mistral", but model.architecture="llama"'),
        ({"hidden_size": 32}, "hidden_size=32, but model.hidden_size=16; set model.hidden_size=32"),
        ({"intermediate_size": 9}, "intermediate_size=9, but model.ffn_hidden_size=8"),
        ({"num_attention_heads": 8}, "num_attention_heads=8, but model.num_attention_heads=4"),
        ({"vocab_size": 9}, "vocab_size=9, but model.vocab_size=8"),
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta=500000.0, but model.rope_theta"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06, but model.layernorm_epsilon=1e-05"),
        ({"tie_word_embeddings": True}, "but model.share_embeddings_and_output_weights=false"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "model.architecture=llama is LlamaForCausalLM"),
        ({"max_position_embeddings": 63}, "max_position_embeddings=63 is less than data.seq_length=64; use at most"),
    ],
)
def test_every_difference_is_told_with_both_values(
    changed: Mapping[str, Any], told: str | None, record: Record
) -> None:
    config: RunConfig = record().config
    found = {key: value for key, value in {**CONFIG, **changed}.items() if value is not None}
    lines = differences(found, config)
    assert (told is None and lines == []) or (told is not None and len(lines) == 1 and told in lines[0])


def test_rope_theta_is_found_where_either_version_of_transformers_writes_it() -> None:
    assert rope_theta({"rope_theta": 1.0}) == 1.0
    assert rope_theta({"rope_parameters": {"rope_theta": 2.0}}) == 2.0
    assert rope_theta({"rope_scaling": {"type": "linear"}}) == 10000.0


@pytest.mark.parametrize(
    ("tree", "size"),
    [
        ({"model": {"vocab": {"a": 0, "b": 4}}, "added_tokens": [{"id": 9}]}, 10),
        ({"model": {"vocab": [["a", 0.1], ["b", 0.2]]}}, 2),  # Unigram
        ({"model": {}}, None),
    ],
)
def test_the_entries_of_a_tokenizer_are_counted_by_their_largest_id(
    tree: Mapping[str, Any], size: int | None, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    assert tokenizer_size(tmp_path) == size


def test_an_interpreter_without_the_packages_is_told_which_extra_brings_them() -> None:
    program = (
        "import runpy, sys; sys.modules.update({'transformers': None, 'huggingface_hub': None})\n"
        "runpy.run_module('trainwright.backends.nxdt.fetch', run_name='__main__')"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.endswith("lacks huggingface_hub, transformers; pip install 'trainwright[nxdt]' there\n")


def test_a_stage_that_is_told_to_stop_ends_as_preempted(record: Record) -> None:
    program = (
        "import os, signal, sys; from trainwright.backends.nxdt.stage import run_stage\n"
        "run_stage(lambda config, paths: os.kill(os.getpid(), signal.SIGUSR1), 'fetch', sys.argv[1:])"
    )
    command = [sys.executable, "-c", program, str(record().paths.run_dir)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (
        75,
        "stopped by SIGUSR1; started again, the stage goes on with what is whole\n",
    )
