"""The plan of a run: every number that follows from its config, computed once.

Making a plan never fails: where sizes do not divide it rounds down, and preflight's rules say what is wrong.
"""

from dataclasses import dataclass

from trainwright.config import Model, Precision, RunConfig
from trainwright.config_backend import BackendKind, NemoBackend

GIB = 2**30

# Bytes that weights, gradients and Adam's state take per parameter, before any sharding. Lightning's mixed precision
# keeps weights and gradients in fp32; NeMo's O2 keeps bf16 weights with fp32 gradients, master weights and moments;
# NxDT as in the Tanuki recipe keeps bf16 weights and gradients with fp32 moments.
_STATE_BYTES: dict[BackendKind, dict[Precision, int]] = {
    "native": {"32-true": 16, "bf16-mixed": 16, "16-mixed": 16, "bf16-true": 8},
    "nemo": {"32-true": 16, "bf16-mixed": 18, "16-mixed": 18, "bf16-true": 18},
    "nxdt": {"32-true": 16, "bf16-mixed": 12, "16-mixed": 12, "bf16-true": 12},
}


# Of those, what NeMo's distributed optimizer spreads over data parallel ranks: master weights and moments.
_DISTRIBUTED_BYTES: dict[Precision, int] = {"32-true": 8, "bf16-mixed": 12, "16-mixed": 12, "bf16-true": 12}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of one run. Samples, tokens and steps count the whole world, bytes one device."""

    world_size: int
    data_parallel_size: int
    accumulate_grad_batches: int
    max_steps: int
    consumed_samples: int  # after the last step
    consumed_tokens: int
    padded_vocab_size: int
    num_parameters: int
    state_bytes: int  # weights, gradients and optimizer state
    activation_bytes: int
    checkpoint_bytes: int  # weights and optimizer state of the whole model on disk

    @property
    def device_bytes(self) -> int:
        return self.state_bytes + self.activation_bytes


def make_plan(config: RunConfig) -> Plan:
    """Return the plan of `config`: pure arithmetic, no I/O."""
    hardware, data, parallelism = config.hardware, config.data, config.parallelism
    world_size = hardware.num_nodes * hardware.devices
    replicas = data_parallel_size(config)
    vocab = padded_vocab_size(config)
    parameters = num_parameters(config.model, vocab)
    consumed_samples = config.trainer.max_steps * data.global_batch_size
    model_shards = parallelism.tensor_model_parallel_size * parallelism.pipeline_model_parallel_size
    state_shards = world_size if parallelism.strategy == "fsdp" else model_shards
    return Plan(
        world_size=world_size,
        data_parallel_size=replicas,
        accumulate_grad_batches=max(1, data.global_batch_size // (data.micro_batch_size * replicas)),
        max_steps=config.trainer.max_steps,
        consumed_samples=consumed_samples,
        consumed_tokens=consumed_samples * data.seq_length,
        padded_vocab_size=vocab,
        num_parameters=parameters,
        state_bytes=_state_bytes(config, parameters, replicas) // state_shards,
        activation_bytes=_activation_bytes(config, vocab),
        checkpoint_bytes=12 * parameters,  # fp32 weights and Adam's two moments
    )


def data_parallel_size(config: RunConfig) -> int:
    """Return world / (tp * pp * cp), at least 1. Source: megatron.core.parallel_state.initialize_model_parallel."""
    return max(1, config.hardware.num_nodes * config.hardware.devices // model_parallel_size(config))


def model_parallel_size(config: RunConfig) -> int:
    """Return the devices that hold one replica of the model: tp * pp * cp."""
    sizes = config.parallelism
    return sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size * sizes.context_parallel_size


def multiples_around(number: int, step: int) -> str:
    """Return in words which multiples of `step` are next to `number`, for a remedy: `56 or 64`, just `8` below it."""
    below = number // step * step
    return f"{below} or {below + step}" if below else str(step)


def padded_vocab_size(config: RunConfig) -> int:
    """Return the rows of the embedding: padded for native and NeMo, as it is for NxDT, which needs it to divide by tp.

    Source: megatron.training.tokenizer, _vocab_size_with_padding.
    """
    model, tensor = config.model, config.parallelism.tensor_model_parallel_size
    if config.backend.kind == "nxdt":
        return model.vocab_size
    multiple = model.make_vocab_size_divisible_by * tensor
    return -(-model.vocab_size // multiple) * multiple


def num_parameters(model: Model, padded_vocab: int) -> int:
    """Return the exact number of trained values, as the transformers architecture of that name counts them.

    Source: transformers GPT2LMHeadModel, LlamaForCausalLM, BertForPreTraining; a test compares.
    """
    hidden, ffn, layers = model.hidden_size, model.ffn_hidden_size, model.num_layers
    kv_hidden = hidden // model.num_attention_heads * (model.num_query_groups or model.num_attention_heads)
    embedding = padded_vocab * hidden
    output = 0 if model.share_embeddings_and_output_weights else embedding
    if model.architecture == "llama":  # no biases, RMSNorm, gated MLP
        block = 2 * hidden * hidden + 2 * hidden * kv_hidden + 3 * hidden * ffn + 2 * hidden
        return embedding + output + layers * block + hidden
    attention = 4 * (hidden * hidden + hidden)
    mlp = 2 * hidden * ffn + ffn + hidden
    norms = 4 * hidden
    positions = model.max_position_embeddings * hidden
    stack = embedding + positions + layers * (attention + mlp + norms) + 2 * hidden
    if model.architecture == "gpt2":
        return stack + output
    # BERT: segment embeddings, pooler, transform with norm before the tied decoder with its bias, next-sentence head.
    heads = 2 * hidden + 2 * (hidden * hidden + hidden) + 2 * hidden + padded_vocab + 2 * hidden + 2
    return stack + heads


def train_flops_per_token(model: Model, seq_length: int, padded_vocab: int) -> int:
    """Return the floating point operations that one token costs forward and backward, recomputation not counted.

    Source: Chowdhery et al. 2022 (PaLM), appendix B: 6 N + 12 L H Q T. N are the parameters of matrix products: a tied
    embedding is one, as the output layer; an untied one and learned positions are only looked up.
    """
    looked_up = 0 if model.share_embeddings_and_output_weights else padded_vocab * model.hidden_size
    if model.architecture != "llama":
        looked_up += model.max_position_embeddings * model.hidden_size
    products = num_parameters(model, padded_vocab) - looked_up
    return 6 * products + 12 * model.num_layers * model.hidden_size * seq_length


def _state_bytes(config: RunConfig, parameters: int, replicas: int) -> int:
    """Return what weights, gradients and optimizer state take on a device that holds the whole model."""
    backend, precision = config.backend, config.trainer.precision
    held = _STATE_BYTES[backend.kind][precision]
    if isinstance(backend, NemoBackend) and backend.optim.name == "distributed_fused_adam":
        spread = _DISTRIBUTED_BYTES[precision]
        return parameters * (held - spread) + parameters * spread // replicas
    return parameters * held


def _activation_bytes(config: RunConfig, vocab: int) -> int:
    """Estimate what one micro-batch keeps for the backward pass on one device.

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", equation 2 without
    its attention matrix term (fused attention keeps none): 34 bytes a token, layer and hidden unit with 2-byte values.
    """
    model, sizes = config.model, config.parallelism
    tokens = config.data.micro_batch_size * config.data.seq_length // sizes.context_parallel_size
    value_bytes = 4 if config.trainer.precision == "32-true" else 2
    layer = tokens * model.hidden_size * 17 * value_bytes // sizes.tensor_model_parallel_size
    layers = model.num_layers // sizes.pipeline_model_parallel_size
    if config.trainer.recompute == "full":
        kept = layers * tokens * model.hidden_size * value_bytes + layer
    else:
        kept = layers * layer
    logits = tokens * vocab * 4 // sizes.tensor_model_parallel_size
    return kept + logits
