"""NxDT on Trainium: what its stages are, what it reads, and the programs around its training."""
