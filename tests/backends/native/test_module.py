"""The networks and their loss."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from tests.backends.native.runs import MakeConfig
from trainwright.backends.native.module import Pretraining, build_network, decay_groups, token_loss
from trainwright.config import RunConfig
from trainwright.errors import UserError
from trainwright.plan import make_plan


@pytest.mark.parametrize(("model", "parameters"), [("gpt_small", 13_733_632), ("llama_tiny", None)])
def test_a_network_has_exactly_the_planned_parameters(
    parsed: Callable[..., RunConfig], model: str, parameters: int | None
) -> None:
    config = parsed(f"model={model}")
    counted = sum(weight.numel() for weight in Pretraining(config).parameters())
    assert counted == make_plan(config).num_parameters
    assert parameters in (None, counted)


@pytest.mark.parametrize("rows", [7, 512, 700])
def test_the_loss_equals_plain_cross_entropy(rows: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(rows, 16, requires_grad=True)
    table = torch.randn(96, 16, requires_grad=True)
    labels = torch.randint(0, 96, (rows,))
    loss = token_loss(hidden, table, labels)
    plain = F.cross_entropy(F.linear(hidden, table), labels)
    assert loss.item() == pytest.approx(plain.item(), rel=1e-5)
    for ours, reference in zip(
        torch.autograd.grad(loss, (hidden, table)), torch.autograd.grad(plain, (hidden, table)), strict=True
    ):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-7)


def test_initial_weights_have_the_configured_spread_and_follow_the_seed(make_config: MakeConfig) -> None:
    config = make_config(model__init_method_std=0.05)
    networks = []
    for _ in range(2):
        torch.manual_seed(3)
        networks.append(build_network(config.model, 512))
    table, again = (network.get_input_embeddings().weight for network in networks)
    assert table.std().item() == pytest.approx(0.05, rel=0.05)  # 16,384 draws: 0.6 % standard error
    assert torch.equal(table, again)


def test_biases_and_norms_do_not_decay(make_config: MakeConfig) -> None:
    network = build_network(make_config(model__architecture="gpt2", model__num_query_groups=None).model, 512)
    names = {weight: name for name, weight in network.named_parameters()}
    decayed, kept = (
        [names[weight] for weight in group["params"]] for group in decay_groups(network.named_parameters(), 0.1)
    )
    assert "transformer.h.0.attn.c_attn.weight" in decayed
    assert "transformer.wte.weight" in decayed
    assert {"transformer.ln_f.weight", "transformer.h.0.attn.c_attn.bias"} <= set(kept)
    assert len(decayed) + len(kept) == len(names)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__architecture": "bert"}, "architecture=bert"),
        ({"model__hidden_dropout": 0.1}, "model.hidden_dropout=0.1"),
        ({"model__architecture": "gpt2"}, "model.num_query_groups=2"),
    ],
)
def test_what_an_architecture_lacks_is_refused(
    make_config: MakeConfig, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        build_network(make_config(**changes).model, 512)
