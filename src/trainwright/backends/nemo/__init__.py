"""NVIDIA NeMo in its container: what its training script reads."""
