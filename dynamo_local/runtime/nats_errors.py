"""Turns failures of the NATS client into our typed errors; and subscriptions that the server has when we say so."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator

from dynamo_local.errors import NatsUnavailable
from dynamo_local.runtime.nats_client import Client, Msg, NatsError, Subscription

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


async def flush(nats: Client) -> None:
    """Return when the server has processed what was sent before, e.g. a subscription.

    nats-py (2.16) writes its PING past its own buffer of commands, so one `flush()` can be answered before a SUB
    has even left. By the time of the answer the buffer has been written; the second PING comes after it.
    With one, 1 in 10 requests still reached a listener that had "unsubscribed and flushed".
    """
    for _ in range(2):
        await nats.flush(int(CALL_TIMEOUT_S))


async def subscribe(nats: Client, subject: str, heard: Callable[[Msg], Awaitable[None]], what: str) -> Subscription:
    """Hear what is published from now on: the server has it when this returns. `what` is as in `nats_call`.

    Raises `NatsUnavailable`.
    """
    with nats_call(nats, what):
        subscription = await nats.subscribe(subject, cb=heard)
        try:
            await flush(nats)
        except BaseException:
            with contextlib.suppress(NatsError):
                await unsubscribe(nats, subscription)
            raise
    return subscription


async def unsubscribe(nats: Client, subscription: Subscription | None) -> None:
    """Hear no more. None and a connection that has ended are no error: the subscription ended with it."""
    if subscription is not None and not nats.is_closed:
        await subscription.unsubscribe()
