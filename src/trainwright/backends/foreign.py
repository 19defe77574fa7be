"""What follows from the config in the results of a run, whatever backend trains it. No torch."""

from typing import Any

from trainwright.config import RunConfig
from trainwright.plan import Plan, train_flops_per_token


def results_constants(config: RunConfig, plan: Plan) -> dict[str, Any]:
    """Return what `node.results.content` and the node's reading of a foreign backend's metrics need, as JSON."""
    data = config.data
    return {
        "model": {"name": config.model.name, "parameters": plan.num_parameters},
        "batch": {
            "micro_batch_size": data.micro_batch_size,
            "global_batch_size": data.global_batch_size,
            "accumulate_grad_batches": plan.accumulate_grad_batches,
            "world_size": plan.world_size,
            "data_parallel_size": plan.data_parallel_size,
        },
        "max_steps": config.trainer.max_steps,
        "log_every_n_steps": config.trainer.log_every_n_steps,
        "seq_length": data.seq_length,
        "flops_per_token": train_flops_per_token(config.model, data.seq_length, plan.padded_vocab_size),
        "peak_tflops": config.hardware.peak_tflops,
        "data": {
            "prefixes": [part for part in data.data_prefix or () if isinstance(part, str)],
            "splits_string": data.splits_string,
            "train_path": data.train_path,
            "val_path": data.val_path,
            "train_tokens": None,  # a foreign backend tells none
            "validation_tokens": None,
        },
    }
