"""Requests to stop."""

import os
import signal

import pytest

from trainwright.backends.native.signals import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_is_remembered_and_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        os.kill(os.getpid(), number)
        assert stop.received
        stop.received = False
    assert signal.getsignal(number) is before


def test_a_process_that_was_asked_to_stop_is_not_killed_while_it_ends() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.received
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, before)
        signal.signal(signal.SIGINT, signal.default_int_handler)
