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
    param_norm: float | None  # after the update; None: not worked out, since this step is not logged
    step_time_s: float  # validation and saving left out
    delta_time_s: float | None  # since the step before, with validation and saving; None: the attempt's first step
    tokens_per_s: float
    samples_per_s: float
    tflops_per_s: float  # of one device, counted by the model's arithmetic
    mfu: float | None  # part of hardware.peak_tflops; None: that is unknown
