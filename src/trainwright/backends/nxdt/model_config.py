"""A model's config.json and tokenizer against the run's config: NxDT goes by the one, everything else by the other."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainwright.config import RunConfig


def problems(directory: Path, config: RunConfig) -> list[str]:
    """Return each difference between the model in `directory` and the run's config, with what would be right."""
    try:
        found = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        return [f"{directory / 'config.json'}: cannot be read: {error}"]
    if not isinstance(found, dict):
        return [f"{directory / 'config.json'}: is no JSON object"]
    return [f"{directory}/config.json: {line}" for line in differences(found, config)] + _tokenizer_problems(
        directory, found
    )


def differences(found: Mapping[str, Any], config: RunConfig) -> list[str]:
    """Return each difference between a config.json and the run's config.

    Source of the defaults: transformers, LlamaConfig (4.52 and 5.24).
    """
    model = config.model
    heads = found.get("num_attention_heads")
    rows = (  # (key in config.json, its value, our key, our value)
        ("model_type", found.get("model_type"), "model.architecture", model.architecture),
        ("num_hidden_layers", found.get("num_hidden_layers"), "model.num_layers", model.num_layers),
        ("hidden_size", found.get("hidden_size"), "model.hidden_size", model.hidden_size),
        ("intermediate_size", found.get("intermediate_size"), "model.ffn_hidden_size", model.ffn_hidden_size),
        ("num_attention_heads", heads, "model.num_attention_heads", model.num_attention_heads),
        (
            "num_key_value_heads",
            found.get("num_key_value_heads") or heads,
            "model.num_query_groups",
            model.num_query_groups or model.num_attention_heads,
        ),
        ("vocab_size", found.get("vocab_size"), "model.vocab_size", model.vocab_size),
        ("rope_theta", rope_theta(found), "model.rope_theta", model.rope_theta),
        ("rms_norm_eps", found.get("rms_norm_eps", 1e-6), "model.layernorm_epsilon", model.layernorm_epsilon),
        (
            "tie_word_embeddings",
            found.get("tie_word_embeddings", False),
            "model.share_embeddings_and_output_weights",
            model.share_embeddings_and_output_weights,
        ),
    )
    told = [
        f"{key}={_shown(theirs)}, but {our_key}={_shown(ours)}; set {our_key}={_shown(theirs)}, or name another model"
        for key, theirs, our_key, ours in rows
        if theirs != ours
    ]
    due = f"{model.architecture.capitalize()}ForCausalLM"
    classes = found.get("architectures") or [due]
    if due not in classes:
        told.append(f"architectures={_shown(classes)}, but model.architecture={model.architecture} is {due}")
    longest = found.get("max_position_embeddings", 2048)
    if not isinstance(longest, int) or longest < config.data.seq_length:
        told.append(
            f"max_position_embeddings={_shown(longest)} is less than data.seq_length={config.data.seq_length}; use at "
            "most that"
        )
    return told


def rope_theta(found: Mapping[str, Any]) -> Any:
    """Return the base of the rotary embedding: at the top, or below `rope_parameters` as transformers 5 writes it."""
    places = (found, found.get("rope_parameters"), found.get("rope_scaling"))
    values = (place.get("rope_theta") for place in places if isinstance(place, Mapping))
    return next((value for value in values if value is not None), 10000.0)


def _tokenizer_problems(directory: Path, found: Mapping[str, Any]) -> list[str]:
    size, vocab_size = tokenizer_size(directory), found.get("vocab_size")
    if size is None or not isinstance(vocab_size, int) or size <= vocab_size:
        return []
    return [
        f"{directory}/tokenizer.json: has ids up to {size - 1}, but config.json's vocab_size={vocab_size} has rows up "
        f"to {vocab_size - 1}; the two are not of one model"
    ]


def tokenizer_size(directory: Path) -> int | None:
    """Return 1 + the largest id of tokenizer.json; None where there is no such file or it is of an unknown kind."""
    try:
        tree = json.loads((directory / "tokenizer.json").read_bytes())
        vocabulary = tree["model"]["vocab"]
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else list(range(len(vocabulary)))
        return 1 + max(ids + [token["id"] for token in tree.get("added_tokens", ())])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _shown(value: Any) -> str:
    return json.dumps(value)
