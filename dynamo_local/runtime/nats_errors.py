"""How a failure of the NATS client becomes one of our typed errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from nats.aio.client import Client
from nats.errors import Error as NatsError

from dynamo_local.errors import NatsUnavailable

CALL_TIMEOUT_S = 2.0
"""Deadline of one round trip. A healthy local server answers in under 1 ms (circus-facts: 0.5 ms for consumer info)."""


@contextlib.contextmanager
def nats_call(nats: Client, what: str) -> Iterator[None]:
    """Run NATS calls in the block; `what` ("read the depth of …") completes "could not …" in the error.

    Raises `NatsUnavailable` at once while disconnected: the client would otherwise buffer what we send
    and deliver it after the reconnect, long after the caller was told that it failed.
    """
    if not nats.is_connected:
        raise NatsUnavailable(f"could not {what}: not connected to NATS; retry once the server is back")
    try:
        yield
    except (TimeoutError, NatsError, OSError) as error:
        detail = str(error) or type(error).__name__
        raise NatsUnavailable(f"could not {what}: {detail}; retry, or look at the NATS server's log") from error
