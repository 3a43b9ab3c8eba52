"""One attempt: a request to one instance, and how its acceptance comes back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

from dynamo_local import errors
from dynamo_local.clock import Clock
from dynamo_local.core.types import Instance, lease_hex
from dynamo_local.system import tracing
from dynamo_local.system.request_log import x_request_id
from dynamo_local.transport.nats import nats_call, subscribe, unsubscribe
from dynamo_local.transport.nats_client import Client, Msg, NatsError, Subscription
from dynamo_local.transport.requests.frames import (
    MAX_INLINE_BYTES,
    WIRE_VERSION,
    RequestHeader,
    decode_error,
    encode_header,
)
from dynamo_local.transport.requests.listener import Offer, ResponseListener
from dynamo_local.transport.requests.stream import InboundStream

# Requests that a worker has not accepted yet: one queue per worker endpoint, and one watch per queue.
#
# A worker takes requests in the order in which they were sent. As long as its queue moves, the worker is busy, and not
# gone. On a starved host a burst may take longer than a worker may be silent. (Seen: each of a thousand requests gave
# its worker up after five seconds, for another one whose queue was as long. Each asked NATS four times a second whether
# its worker was still there. Nothing was answered for more than a minute.)
PROBE_INTERVAL_S: Final = 0.25
"""Seconds until a waiting request notices that its worker, or NATS, is gone."""

REMEMBERED: Final = 256
"""Number of workers whose last accepted request is remembered: the most recent ones."""

Probe = Callable[["AcceptQueue"], Awaitable[None]]
"""Asks NATS whether a worker serves the queue's subject. The reply goes to `AcceptQueue.refuse`.

Raises if NATS is away."""


class _Waiting:
    """One request in a queue. `connection` is the number of the NATS connection that carries it.

    `since_s`: when it came, or when the queue last moved before it, in the queue's time.
    """

    __slots__ = ("connection", "number", "offer", "since_s")

    def __init__(self, number: int, offer: Offer, since_s: float, connection: int) -> None:
        self.number = number
        self.offer = offer
        self.since_s = since_s
        self.connection = connection


class AcceptQueue:
    """Offers to one endpoint of one worker, in the order in which they were sent.

    The queue's clock advances by at most two intervals between ticks. If our own event loop is late, that time does not
    count as silence of the worker, because we could not have heard anything.
    """

    def __init__(self, subject: str, name: str, interval_s: float, clock_s: Callable[[], float]) -> None:
        self.subject = subject
        self.name = name
        self.timer: asyncio.TimerHandle | None = None
        self._interval_s = interval_s
        self._clock_s = clock_s
        self._numbers = itertools.count()
        self._waiting: dict[Offer, _Waiting] = {}
        self._moves: list[tuple[int, float]] = []
        self._time_s = 0.0
        self._ticked_s = clock_s()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def now_s(self) -> float:
        """Seconds, by the queue's clock."""
        return self._time_s + min(self._clock_s() - self._ticked_s, 2 * self._interval_s)

    def join(self, offer: Offer, connection: int) -> None:
        """Append the offer."""
        self._waiting[offer] = _Waiting(next(self._numbers), offer, self.now_s, connection)

    def leave(self, offer: Offer, *, taken: bool) -> None:
        """Remove the offer. `taken`: the worker accepted it, so all offers behind it have moved up."""
        waiting = self._waiting.pop(offer)
        if taken:
            self._moves.append((waiting.number, self.now_s))

    def open(self) -> list[Offer]:
        """The offers without an answer."""
        return [offer for offer in self._waiting if not offer.answer.done()]

    def tick(self, silence_s: float) -> list[Offer]:
        """Offers that have not moved up for `silence_s` seconds."""
        self._time_s, self._ticked_s = self.now_s, self._clock_s()
        moves, self._moves = sorted(self._moves), []
        at, moved_s = 0, 0.0
        silent = []
        for waiting in self._waiting.values():
            while at < len(moves) and moves[at][0] < waiting.number:
                moved_s = max(moved_s, moves[at][1])
                at += 1
            waiting.since_s = max(waiting.since_s, moved_s)
            if self._time_s - waiting.since_s >= silence_s and not waiting.offer.answer.done():
                silent.append(waiting.offer)
        return silent

    def refuse(self, why: Callable[[str], errors.DynamoError], *, unless_of: int | None = None) -> None:
        """Refuse all offers, except those sent over the connection `unless_of`. `why` takes the worker's name."""
        for waiting in self._waiting.values():
            if waiting.connection != unless_of:
                waiting.offer.refuse(why(waiting.offer.who))


