"""The tiny runs of the native backend's tests."""

from tests.backends.native.conftest import _rank_server, _tree, make_config, token_prefix

__all__ = ["_rank_server", "_tree", "make_config", "token_prefix"]
