"""What all ranks measure together: validation loss, the norm of the parameters, sums."""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trainwright.backends.native.data import BatchLoader
from trainwright.backends.native.module import Pretraining


def validation_loss(trainer: pl.Trainer, module: Pretraining, batches: BatchLoader) -> float:
    """Return the mean loss over all tokens of `batches` on all ranks, from sums of losses and of tokens."""
    sums = torch.zeros(2, dtype=torch.float64, device=module.device)  # loss and tokens
    module.net.eval()
    with torch.no_grad(), trainer.precision_plugin.val_step_context():
        for batch in batches:
            tokens, labels = trainer.strategy.batch_to_device(batch)
            count = labels.numel()
            sums += torch.stack([module.net(tokens, labels).double() * count, sums.new_tensor(count)])
    module.net.train()
    if isinstance(module.net, FSDPModule):
        module.net.reshard()  # without a backward pass, the root would keep whole parameters in place of its share
    total_loss, total_tokens = sum_over_ranks(trainer, sums).tolist()
    return float(total_loss / total_tokens)


def param_norm(module: nn.Module) -> float:
    """Return the norm of all parameters together. All ranks call it: each may hold a share of them."""
    norm = nn.utils.get_total_norm(parameter.detach() for parameter in module.parameters())
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def sum_over_ranks(trainer: pl.Trainer, values: Tensor) -> Tensor:
    summed = trainer.strategy.reduce(values, reduce_op="sum")
    assert isinstance(summed, Tensor)
    return summed
