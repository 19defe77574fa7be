"""Tiny runs: a data set that a model learns from within steps, and configs of models that train in milliseconds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.backends.native import ranks
from tests.backends.native.runs import MakeConfig
from trainwright.config import RunConfig
from trainwright.dataset.indexed import IndexedWriter

VOCAB_SIZE = 500  # padded to 512


@pytest.fixture(scope="session", autouse=True)
def _rank_server() -> None:
    """Import torch and Lightning once for all ranks of all tests, beside the first tests."""
    ranks.start_server()


@pytest.fixture(scope="session")
def token_prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sequences that mostly count upwards, so that a loss falls from the first steps on."""
    prefix = tmp_path_factory.mktemp("tokens") / "text"
    random = np.random.RandomState(0)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(200):
            noise = random.randint(0, 3, size=100)
            writer.add_sequence((random.randint(0, VOCAB_SIZE) + np.cumsum(noise)) % VOCAB_SIZE)
            writer.end_document()
    return prefix


@pytest.fixture(scope="session")
def _tree(parsed: Callable[..., RunConfig], token_prefix: Path) -> dict[str, Any]:
    changes = {
        "model.vocab_size": VOCAB_SIZE,
        "model.hidden_size": 32,
        "model.ffn_hidden_size": 48,
        "data.text": None,
        "data.data_prefix": [str(token_prefix)],
        "data.splits_string": "90,10,0",
        "data.seq_length": 32,
        "data.micro_batch_size": 2,
        "data.global_batch_size": 4,
        "optim.lr": 1e-2,
        "optim.sched.warmup_steps": 2,
        "optim.sched.min_lr": 1e-3,
        "trainer.max_steps": 8,
        "trainer.val_check_interval": 4,
        "trainer.limit_val_batches": 2,
        "trainer.num_threads": 1,  # two ranks and one process then add up in the same order
    }
    return _changed(parsed("model=llama_tiny").to_dict(), changes)


@pytest.fixture
def make_config(_tree: dict[str, Any]) -> MakeConfig:
    """Return a function that gives the tiny run with changes, written with __ for the dots of a key."""

    def make(**changes: Any) -> RunConfig:
        return RunConfig.from_dict(_changed(_tree, {key.replace("__", "."): changes[key] for key in changes}))

    return make


def _changed(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    copy: dict[str, Any] = json.loads(json.dumps(tree))
    for key, value in changes.items():
        *sections, leaf = key.split(".")
        section = copy
        for name in sections:
            section = section[name]
        assert leaf in section, key
        section[leaf] = value
    return copy
