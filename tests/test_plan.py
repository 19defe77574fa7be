"""Numbers that must be right: batch arithmetic, parameters, bytes."""

from collections.abc import Callable

import pytest

from trainwright.config import RunConfig
from trainwright.plan import GIB, make_plan, train_flops_per_token

Parsed = Callable[..., RunConfig]


@pytest.mark.parametrize(
    ("overrides", "world", "replicas", "accumulation", "samples"),
    [
        (("hardware=t4",), 8, 8, 8, 12_800),  # the first article
        (("model=tanuki_8b", "hardware=trn1"), 32, 1, 8, 800),  # the third, where NxDT prints 728
        (("model=tanuki_8b", "hardware=h100"), 8, 8, 1, 800),
        (("model=gpt_5b", "hardware=h100", "parallelism.tensor_model_parallel_size=2"), 8, 4, 16, 25_600),
        (("hardware.num_nodes=2", "data.global_batch_size=12"), 2, 2, 3, 2_880),
        (("hardware=t4", "parallelism.pipeline_model_parallel_size=2"), 8, 4, 16, 12_800),
        (("hardware=t4", "parallelism.context_parallel_size=8"), 8, 1, 64, 12_800),
    ],
)
def test_batch_arithmetic(
    overrides: tuple[str, ...], world: int, replicas: int, accumulation: int, samples: int, parsed: Parsed
) -> None:
    plan = make_plan(parsed(*overrides))
    got = (plan.world_size, plan.data_parallel_size, plan.accumulate_grad_batches, plan.consumed_samples)
    assert got == (world, replicas, accumulation, samples)
    assert plan.consumed_tokens == samples * parsed(*overrides).data.seq_length


@pytest.mark.parametrize(
    ("overrides", "rows"),
    [
        ((), 50_304),
        (("hardware=t4", "parallelism.tensor_model_parallel_size=4"), 50_688),  # a multiple of 512
        (("model=tanuki_8b", "hardware=trn1"), 65_024),
        (("hardware=trn1",), 50_257),  # NxDT pads nothing
        (("model=bert_large",), 30_522),
    ],
)
def test_the_vocabulary_is_padded_as_the_backend_does(overrides: tuple[str, ...], rows: int, parsed: Parsed) -> None:
    assert make_plan(parsed(*overrides)).padded_vocab_size == rows


@pytest.mark.parametrize(
    ("model", "parameters"),
    [("gpt_small", 13_733_632), ("tanuki_8b", 7_512_264_704), ("bert_large", 336_226_108)],
)
def test_published_parameter_counts(model: str, parameters: int, parsed: Parsed) -> None:
    assert make_plan(parsed(f"model={model}")).num_parameters == parameters


MODELS = ("gpt_small", "gpt_5b", "bert_large", "bert_tiny", "tanuki_8b", "llama_tiny")


@pytest.mark.parametrize(
    ("model", "is_tied"),
    # BERT's decoder is tied by definition.
    [(model, is_tied) for model in MODELS for is_tied in (True, False) if is_tied or not model.startswith("bert")],
)
def test_parameters_equal_those_of_the_transformers_architecture(model: str, is_tied: bool, parsed: Parsed) -> None:
    import torch
    import transformers

    config = parsed(f"model={model}", f"model.share_embeddings_and_output_weights={is_tied}")
    shape, plan = config.model, make_plan(config)
    common = {
        "vocab_size": plan.padded_vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "intermediate_size": shape.ffn_hidden_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "tie_word_embeddings": is_tied,
    }
    with torch.device("meta"):
        if shape.architecture == "llama":
            net = transformers.LlamaForCausalLM(
                transformers.LlamaConfig(**common, num_key_value_heads=shape.num_query_groups)
            )
        elif shape.architecture == "bert":
            net = transformers.BertForPreTraining(transformers.BertConfig(**common))
        else:
            net = transformers.GPT2LMHeadModel(
                transformers.GPT2Config(
                    vocab_size=plan.padded_vocab_size,
                    n_embd=shape.hidden_size,
                    n_layer=shape.num_layers,
                    n_head=shape.num_attention_heads,
                    n_inner=shape.ffn_hidden_size,
                    n_positions=shape.max_position_embeddings,
                    tie_word_embeddings=is_tied,
                )
            )
    assert plan.num_parameters == sum(parameter.numel() for parameter in net.parameters())


def test_tanuki_takes_14_gib_in_bf16(parsed: Parsed) -> None:
    assert make_plan(parsed("model=tanuki_8b")).num_parameters * 2 / GIB == pytest.approx(13.99, abs=0.005)


def test_fsdp_shards_the_state_over_the_world_and_ddp_does_not(parsed: Parsed) -> None:
    sharded = make_plan(parsed("model=tanuki_8b", "hardware=h100"))
    whole = make_plan(parsed("model=tanuki_8b", "hardware=h100", "parallelism.strategy=ddp"))
    assert whole.state_bytes == 16 * 7_512_264_704
    assert sharded.state_bytes == whole.state_bytes // 8
    assert sharded.activation_bytes == whole.activation_bytes


def test_recomputation_saves_activation_memory(parsed: Parsed) -> None:
    kept = make_plan(parsed("model=gpt_5b", "hardware=h100", "trainer.recompute=none"))
    recomputed = make_plan(parsed("model=gpt_5b", "hardware=h100", "trainer.recompute=full"))
    assert recomputed.activation_bytes < kept.activation_bytes / 4


def test_flops_of_a_token_agree_with_megatrons_formula(parsed: Parsed) -> None:
    """Narayanan et al. 2021, equation 3, without recomputation; it leaves out norms and biases, under 1 %."""
    model = parsed("hardware=t4").model
    layers, hidden, length, vocab = model.num_layers, model.hidden_size, 256, 50_304
    megatron = 72 * layers * hidden**2 * (1 + length / (6 * hidden) + vocab / (12 * layers * hidden))
    assert train_flops_per_token(model, length, vocab) == pytest.approx(megatron, rel=0.01)


def test_an_untied_embedding_is_looked_up_and_costs_nothing(parsed: Parsed) -> None:
    model = parsed("model=llama_tiny").model
    tied, untied = (model.model_copy(update={"share_embeddings_and_output_weights": it}) for it in (True, False))
    assert train_flops_per_token(tied, 256, 512) == train_flops_per_token(untied, 256, 512)
