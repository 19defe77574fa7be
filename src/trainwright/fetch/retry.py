"""Again after errors of the network that pass; at once a failure where trying again changes nothing."""

import random
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from trainwright.errors import RunFailedError, UserError
from trainwright.fetch.lock import Say

T = TypeVar("T")
WAITS_S = (2.0, 4.0, 8.0, 16.0, 32.0)  # between tries, each lengthened by up to a half so that runs do not try together
_STATUS_CODES = {408, 425, 429, 500, 502, 503, 504}
# Errors of connections have no common class: each library brings its own.
_CLASSES = {
    "ClientConnectionError",  # aiohttp
    "ClientPayloadError",
    "ConnectionClosedError",  # botocore
    "EndpointConnectionError",
    "HTTPClientError",
    "LocalEntryNotFoundError",  # huggingface_hub, for any error of its first request
    "ResponseParserError",
    "TransportError",  # httpx
    "XetDownloadError",
}


class DamagedError(Exception):
    """What arrived is not what was announced."""


def retrying(action: Callable[[], T], what: str, *, say: Say, waits_s: Sequence[float] = WAITS_S) -> T:
    """Return what `action` returns; after an error that may pass, wait and call it again.

    Raises RunFailedError after the last of such errors, any other error at once.
    """
    for number, wait_s in enumerate([*waits_s, None], 1):
        try:
            return action()
        except Exception as error:
            if not is_passing(error):
                raise
            if wait_s is None:
                raise RunFailedError(
                    f"{what}: {reason_of(error)}; given up after {number} tries: start the run again later, what has "
                    "arrived stays"
                ) from error
            wait_s *= random.uniform(1.0, 1.5)
            say(f"{what}: {reason_of(error)}; again in {wait_s:.0f} s ({number} of {len(waits_s)})")
            time.sleep(wait_s)
    raise AssertionError("the last wait is None")


def is_passing(error: BaseException) -> bool:
    """Return whether the same request may succeed later."""
    status = getattr(getattr(error, "response", None), "status_code", None) or getattr(error, "status", None)
    if isinstance(status, int):
        return status in _STATUS_CODES
    if isinstance(error, (ConnectionError, TimeoutError, DamagedError)):
        return True
    return any(parent.__name__ in _CLASSES for parent in type(error).__mro__)


def reason_of(error: BaseException) -> str:
    """Return an error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def joined(errors: Sequence[UserError]) -> UserError:
    """Return several errors as one: a failure of the run where no input is to blame."""
    kind = RunFailedError if all(isinstance(error, RunFailedError) for error in errors) else UserError
    return kind("\n".join(map(str, errors)))
