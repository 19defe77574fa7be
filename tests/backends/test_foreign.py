"""The part of results.json that follows from the config."""

import json
from collections.abc import Callable

import pytest

from trainwright.backends.foreign import results_constants
from trainwright.config import RunConfig
from trainwright.plan import make_plan, train_flops_per_token

Parsed = Callable[..., RunConfig]


@pytest.mark.parametrize(
    ("overrides", "parameters", "batch", "max_steps"),
    [
        (("model=tanuki_8b", "hardware=trn1"), 7_512_264_704, (1, 8, 8, 32, 1), 100),
        (("hardware=t4",), 13_733_632, (4, 256, 8, 8, 8), 50),
    ],
)
def test_constants_are_the_plans(
    overrides: tuple[str, ...], parameters: int, batch: tuple[int, ...], max_steps: int, parsed: Parsed
) -> None:
    config = parsed(*overrides)
    plan = make_plan(config)
    constants = results_constants(config, plan)
    assert json.loads(json.dumps(constants)) == constants
    assert constants["model"] == {"name": config.model.name, "parameters": parameters}
    assert tuple(constants["batch"].values()) == batch
    assert (constants["max_steps"], constants["seq_length"]) == (max_steps, config.data.seq_length)
    assert constants["flops_per_token"] == train_flops_per_token(
        config.model, config.data.seq_length, plan.padded_vocab_size
    )
    assert constants["peak_tflops"] == config.hardware.peak_tflops


def test_data_are_named_as_the_config_does(parsed: Parsed) -> None:
    config = parsed("data.text=null", "data.data_prefix=[0.7,/a/one,0.3,/a/two]", "data.splits_string='8,1,1'")
    data = results_constants(config, make_plan(config))["data"]
    assert (data["prefixes"], data["splits_string"], data["train_path"]) == (["/a/one", "/a/two"], "8,1,1", None)
    config = parsed("model=tanuki_8b", "hardware=trn1")
    data = results_constants(config, make_plan(config))["data"]
    assert (data["train_path"], data["val_path"]) == (config.data.train_path, config.data.val_path)
