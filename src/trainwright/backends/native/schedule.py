"""The learning rate of a step: a function of the step alone, so that a resume has no scheduler state to restore."""

import math

from trainwright.config import Optim


def lr_at(step: int, optim: Optim, max_steps: int) -> float:
    """Return the learning rate of the update that follows `step` finished updates.

    CosineAnnealing rises from lr / (warmup_steps + 1) to lr, then falls to min_lr at `max_steps` and stays there.
    Source: NeMo 1.23, nemo/core/optim/lr_scheduler.py, WarmupAnnealHoldPolicy and CosineAnnealing (constant_steps 0).
    LinearAnnealingWithWarmUp rises from 0, so its first update changes nothing, then falls to min_lr.
    Source: neuronx-distributed-training, LinearAnnealingWithWarmUp: transformers' linear schedule, whose min_lr is 0.
    """
    sched = optim.sched
    if sched.name == "LinearAnnealingWithWarmUp":
        return _linear(step, optim, max_steps)
    if 0 < sched.warmup_steps >= step:
        return optim.lr * (step + 1) / (sched.warmup_steps + 1)
    if sched.name == "constant":
        return optim.lr
    if step > max_steps:
        return sched.min_lr
    fraction = (step - sched.warmup_steps) / max(1, max_steps - sched.warmup_steps)
    return sched.min_lr + (optim.lr - sched.min_lr) * 0.5 * (1 + math.cos(math.pi * fraction))


def _linear(step: int, optim: Optim, max_steps: int) -> float:
    warmup_steps, min_lr = optim.sched.warmup_steps, optim.sched.min_lr
    if step < warmup_steps:
        return optim.lr * step / warmup_steps
    left = max(0.0, (max_steps - step) / max(1, max_steps - warmup_steps))
    return min_lr + (optim.lr - min_lr) * left
