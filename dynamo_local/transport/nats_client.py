"""The names of nats-py that we use. Other modules import them from here, so that nats-py is first imported here.

nats-py imports aiohttp if it is installed (vLLM brings it), to speak NATS over websockets. We never do that.
That is a fifth of the processor time of a worker's start, and 40 modules more in each of its processes. While
nats-py is imported here, aiohttp is hidden from it. Other code can import aiohttp before or after.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def _without(name: str) -> Iterator[None]:
    """In the block the module cannot be imported. One that has been imported already stays."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]  # how Python is told that an import shall fail
    try:
        yield
    finally:
        del sys.modules[name]


with _without("aiohttp"):
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription
    from nats.errors import (
        BadSubjectError,
        ConnectionClosedError,
        FlushTimeoutError,
        MaxPayloadError,
        NoRespondersError,
        OutboundBufferLimitError,
    )
    from nats.errors import Error as NatsError
    from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
    from nats.js.errors import APIError, BadRequestError, NoStreamResponseError, NotFoundError

__all__ = [
    "APIError",
    "AckPolicy",
    "BadRequestError",
    "BadSubjectError",
    "Client",
    "ConnectionClosedError",
    "ConsumerConfig",
    "DiscardPolicy",
    "FlushTimeoutError",
    "MaxPayloadError",
    "Msg",
    "NatsError",
    "NoRespondersError",
    "NoStreamResponseError",
    "NotFoundError",
    "OutboundBufferLimitError",
    "RetentionPolicy",
    "StorageType",
    "StreamConfig",
    "Subscription",
]
