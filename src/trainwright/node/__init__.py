"""What runs on a node: standard library only, Python 3.8 and later, zipped into every run directory."""
