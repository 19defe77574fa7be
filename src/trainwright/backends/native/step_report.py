"""What is known of a run after an optimizer step."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One optimizer step, the same on all ranks but for the times."""

    step: int
    consumed_samples: int
    train_loss: float  # nats a token, mean over the global batch, before the update
    val_loss: float | None  # None: no validation at this step
    lr: float
    grad_norm: float  # before clipping
    step_time_s: float  # validation and saving left out
    tokens_per_s: float
