"""A worker's endpoint: takes requests from a NATS subject and answers each over a connection of its own."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Final

from dynamo_local import errors
from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.system import tracing
from dynamo_local.system.fd_messages import peer_of
from dynamo_local.system.request_log import bound
from dynamo_local.system.unread import is_abandoned
from dynamo_local.transport.nats import CALL_TIMEOUT_S, flush, subscribe
from dynamo_local.transport.nats_client import Client, Msg, NatsError, Subscription
from dynamo_local.transport.requests.frames import (
    Decode,
    FrameKind,
    RequestHeader,
    decode_header,
    decode_value,
    encode_error,
    frame,
)
from dynamo_local.transport.requests.handlers import Handler, RequestContext, drive
from dynamo_local.transport.requests.listener import NAMES
from dynamo_local.transport.requests.responses import CallersConnections, Keep, ResponseSender

# One request on the worker: connect back, run the handler, deliver.

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S: Final = 5.0
"""Deadline for the connection and the caller's GO. A slower caller has given the request up."""


class Exchange:
    """A request that a worker took, from connecting back until the caller has the end of the answer.

    `on_handler_done` is called once, when the handler has ended or will never start; the task that `start`
    gives ends later, when the caller has everything. Errors go to the caller, never out of the task. `kept` is the
    connection on which the request came, where one was kept; `keep` takes it over at the end.
    """

    def __init__(
        self,
        endpoint: str,
        header: RequestHeader,
        handler: Handler,
        decode: Decode,
        clock: Clock,
        on_handler_done: Callable[[], None],
        keep: Keep | None = None,
        kept: asyncio.Transport | None = None,
    ) -> None:
        deadline_s = None if header.remaining_s is None else clock.now_s() + header.remaining_s
        self.context = RequestContext(header.request_id, deadline_s, clock)
        self._endpoint = endpoint
        self._header = header
        self._clock = clock
        self._began_s = clock.now_s()
        self._handler = handler
        self._decode = decode
        self._on_handler_done = on_handler_done
        self._keep = keep
        self._sender: ResponseSender | None = None
        self._handling = True
        self._stopped = False
        self._task = asyncio.create_task(self._run(), name=f"request-{header.request_id}")
        if kept is not None:
            self._sender = self._make_sender()
            self._sender.keep = keep
            self._sender.resume(kept)

    @property
    def task(self) -> asyncio.Task[None]:
        """The handler's; done when the request is."""
        return self._task

    @property
    def pending_bytes(self) -> int:
        """The buffered part of its answer that is not yet sent."""
        return 0 if self._sender is None else self._sender.pending_bytes

    def unread_s(self) -> float | None:
        """For how long its caller has taken nothing of the answer. None: nothing waits for that."""
        return None if self._sender is None else self._sender.unread_s()

    def fail(self, error: errors.DynamoError) -> None:
        """Tell the caller `error` now, without waiting for the handler, which is cancelled."""
        if self._sender is not None:
            self._sender.end(error)
        self._stop_handler()

    def abort(self) -> None:
        """Drop the connection, whether or not the caller has everything, and cancel the handler."""
        if self._sender is not None:
            self._sender.abort()
        self._stop_handler()

    def _stop_handler(self) -> None:
        if self._handling and not self._stopped:
            self._stopped = True
            self._task.cancel()

    def _expired(self) -> None:
        self.fail(errors.DeadlineExceeded(f"the deadline of request {self._header.request_id} passed in the worker"))

    async def _run(self) -> None:
        timer: asyncio.TimerHandle | None = None
        if self._header.remaining_s is not None:
            timer = asyncio.get_running_loop().call_later(self._header.remaining_s, self._expired)
        try:
            await self._handle()
            if self._sender is not None and self._sender.finished:
                # The caller closes once it has the end. Until then the request is in flight: if this process ended now,
                # data in the kernel's buffers would be lost.
                await self._sender.lost
        finally:
            if timer is not None:
                timer.cancel()
            if self._sender is not None:
                self._sender.abort()

    async def _handle(self) -> None:
        try:
            payload = await self._connect()
            if payload is not None:
                assert self._sender is not None
                await self._respond(payload, self._sender)
        except asyncio.CancelledError:
            if not self._stopped:
                raise
            self._task.uncancel()
        finally:
            self._handling = False
            self._on_handler_done()

    async def _connect(self) -> bytes | None:
        """The encoded payload once the caller has sent GO; None if it wants no answer any more."""
        header = self._header
        if self._sender is not None:
            return header.payload
        if not _is_loopback(header.host):
            logger.warning("request %s wants its answer at %s, which is not loopback", header.request_id, header.host)
            return None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                sock = _unix_socket(header.socket)
                if sock is None:
                    _, self._sender = await loop.create_connection(self._make_sender, header.host, header.port)
                else:
                    _, self._sender = await loop.create_unix_connection(self._make_sender, sock=sock)
                    self._sender.keep = self._keep if header.keep else None
                follows = await self._sender.go
        except (OSError, TimeoutError) as error:
            logger.info("the caller of request %s could not be reached: %s", header.request_id, error)
            return None
        if follows is None:
            logger.debug("the caller of request %s wants no answer any more", header.request_id)
            return None
        return follows if header.payload is None else header.payload

    def _make_sender(self) -> ResponseSender:
        return ResponseSender(self._header.token, on_lost=self._stop_handler)

    async def _respond(self, payload: bytes, sender: ResponseSender) -> None:
        with tracing.span(self._endpoint, "server") as span:
            await self._responded(payload, sender, span)

    async def _responded(self, payload: bytes, sender: ResponseSender, span: tracing.Span) -> None:
        request_id = self._header.request_id
        try:
            await drive(self._handler, self._decode(payload), self.context, sender.put)
        except asyncio.CancelledError:
            if self._stopped:
                self._log_end("stopped: its caller went away, or its time was over")
                raise
            # Either the process is going down, or the handler awaited something that was cancelled.
            self._log_end("cancelled by the worker")
            sender.end(errors.RequestCancelled(f"the worker cancelled request {request_id}"))
            if self._task.cancelling():
                raise
        except errors.DynamoError as error:
            self._log_end(f"{type(error).__name__}: {error}")
            span.failed(type(error).__name__)
            sender.end(error)
        except Exception as error:  # foreign code: its errors go to the caller and to our log
            logger.exception("the handler of request %s failed", request_id)
            span.failed(type(error).__name__)
            sender.end(error)
        else:
            self._log_end("done")
            sender.end()

    def _log_end(self, how: str) -> None:
        """One line for each request of a client: those without an id (status, loads, Router queries) are not logged."""
        if self._header.x_request_id:
            passed_ms = (self._clock.now_s() - self._began_s) * 1e3
            logger.info("%s of request %s after %.0f ms: %s", self._endpoint, self._header.request_id, passed_ms, how)


