"""Recorded runs and the servers that they fetch from."""

from tests.backends.nxdt.runs import record
from tests.fetch.servers import hub, web

__all__ = ["hub", "record", "web"]
