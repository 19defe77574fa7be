"""Processes of their own for conversions, cheap since torch is loaded once."""

import multiprocessing
from multiprocessing.context import ForkServerContext

import pytest


@pytest.fixture(scope="session")
def processes() -> ForkServerContext:
    """Return where to start processes that have torch and the converter loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "trainwright.checkpoint"])
    return context
