"""The Lightning backend: transformers' architectures, trained from random weights on CPU and GPU."""
