"""Gets entries from the server: pull requests, and the messages that answer them."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from collections import OrderedDict

from dynamo_local.runtime.nats_client import Client, Msg, NatsError, Subscription
from dynamo_local.runtime.nats_errors import unsubscribe

log = logging.getLogger(__name__)

PULL_GRACE_S = 0.5
"""How much longer we listen than the server holds the request, so that no entry arrives unnoticed."""


class NoConsumer(NatsError):
    """The server knows no such consumer: it lost its data."""


class PullInbox:
    """Pull requests, and the entries that answer them.

    nats-py's `fetch` gives up listening when the server's request expires, or when it is cancelled; an entry that
    arrives just then waits in its buffer for the next fetch while `ack_wait` runs out. Here an entry that nobody
    waits for is given back at once.
    """

    def __init__(self, nats: Client, subject: str) -> None:
        self._nats = nats
        self._subject = subject
        self._prefix: str | None = None
        self._subscription: Subscription | None = None
        self._numbers = itertools.count()
        self._waiting: OrderedDict[str, asyncio.Future[Msg | None]] = OrderedDict()

    async def next(self, timeout_s: float, *, wait: bool = True) -> Msg | None:
        """One entry, or None when the server has none within `timeout_s`; without `wait`, when it has none now."""
        if self._prefix is None:
            self._prefix = self._nats.new_inbox()
            self._subscription = await self._nats.subscribe(f"{self._prefix}.*", cb=self._on_message)
        inbox = f"{self._prefix}.{next(self._numbers)}"
        future: asyncio.Future[Msg | None] = asyncio.get_running_loop().create_future()
        self._waiting[inbox] = future
        try:
            asked = {"batch": 1, "expires": int(timeout_s * 1e9)} if wait else {"batch": 1, "no_wait": True}
            body = json.dumps(asked).encode()
            await self._nats.publish(self._subject, body, reply=inbox)
            await asyncio.wait((future,), timeout=timeout_s + PULL_GRACE_S)
        except asyncio.CancelledError:
            if future.done() and future.exception() is None and (msg := future.result()) is not None:
                await self._give_back(msg)
            raise
        finally:
            self._waiting.pop(inbox, None)
        return future.result() if future.done() else None

    async def close(self) -> None:
        """Stop listening: the server then forgets the requests that are still open."""
        await unsubscribe(self._nats, self._subscription)
        self._subscription = self._prefix = None

    async def _on_message(self, msg: Msg) -> None:
        status = (msg.headers or {}).get("Status") if not msg.reply else None
        if status is not None:  # comes on the request's own subject: 404/408 nothing there, 409 refused, 503 unknown
            future = self._waiting.pop(msg.subject, None)
            if future is not None and not future.done():
                if status == "503":
                    future.set_exception(NoConsumer("no such consumer"))
                else:
                    future.set_result(None)
            return
        # An entry comes under its own subject, not the request's: the request that has waited longest gets it.
        while self._waiting:
            _, future = self._waiting.popitem(last=False)
            if not future.done():
                future.set_result(msg)
                return
        await self._give_back(msg)

    async def _give_back(self, msg: Msg) -> None:
        log.info("prefill entry %s came when nobody waited for it: given back", msg.subject)
        try:
            await msg.nak()
        except NatsError as error:
            log.warning("could not give %s back, it is delivered again after ack_wait: %s", msg.subject, error)
