"""Hydra-composed training of language models on this machine, Slurm and Vertex AI."""