class AcceptQueues:
    """The queues of one caller. A worker that is silent for `silence_s` has its offers refused with `silent`."""

    def __init__(self, silence_s: float, silent: Callable[[str], errors.WorkerLost], probe: Probe) -> None:
        self._silence_s = silence_s
        self._silent = silent
        self._probe = probe
        self._interval_s = min(PROBE_INTERVAL_S, silence_s / 2)
        self._queues: dict[str, AcceptQueue] = {}
        self._taken_s: dict[str, float] = {}
        self._probing: set[asyncio.Task[None]] = set()
        self._names = itertools.count(1)

    @contextmanager
    def waiting(self, offer: Offer, connection: int) -> Iterator[None]:
        """While the offer waits to be taken. `connection` is the number of the NATS connection that has it."""
        queue = self._queues.get(offer.subject)
        if queue is None:
            name, clock_s = f"queue-{next(self._names)}", asyncio.get_running_loop().time
            queue = self._queues[offer.subject] = AcceptQueue(offer.subject, name, self._interval_s, clock_s)
            self._tick_later(queue)
        queue.join(offer, connection)
        try:
            yield
        finally:
            answer = offer.answer
            taken = answer.done() and not answer.cancelled() and answer.exception() is None
            queue.leave(offer, taken=taken)
            if taken:
                self.took(offer.subject)
            if not queue:
                del self._queues[offer.subject]
                if queue.timer is not None:
                    queue.timer.cancel()

    def took(self, subject: str) -> None:
        """The worker has accepted a request, queued or not."""
        self._taken_s.pop(subject, None)
        self._taken_s[subject] = asyncio.get_running_loop().time()
        if len(self._taken_s) > REMEMBERED:
            del self._taken_s[next(iter(self._taken_s))]

    def is_taking(self, subject: str) -> bool:
        """Whether that worker has taken a request lately: it is busy then, and does not hang."""
        taken_s = self._taken_s.get(subject)
        return taken_s is not None and asyncio.get_running_loop().time() - taken_s < self._silence_s

    def named(self, name: str) -> AcceptQueue | None:
        """The queue whose probe has this name."""
        return next((queue for queue in self._queues.values() if queue.name == name), None)

    async def close(self) -> None:
        """Watch no longer; whoever waits is refused by the listener."""
        for queue in self._queues.values():
            if queue.timer is not None:
                queue.timer.cancel()
        for task in self._probing:
            task.cancel()
        if self._probing:
            await asyncio.wait(self._probing)

    def _tick_later(self, queue: AcceptQueue) -> None:
        queue.timer = asyncio.get_running_loop().call_later(self._interval_s, self._tick, queue)

    def _tick(self, queue: AcceptQueue) -> None:
        for offer in queue.tick(self._silence_s):
            offer.refuse(self._silent(offer.who))
        self._tick_later(queue)
        if queue.open():
            task = asyncio.create_task(self._probed(queue), name=f"probe of {queue.subject}")
            self._probing.add(task)
            task.add_done_callback(self._probing.discard)

    async def _probed(self, queue: AcceptQueue) -> None:
        try:
            await self._probe(queue)
        except errors.NatsUnavailable as error:
            why = str(error)
            queue.refuse(lambda _: errors.NatsUnavailable(why))


ACCEPT_TIMEOUT_S: Final = 5.0
"""A worker that accepts none of its requests for so long counts as gone. A healthy one accepts a request in under a
millisecond. With a thousand at once the last one may wait longer (`AcceptQueue`)."""

NO_RESPONDERS: Final = "503"

GONE: Final = "no_responders"
SILENT: Final = "accept_timeout"
"""`details["reason"]` of a `WorkerLost` before the request was accepted."""


