"""A NATS flush that keeps its promise."""

from __future__ import annotations

from nats.aio.client import Client

from dynamo_local.runtime.nats_errors import CALL_TIMEOUT_S


async def sync(nats: Client) -> None:
    """Return when the server has processed everything sent so far: subscriptions route, messages are out.

    One `Client.flush` is not enough: nats-py 2.16 writes its PING straight to the socket, *ahead* of what waits
    for its flusher task (`_send_ping`), so that the PONG can come before the SUB is processed. A caller that
    learned of the endpoint then got "no responders" (about one test run in fifty). The second PING is behind it.

    Raises nats-py's errors.
    """
    await nats.flush(timeout=CALL_TIMEOUT_S)  # type: ignore[arg-type]  # annotated int, given to asyncio.wait_for
    await nats.flush(timeout=CALL_TIMEOUT_S)  # type: ignore[arg-type]
