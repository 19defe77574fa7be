"""The servers that the tests fetch from."""

from tests.fetch.servers import hub, web

__all__ = ["hub", "web"]
