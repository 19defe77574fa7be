"""Stands in for a tokenizer that NeMo 1.23 imports, does not use here, and whose sdist no longer builds."""
