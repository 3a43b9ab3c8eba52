"""The connection to NATS: a first connect with a deadline, then reconnecting for ever, and quiet endings.

nats-py's defaults are for a server far away: it waits two seconds between attempts, gives up after sixty, and
tries for ever on the first connect if told to try for ever afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

from nats.aio.client import Client
from nats.errors import Error as NatsError

from dynamo_local.errors import ConfigError, NatsUnavailable

log = logging.getLogger(__name__)

RECONNECT_WAIT_S = 0.15
"""Between attempts: a restarted server is found within this and a connect."""
PENDING_BYTES = 16 * 1024 * 1024
"""What may wait to be sent, also while reconnecting; past it, publishing raises `OutboundBufferLimitError`."""
PING_INTERVAL_S = 5
"""With two pings outstanding a server that is silent is given up after 15 s (nats-py's default: six minutes)."""


async def connect_nats(
    url: str,
    token_file: Path | None = None,
    *,
    name: str = "dynamo-local",
    timeout_s: float = 5.0,
    on_closed: Callable[[], Awaitable[None]] | None = None,
) -> Client:
    """Connect to `nats://host:port` (user or token may be in the URL; the token file wins).

    The client reconnects for ever on its own. `on_closed` is called when it has ended for good: by `close`, or
    because the server threw us out with an error that nats-py takes for final.

    Raises `NatsUnavailable` past `timeout_s` or when the credentials are refused, `ConfigError` when the token
    file cannot be read.
    """
    where, token = show_url(url), read_token(token_file)
    client = Client()
    watcher = _Watcher(client, where, on_closed)
    try:
        async with asyncio.timeout(timeout_s):
            await client.connect(
                url,
                name=name,
                token=token,
                error_cb=watcher.error,
                disconnected_cb=watcher.disconnected,
                reconnected_cb=watcher.reconnected,
                closed_cb=watcher.closed,
                allow_reconnect=True,
                max_reconnect_attempts=-1,
                reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # annotated int; asyncio.sleep gets it
                connect_timeout=2,
                ping_interval=PING_INTERVAL_S,
                max_outstanding_pings=2,
                pending_size=PENDING_BYTES,
            )
    except BaseException as error:
        watcher.quiet = True
        await close_quietly(client)
        if isinstance(error, TimeoutError):
            reason = f" ({watcher.last})" if watcher.last else ""
            raise NatsUnavailable(
                f"NATS did not answer within {timeout_s:g} s at {where}{reason}; is it running, is the address right?"
            ) from error
        if _is_refusal(error):
            raise NatsUnavailable(f"NATS at {where} refused our credentials: check the token file or the URL") from None
        if isinstance(error, (OSError, NatsError, ValueError)):
            raise NatsUnavailable(f"NATS at {where} cannot be used: {error}") from error
        raise
    watcher.connecting = False
    return client


async def close_quietly(client: Client, timeout_s: float = 2.0) -> None:
    """Close the connection, whatever its state; never raises for what the network does. Twice is no error."""
    try:
        async with asyncio.timeout(timeout_s):
            await client.close()
    except TimeoutError:
        log.warning("the connection to NATS did not close within %g s; it was dropped", timeout_s)
    except (OSError, NatsError) as error:
        log.debug("closing the connection to NATS: %s", error)
    await asyncio.sleep(0)  # nats-py cancels its tasks without awaiting them: let them end


def read_token(token_file: Path | None) -> str | None:
    """The token in that file, None for no file. Raises `ConfigError` that names the file."""
    if token_file is None:
        return None
    try:
        token = token_file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the NATS token file {token_file} cannot be read: {error}") from error
    if not token:
        raise ConfigError(f"the NATS token file {token_file} is empty")
    return token


def show_url(url: str) -> str:
    """The URL without user, password or token: fit for a log."""
    parts = urlsplit(url if "://" in url else f"nats://{url}")
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _is_refusal(error: BaseException) -> bool:
    """Wrong credentials: on the first connect nats-py passes the server's words on, as a plain `Error`."""
    return isinstance(error, NatsError) and "authorization" in str(error).lower()


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


class _Watcher:
    """nats-py's callbacks: logs what happens to one connection, and ends a first connect that cannot succeed."""

    def __init__(self, client: Client, where: str, on_closed: Callable[[], Awaitable[None]] | None) -> None:
        self.client = client
        self.where = where
        self.connecting = True
        self.quiet = False
        self.last = ""
        self._on_closed = on_closed

    async def error(self, error: Exception) -> None:
        self.last = _reason(error)
        if self.connecting:
            if _is_refusal(error) and not self.quiet:
                raise error  # out of Client.connect, which would try the same credentials for ever
            return
        log.warning("NATS at %s: %s", self.where, self.last)

    async def disconnected(self) -> None:
        if not self.connecting and not self.client.is_closed:
            log.warning("the connection to NATS at %s was lost", self.where)

    async def reconnected(self) -> None:
        log.info("connected to NATS at %s again", self.where)

    async def closed(self) -> None:
        if not self.connecting and self._on_closed is not None:
            await self._on_closed()
