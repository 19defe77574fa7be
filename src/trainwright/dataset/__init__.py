"""Training data in Megatron's format: texts become .bin/.idx pairs, and these samples of seq_length + 1 tokens."""
