"""Hydra plugins of trainwright: where configs lie, how sweeps expand, how jobs start."""
