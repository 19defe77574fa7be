"""The model, its loss and its optimizer: a transformers architecture with random weights inside a LightningModule."""

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F  # noqa: N812, torch's own convention
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from trainwright.backends.native.ema import AveragedWeights
from trainwright.backends.native.schedule import lr_at
from trainwright.config import Model, Precision, RunConfig
from trainwright.errors import UserError
from trainwright.plan import padded_vocab_size

# Rows of the logits held at once. 256 to 1024 measure the same within noise, 128 is slower (2026-11-29, 2 cores, 50,304
# entries); torch's own choice, options without a size, was ten times slower.
_LOSS_CHUNK_ROWS = 512


def build_network(model: Model, vocab_size: int) -> PreTrainedModel:
    """Return the transformers network that `model` describes, with random weights from torch's current seed.

    `vocab_size` is that of the table, padding included. Raises UserError for what transformers cannot express.
    """
    if model.architecture == "gpt2":
        return GPT2LMHeadModel(_gpt2_config(model, vocab_size))
    if model.architecture == "llama":
        return LlamaForCausalLM(_llama_config(model, vocab_size))
    raise UserError(f"model.architecture={model.architecture} cannot be trained by backend=native; use gpt2 or llama")


def token_loss(hidden: Tensor, table: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy of `labels` [tokens] under the logits hidden [tokens, width] @ table.T.

    On a CPU the logits exist only in chunks: the same value, a fifth faster and in half the memory at 50,304 entries.
    """
    if hidden.device.type == "cpu" and hidden.dtype == torch.float32 and hasattr(F, "linear_cross_entropy"):
        options = nn.LinearCrossEntropyOptions(batch_chunk_size=_LOSS_CHUNK_ROWS)
        return F.linear_cross_entropy(hidden, table, labels, options=options)
    return F.cross_entropy(F.linear(hidden, table).float(), labels)


class LanguageModel(nn.Module):
    """A network with its loss: all use of its weights lies inside one forward, where sharding can gather them."""

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of predicting `labels` from `tokens`, both [samples, seq_length]."""
        hidden = self.network.base_model(input_ids=tokens, use_cache=False).last_hidden_state
        table = self.network.lm_head.weight
        return token_loss(hidden.flatten(0, 1), table, labels.flatten())


def shard(model: LanguageModel, mesh: DeviceMesh, precision: Precision) -> None:
    """Share the parameters of `model` out over `mesh` in place: block by block, and the rest at the root."""
    # In mixed precision, weights travel and are used in bfloat16; gradients are added up in float32.
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = mixed if precision == "bf16-mixed" else MixedPrecisionPolicy()
    network = model.network
    blocks = network.transformer.h if isinstance(network, GPT2LMHeadModel) else network.model.layers
    assert isinstance(blocks, nn.ModuleList)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


class Pretraining(pl.LightningModule):
    """Next-token training. It holds what the step boundary reports of a step: losses, gradient norm, learning rate."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.config = config
        self.net = LanguageModel(build_network(config.model, padded_vocab_size(config)))
        if config.trainer.recompute == "full":
            self.net.network.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[no-untyped-call]
        self.micro_losses: list[Tensor] = []
        self.grad_norm = torch.tensor(0.0)
        self.lr = 0.0

    def configure_model(self) -> None:
        """Shard the model where the strategy has a mesh of devices for it."""
        if self.device_mesh is not None and not isinstance(self.net, FSDPModule):
            shard(self.net, self.device_mesh["data_parallel"], self.config.trainer.precision)

    @cached_property
    def average(self) -> AveragedWeights | None:
        """The average of the weights, if the run keeps one; made once they are where, and cut as, they are trained."""
        ema = self.config.exp_manager.ema
        return AveragedWeights(self.net.network, ema) if ema.enable else None

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss: Tensor = self.net(*batch)
        self.micro_losses.append(loss.detach())
        return loss

    def take_step_loss(self) -> Tensor:
        """Return this rank's mean loss since the last call, in double precision, and forget it."""
        loss = torch.stack(self.micro_losses).double().mean()
        self.micro_losses.clear()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optim, precision = self.config.optim, self.config.trainer.precision
        return torch.optim.AdamW(
            decay_groups(self.net.named_parameters(), optim.weight_decay),
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            # A fused step unscales gradients itself, so Lightning refuses to clip them under a gradient scaler.
            fused=precision != "16-mixed",
        )

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by the global norm and keep that norm; Lightning calls this before each step, clipping or not."""
        limit = self.config.trainer.gradient_clip_val
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), float("inf") if limit is None else limit)
        self.grad_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.lr = lr_at(self.trainer.global_step, self.config.optim, self.config.trainer.max_steps)
        for group in optimizer.param_groups:
            group["lr"] = self.lr


def decay_groups(parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Split into a group that decays and one that does not: biases and one-dimensional weights, which are norms.

    Source: Megatron-LM, megatron/core/optimizer/__init__.py, the default no_weight_decay_cond.
    """
    named = list(parameters)
    kept = [weight for name, weight in named if name.endswith(".bias") or weight.ndim == 1]
    decayed = [weight for name, weight in named if not (name.endswith(".bias") or weight.ndim == 1)]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]


def _gpt2_config(model: Model, vocab_size: int) -> GPT2Config:
    if model.num_query_groups not in (None, model.num_attention_heads):
        raise UserError(
            f"model.num_query_groups={model.num_query_groups}: gpt2 has as many as "
            f"model.num_attention_heads={model.num_attention_heads}; set it to null"
        )
    return GPT2Config(
        vocab_size=vocab_size,
        n_positions=model.max_position_embeddings,
        n_embd=model.hidden_size,
        n_layer=model.num_layers,
        n_head=model.num_attention_heads,
        n_inner=model.ffn_hidden_size,
        resid_pdrop=model.hidden_dropout,
        embd_pdrop=model.hidden_dropout,
        attn_pdrop=model.attention_dropout,
        layer_norm_epsilon=model.layernorm_epsilon,
        initializer_range=model.init_method_std,
        tie_word_embeddings=model.share_embeddings_and_output_weights,
        bos_token_id=None,
        eos_token_id=None,
    )


def _llama_config(model: Model, vocab_size: int) -> LlamaConfig:
    if model.hidden_dropout > 0:
        raise UserError(f"model.hidden_dropout={model.hidden_dropout}: llama has no hidden dropout; set it to 0")
    return LlamaConfig(
        vocab_size=vocab_size,
        max_position_embeddings=model.max_position_embeddings,
        hidden_size=model.hidden_size,
        intermediate_size=model.ffn_hidden_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_query_groups or model.num_attention_heads,
        attention_dropout=model.attention_dropout,
        rms_norm_eps=model.layernorm_epsilon,
        initializer_range=model.init_method_std,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_theta},
        tie_word_embeddings=model.share_embeddings_and_output_weights,
        bos_token_id=None,
        eos_token_id=None,
    )
