"""A worker's endpoint: takes requests from a NATS subject and answers each over a connection of its own."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final

from dynamo_local import errors
from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.runtime.nats_client import Client, Msg, NatsError, Subscription
from dynamo_local.runtime.nats_errors import CALL_TIMEOUT_S, flush, nats_call
from dynamo_local.runtime.requests.exchange import Exchange
from dynamo_local.runtime.requests.frames import (
    Decode,
    FrameKind,
    RequestHeader,
    decode_header,
    decode_value,
    encode_error,
    frame,
)
from dynamo_local.runtime.requests.handlers import Handler
from dynamo_local.runtime.requests.kept.asked import CallersConnections
from dynamo_local.system.logs.request_log import bound

logger = logging.getLogger(__name__)

LINGER_S: Final = 1.0
"""How long after deregistering requests may still be on their way: etcd watches tell callers within 50 ms."""

CLOSE_TIMEOUT_S: Final = 2.0
"""For callers to take the error frame, and for handlers to run their `finally`, when an endpoint is closed."""


class EndpointServer:
    """Serves `handler` on `subject`. Every request ends with an answer, an error or a refusal.

    `late_accepted` counts requests that were served after `stop_accepting`, in the linger window.
    `max_inflight` bounds how many handlers run at once; more are refused with `WorkerBusy`. `decode` makes what the
    handler gets from the bytes of a payload.
    """

    def __init__(
        self,
        nats: Client,
        *,
        subject: str,
        handler: Handler,
        max_inflight: int | None = None,
        name: str = "generate",
        clock: Clock | None = None,
        decode: Decode = decode_value,
    ) -> None:
        self.subject = subject
        self.name = name
        self.late_accepted = 0
        self._nats = nats
        self._handler = handler
        self._decode = decode
        self._max_inflight = max_inflight
        self._clock: Clock = clock or AsyncioClock()
        self._subscription: Subscription | None = None
        self._exchanges: set[Exchange] = set()
        self._kept = CallersConnections(self._on_asked)
        self._handlers_running = 0
        self._accept_until_s: float | None = None
        self._closed = False
        self._changed = asyncio.Event()

    # --- life ---

    async def start(self) -> None:
        """Take requests. On return NATS routes them here, so the endpoint may be registered."""
        self._subscription = await self._subscribe(self.subject)

    async def rebind(self, subject: str) -> None:
        """Serve `subject` instead (the lease was granted anew). Open streams go on; the old subject is given up."""
        old, self._subscription = self._subscription, await self._subscribe(subject)
        self.subject = subject
        self._kept.close()  # whoever asks on them means the old subject
        self._kept = CallersConnections(self._on_asked)
        if old is not None:
            await self._unsubscribe(old)

    def stop_accepting(self, linger_s: float = LINGER_S) -> None:
        """The worker was deregistered: serve what comes within `linger_s`, then refuse with `WorkerDraining`.

        The caller is told of each refusal, and sends the request to another worker.
        """
        self._accept_until_s = self._clock.now_s() + linger_s
        self._changed.set()

    def resume_accepting(self) -> None:
        """The drain was taken back."""
        self._accept_until_s = None
        self._changed.set()

    async def close(self) -> None:
        """Give the subject up; requests still waiting there are refused, those in flight end with `WorkerLost`."""
        self._closed = True
        if self._subscription is not None:
            subscription, self._subscription = self._subscription, None
            await self._unsubscribe(subscription)
        self._kept.close()
        for exchange in list(self._exchanges):
            exchange.fail(
                errors.WorkerLost(
                    f"the worker closed endpoint {self.name} before it had finished request "
                    f"{exchange.context.request_id}; send it again"
                )
            )
        await self._wait_for_tasks()
        for exchange in list(self._exchanges):
            exchange.abort()
        await self._wait_for_tasks()
        if self._exchanges:
            logger.error("%d handlers of endpoint %s ignore their cancellation", len(self._exchanges), self.name)

    # --- what is in flight ---

    @property
    def in_flight(self) -> int:
        """Requests whose caller does not have the whole answer yet."""
        return len(self._exchanges)

    def in_flight_ids(self) -> tuple[str, ...]:
        """Their request ids, in no order."""
        return tuple(exchange.context.request_id for exchange in self._exchanges)

    @property
    def pending_bytes(self) -> int:
        """Produced and not yet taken by the kernel, over all requests; bounded for each of them."""
        return sum(exchange.pending_bytes for exchange in self._exchanges)

    async def wait_idle(self, timeout_s: float) -> bool:
        """True once nothing is in flight *and* the linger window is over; False past the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._exchanges or self._linger_left_s() > 0:
                    self._changed.clear()
                    await self._wait_changed()
        except TimeoutError:
            return False
        return True

    async def _wait_changed(self) -> None:
        left_s = self._linger_left_s()
        try:
            async with asyncio.timeout(left_s if left_s > 0 else None):
                await self._changed.wait()
        except TimeoutError:
            return  # the linger window is over, which `wait_idle` must see

    def _linger_left_s(self) -> float:
        if self._accept_until_s is None:
            return 0.0
        return max(0.0, self._accept_until_s - self._clock.now_s())

    async def _wait_for_tasks(self) -> None:
        tasks = [exchange.task for exchange in self._exchanges]
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_TIMEOUT_S)

    # --- requests ---

    async def _on_message(self, message: Msg) -> None:
        if not message.data:
            return  # a caller's probe: its delivery is the answer
        try:
            header = decode_header(message.data)
        except errors.RequestError as error:
            await self._refuse(message, error)
            return
        with bound(header.x_request_id):
            try:
                self._admit(header)
            except errors.RequestError as error:
                await self._refuse(message, error)
                return
            self._take(header, None)

    def _on_asked(self, data: bytes, connection: asyncio.Transport) -> None:
        """A request on a connection that was kept after a former answer."""
        try:
            header = decode_header(data)
            if header.until_s is not None and time.monotonic() >= header.until_s:
                connection.abort()  # we have hung; its caller has asked somebody else
                return
            with bound(header.x_request_id):
                self._admit(header)
                self._take(header, connection)
        except errors.RequestError as error:
            connection.write(frame(FrameKind.ERROR, 0, encode_error(error)))
            connection.close()

    def _take(self, header: RequestHeader, kept: asyncio.Transport | None) -> None:
        """Serve it, in a task that inherits the request's id for the log."""
        self._handlers_running += 1
        exchange = Exchange(
            self.name,
            header,
            self._handler,
            self._decode,
            self._clock,
            self._handler_done,
            keep=self._kept.keep,
            kept=kept,
        )
        self._exchanges.add(exchange)
        exchange.task.add_done_callback(lambda task: self._exchange_done(exchange, task))

    def _admit(self, header: RequestHeader) -> None:
        """Raises the refusal of a request that is not taken."""
        late = self._accept_until_s is not None
        if self._closed or (late and self._linger_left_s() == 0):
            raise errors.WorkerDraining(f"endpoint {self.name} takes no requests any more: its worker is leaving")
        if header.remaining_s is not None and header.remaining_s <= 0:
            raise errors.DeadlineExceeded(f"the deadline of request {header.request_id} passed on its way")
        if self._max_inflight is not None and self._handlers_running >= self._max_inflight:
            raise errors.WorkerBusy(
                f"endpoint {self.name} runs {self._handlers_running} requests already, its limit", retry_after_s=1.0
            )
        if late:
            self.late_accepted += 1

    async def _refuse(self, message: Msg, error: errors.RequestError) -> None:
        if not message.reply:
            logger.warning("a message to %s that is no request was dropped: %s", self.subject, error)
            return
        try:
            await self._nats.publish(message.reply, encode_error(error))
        except (NatsError, OSError) as failure:
            # The caller sees that NATS is gone, too, and gives up by itself.
            logger.warning("a refusal on %s could not be sent: %s", self.subject, failure)

    def _handler_done(self) -> None:
        self._handlers_running -= 1

    def _exchange_done(self, exchange: Exchange, task: asyncio.Task[None]) -> None:
        self._exchanges.discard(exchange)
        self._changed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("request %s failed in our own code", exchange.context.request_id, exc_info=error)

    # --- NATS ---

    async def _subscribe(self, subject: str) -> Subscription:
        with nats_call(self._nats, f"serve {subject}"):
            subscription = await self._nats.subscribe(subject, cb=self._on_message)
            await flush(self._nats)
        return subscription

    async def _unsubscribe(self, subscription: Subscription) -> None:
        """End the subscription and answer what had already arrived for it."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                if self._nats.is_connected:
                    await subscription.drain()
                    await flush(self._nats)
                else:
                    await subscription.unsubscribe()
        except (NatsError, OSError, TimeoutError) as error:
            # NATS has lost the connection and so the subscription: nothing is left to undo.
            logger.info("the subscription to %s ended with its connection: %s", subscription.subject, error)
