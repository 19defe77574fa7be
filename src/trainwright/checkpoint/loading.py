"""Whether transformers takes a model directory for a model and a tokenizer: the last judge of an export."""

from pathlib import Path
from typing import Any

_CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello."}]


def loading_problems(directory: Path) -> list[str]:
    """Return why transformers cannot use the model, its tokenizer or its chat template.

    The weights are in memory meanwhile, in their own type.
    """
    return _model_problems(directory) + _tokenizer_problems(directory)


def _model_problems(directory: Path) -> list[str]:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype="auto", low_cpu_mem_usage=True, output_loading_info=True, local_files_only=True
        )
    except Exception as error:  # transformers has no class of its own for what it cannot load
        return [f"transformers cannot load the model: {type(error).__name__}: {error}"]
    info = loaded[1]
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    return [
        f"transformers finds {kind.replace('_', ' ')}: {sorted(map(str, info[kind]))}" for kind in kinds if info[kind]
    ]


def _tokenizer_problems(directory: Path) -> list[str]:
    from transformers import AutoConfig, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        vocab_size = AutoConfig.from_pretrained(directory, local_files_only=True).vocab_size
    except Exception as error:
        return [f"transformers cannot load the tokenizer: {type(error).__name__}: {error}"]
    problems = []
    if len(tokenizer) > vocab_size:
        problems.append(f"the tokenizer has {len(tokenizer)} entries, the model rows for {vocab_size}")
    if tokenizer.chat_template is not None:
        try:
            tokenizer.apply_chat_template(_CHAT, tokenize=False)
        except Exception as error:  # what a template raises is up to its author
            problems.append(f"the chat template does not render {_CHAT}: {type(error).__name__}: {error}")
    return problems
