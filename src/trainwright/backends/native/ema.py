"""An exponential moving average of the weights. Source: NeMo 1.23, nemo/collections/common/callbacks/ema.py."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trainwright.config_exp_manager import Ema


class AveragedWeights:
    """The average of a network's parameters, sharded as they are. It begins as a copy of them.

    After an update by the optimizer it becomes decay * average + (1 - decay) * weights, as it is after steps
    1, 1 + every_n_steps, 1 + 2 * every_n_steps and so on.
    """

    def __init__(self, network: nn.Module, ema: Ema) -> None:
        self._network = network
        self._ema = ema
        # By parameter name, as a checkpoint holds them.
        self.weights: dict[str, Tensor] = {
            name: weight.detach().to("cpu" if ema.cpu_offload else weight.device, copy=True)
            for name, weight in network.named_parameters()
        }

    def restart(self) -> None:
        """Begin anew as a copy of the weights, where a checkpoint has no average."""
        for name, weight in self._network.named_parameters():
            self.weights[name].copy_(weight.detach())

    def update(self, step: int) -> None:
        """Take in the weights that optimizer step `step`, from 1, has left."""
        if (step - 1) % self._ema.every_n_steps:
            return
        for name, weight in self._network.named_parameters():
            average = self.weights[name]
            average.mul_(self._ema.decay).add_(weight.detach().to(average.device), alpha=1 - self._ema.decay)

    @contextmanager
    def for_validation(self) -> Iterator[None]:
        """Have the average in the network's place, unless the original weights are to be validated."""
        if self._ema.validate_original_weights:
            yield
            return
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, weight in self._network.named_parameters():
            average = self.weights[name]
            before = weight.detach().clone()
            weight.copy_(average)
            average.copy_(before)
