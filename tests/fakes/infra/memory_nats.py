"""A NATS in memory for core messages: publish, subscribe and request, as our control endpoint and load use them.

Messages take time, are lost when the server goes away, and wait at a client that is stopped.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from nats.errors import ConnectionClosedError, NoRespondersError
from nats.errors import TimeoutError as NatsTimeoutError

LATENCY_S = 0.001

Callback = Callable[[Any], Awaitable[None]]


@dataclass
class MemoryNats:
    """The server. `up = False`: nobody is connected, what is on its way is lost."""

    up: bool = True
    subscriptions: list[MemorySubscription] = field(default_factory=list)
    inboxes: itertools.count[int] = field(default_factory=itertools.count)

    def client(self) -> MemoryNatsClient:
        return MemoryNatsClient(self)

    def deliver(self, subject: str, data: bytes, reply: str, headers: dict[str, str] | None) -> int:
        listening = [each for each in self.subscriptions if each.subject == subject]
        message = SimpleNamespace(subject=subject, data=data, reply=reply, headers=headers)
        for each in listening:
            each.client.receive(each, message)
        return len(listening)


@dataclass(eq=False)
class MemorySubscription:
    """One client's interest in one subject."""

    subject: str
    callback: Callback
    client: MemoryNatsClient

    async def unsubscribe(self) -> None:
        if self in self.client.server.subscriptions:
            self.client.server.subscriptions.remove(self)


class MemoryNatsClient:
    """The part of `nats.aio.client.Client` that is used. `go` is cleared while the process is stopped."""

    def __init__(self, server: MemoryNats) -> None:
        self.server = server
        self.is_closed = False
        self.go = asyncio.Event()
        self.go.set()
        self._receiving: set[asyncio.Task[None]] = set()

    @property
    def is_connected(self) -> bool:
        return self.server.up and not self.is_closed

    def new_inbox(self) -> str:
        return f"_INBOX.{next(self.server.inboxes)}"

    async def subscribe(self, subject: str, queue: str = "", cb: Callback | None = None) -> MemorySubscription:
        assert cb is not None
        if self.is_closed:
            raise ConnectionClosedError
        subscription = MemorySubscription(subject, cb, self)
        self.server.subscriptions.append(subscription)
        return subscription

    async def publish(
        self, subject: str, data: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Send; nobody listening is told to the reply subject, as the server does."""
        self._check()
        if not self.server.deliver(subject, data, reply, headers) and reply:
            self.server.deliver(reply, b"", "", {"Status": "503"})

    async def request(self, subject: str, data: bytes = b"", timeout: float = 0.5) -> Any:
        """The first answer. Raises `NoRespondersError`, or nats-py's `TimeoutError`."""
        self._check()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def on_answer(message: Any) -> None:
            if not answer.done():
                answer.set_result(message)

        inbox = self.new_inbox()
        subscription = await self.subscribe(inbox, cb=on_answer)
        try:
            if not self.server.deliver(subject, data, inbox, None):
                raise NoRespondersError
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            raise NatsTimeoutError from None
        finally:
            await subscription.unsubscribe()

    async def flush(self, timeout: float = 10) -> None:
        self._check()

    def close_now(self) -> None:
        self.is_closed = True
        self.server.subscriptions = [each for each in self.server.subscriptions if each.client is not self]
        for task in self._receiving:
            task.cancel()

    def receive(self, subscription: MemorySubscription, message: Any) -> None:
        task = asyncio.ensure_future(self._receive(subscription, message))
        self._receiving.add(task)
        task.add_done_callback(self._receiving.discard)

    async def _receive(self, subscription: MemorySubscription, message: Any) -> None:
        await asyncio.sleep(LATENCY_S)
        if not self.server.up:
            return
        await self.go.wait()
        if not self.is_closed and subscription in self.server.subscriptions:
            await subscription.callback(message)

    def _check(self) -> None:
        if not self.is_connected:
            raise ConnectionClosedError