class RequestSender:
    """Sends requests over one NATS connection and waits for the worker's connection, or for its refusal.

    All refusals come to one wildcard inbox: a subscription per request would cost two more messages.
    """

    def __init__(self, nats: Client, clock: Clock, accept_timeout_s: float = ACCEPT_TIMEOUT_S) -> None:
        self.clock = clock
        self.listener = ResponseListener()
        self._nats = nats
        self._accept_timeout_s = accept_timeout_s
        self._inbox = ""
        self._subscription: Subscription | None = None
        self._waiting: dict[str, Offer] = {}
        self._queues = AcceptQueues(accept_timeout_s, self._silent, self._probe)
        self._numbers = itertools.count(1)

    async def start(self) -> None:
        """Raises `NatsUnavailable`."""
        await self.listener.start()
        self._inbox = self._nats.new_inbox()
        try:
            self._subscription = await subscribe(
                self._nats, f"{self._inbox}.*", self._on_reply, "subscribe to the inbox for refusals"
            )
        except BaseException:
            await self.listener.close()
            raise

    async def close(self) -> None:
        """Calls that wait, and streams that are open, end with `RequestCancelled`."""
        await self.listener.close()
        await self._queues.close()
        subscription, self._subscription = self._subscription, None
        with contextlib.suppress(NatsError):  # the connection is closed, and the subscription with it
            await unsubscribe(self._nats, subscription)

    async def send(
        self, instance: Instance, request_id: str, payload: bytes, deadline_s: float | None
    ) -> InboundStream:
        """Returns the connection on which the answer comes. `deadline_s` is absolute, of `clock.now_s()`.

        Raises what the worker refused with, `WorkerLost`, `DeadlineExceeded` or `NatsUnavailable`. After any of
        these the handler has not run and will not. It starts only when we have greeted its connection. On a
        connection that the worker has left open, it starts only within the time for which we wait.
        """
        if (again := await self._asked_again(instance, request_id, payload, deadline_s)) is not None:
            return again
        inline = len(payload) <= min(MAX_INLINE_BYTES, self._nats.max_payload // 2)
        offer = self.listener.offer(_name(instance), b"" if inline else payload, instance.subject)
        number = str(next(self._numbers))
        self._waiting[number] = offer
        header = RequestHeader(
            version=WIRE_VERSION,
            request_id=request_id,
            remaining_s=None if deadline_s is None else deadline_s - self.clock.now_s(),
            host=self.listener.host,
            port=self.listener.port,
            token=offer.token,
            payload=payload if inline else None,
            x_request_id=x_request_id(),
            socket=self.listener.name,
            keep=True,
            trace=tracing.carrier(),
        )
        try:
            with self._queues.waiting(offer, self._nats.stats["reconnects"]):
                with nats_call(self._nats, f"send request {request_id} to {offer.who}"):
                    await self._nats.publish(instance.subject, encode_header(header), reply=f"{self._inbox}.{number}")
                return await self._accepted(offer, deadline_s)
        except BaseException:
            self.listener.withdraw(offer)
            raise
        finally:
            del self._waiting[number]

    async def _asked_again(
        self, instance: Instance, request_id: str, payload: bytes, deadline_s: float | None
    ) -> InboundStream | None:
        """Over the connection of a former answer, which costs neither NATS nor a new connection.

        None where there is none, or it broke before the worker took the request: NATS knows what has become of it.
        """
        kept = self.listener.kept
        if len(payload) > MAX_INLINE_BYTES or not kept.has(instance.subject):
            return None
        left_s = None if deadline_s is None else deadline_s - self.clock.now_s()
        wait_s = self._accept_timeout_s if left_s is None else min(left_s, self._accept_timeout_s)
        header = RequestHeader(
            version=WIRE_VERSION,
            request_id=request_id,
            remaining_s=left_s,
            host="",
            port=0,
            token=b"",
            payload=payload,
            x_request_id=x_request_id(),
            keep=True,
            until_s=time.monotonic() + wait_s,
            trace=tracing.carrier(),
        )
        who = _name(instance)
        inbound = self.listener.ask_again(instance.subject, who, encode_header(header))
        if inbound is None or inbound.taken is None:
            return None
        overdue = wait_s < self._accept_timeout_s
        late: errors.DynamoError = _overdue(who) if overdue else self._silent(who)
        timer = inbound.loop.call_later(wait_s, inbound.give_up, late)
        try:
            if await inbound.taken:
                self._queues.took(instance.subject)
                return inbound
        except BaseException:
            inbound.discard()
            raise
        finally:
            timer.cancel()
        if inbound.refusal is None:
            kept.forget(instance.subject)
        elif inbound.refusal is not late or overdue or not self._queues.is_taking(instance.subject):
            raise inbound.refusal
        return None  # a worker that is busy with others does not hang: to the end of its queue

    async def _accepted(self, offer: Offer, deadline_s: float | None) -> InboundStream:
        """The worker's connection. Raises what the offer was refused with."""
        if deadline_s is None:
            return await offer.answer
        left_s = max(0.0, deadline_s - self.clock.now_s())
        timer = asyncio.get_running_loop().call_later(left_s, offer.refuse, _overdue(offer.who))
        try:
            return await offer.answer
        finally:
            timer.cancel()

    def _silent(self, who: str) -> errors.WorkerLost:
        return errors.WorkerLost(
            f"{who} did not take the request within {self._accept_timeout_s:g} s; it hangs, or is gone", reason=SILENT
        )

    async def _probe(self, queue: AcceptQueue) -> None:
        """An empty message: servers ignore it, and NATS answers "no responders" if the worker is gone."""
        with nats_call(self._nats, f"hear from {queue.subject}"):
            queue.refuse(_restarted, unless_of=self._nats.stats["reconnects"])
            await self._nats.publish(queue.subject, b"", reply=f"{self._inbox}.{queue.name}")

    async def _on_reply(self, message: Msg) -> None:
        name = message.subject.rpartition(".")[2]
        gone = (message.headers or {}).get("Status") == NO_RESPONDERS
        if gone and (queue := self._queues.named(name)) is not None:
            queue.refuse(_gone)
        elif (offer := self._waiting.get(name)) is not None:  # else it was given up meanwhile
            offer.refuse(_gone(offer.who) if gone else decode_error(message.data))


def _restarted(who: str) -> errors.NatsUnavailable:
    return errors.NatsUnavailable(f"NATS was restarted while a request to {who} was on its way; send it again")


def _gone(who: str) -> errors.WorkerLost:
    return errors.WorkerLost(
        f"{who} is gone: nobody serves its subject; it is still registered until etcd knows", reason=GONE
    )


def _overdue(who: str) -> errors.DeadlineExceeded:
    return errors.DeadlineExceeded(f"the deadline passed before {who} took the request")


def _name(instance: Instance) -> str:
    return f"{instance.component}/{instance.endpoint}:{lease_hex(instance.lease_id)}"