def _unix_socket(name: str) -> socket.socket | None:
    """Connected to the caller's; None where it has none, or takes no more at the moment: its port may."""
    if not name.startswith(NAMES):
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    try:
        sock.connect(f"\0{name}")  # at once, or not: a full queue is an error here
        if peer_of(sock)[1] == os.geteuid():  # what comes on it later are requests
            return sock
    except OSError:
        pass
    sock.close()
    return None


def _is_loopback(host: str) -> bool:
    """Whether it is a literal loopback address: a name could resolve to anything."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


LINGER_S: Final = 1.0
"""How long after deregistering requests may still be on their way: etcd watches tell callers within 50 ms."""

CLOSE_TIMEOUT_S: Final = 2.0
"""For callers to take the error frame, and for handlers to run their `finally`, when an endpoint is closed."""


class EndpointServer:
    """Serves `handler` on `subject`. Every request ends with an answer, an error or a refusal.

    `late_accepted` counts requests that were served after `stop_accepting`, in the linger window. `abandoned` counts
    answers that nobody read, and that `end_unread` has ended.
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
        self._kept = CallersConnections(self._on_request)
        self._handlers_running = 0
        self._accept_until_s: float | None = None
        self._stopped_s = 0.0
        self._closed = False
        self._changed = asyncio.Event()
        self.abandoned = 0

    # --- life ---

    async def start(self) -> None:
        """Take requests. On return NATS routes them here, so the endpoint may be registered."""
        self._subscription = await self._subscribe(self.subject)

    async def rebind(self, subject: str) -> None:
        """Serve `subject` instead (the lease was granted anew). Open streams go on; the old subject is given up."""
        old, self._subscription = self._subscription, await self._subscribe(subject)
        self.subject = subject
        self._kept.close()  # whoever asks on them means the old subject
        self._kept = CallersConnections(self._on_request)
        if old is not None:
            await self._unsubscribe(old)

    def stop_accepting(self, linger_s: float = LINGER_S) -> None:
        """The worker was deregistered: serve what comes within `linger_s`, then refuse with `WorkerDraining`.

        The caller is told of each refusal, and sends the request to another worker.
        """
        self._stopped_s = self._clock.now_s()
        self._accept_until_s = self._stopped_s + linger_s
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

    def unread_s(self) -> list[float]:
        """For how long the caller of each answer has taken nothing of it, where something waits for that."""
        return [seconds for each in self._exchanges if (seconds := each.unread_s()) is not None]

    def end_unread(self, bound_s: float) -> None:
        """End the answers of which no byte was taken for `bound_s` since the worker began to leave.

        Their callers wait for clients that do not read. They would hold the worker up until its drain deadline.
        """
        left_s = self._clock.now_s() - self._stopped_s
        for exchange in list(self._exchanges):
            unread_s = exchange.unread_s()
            if not is_abandoned(unread_s, left_s, bound_s):
                continue
            self.abandoned += 1
            request_id = exchange.context.request_id
            logger.warning("%s of request %s: ended, as nobody has read it for %.0f s", self.name, request_id, unread_s)
            exchange.abort()

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

    def _on_request(self, data: bytes, connection: asyncio.Transport) -> None:
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
        """Serve it, in a task that inherits the request's id for the log, and its trace."""
        self._handlers_running += 1
        with tracing.continued(header.trace):
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
        return await subscribe(self._nats, subject, self._on_message, f"serve {subject}")

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
