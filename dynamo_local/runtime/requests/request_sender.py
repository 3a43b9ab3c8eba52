"""One attempt: a request to one instance, and how its acceptance comes back."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Final

from dynamo_local import errors
from dynamo_local.clock import Clock
from dynamo_local.core.types import Instance, lease_hex
from dynamo_local.runtime.nats_client import Client, Msg, NatsError, Subscription
from dynamo_local.runtime.nats_errors import flush, nats_call
from dynamo_local.runtime.requests.frames import (
    MAX_INLINE_BYTES,
    WIRE_VERSION,
    RequestHeader,
    decode_error,
    encode_header,
)
from dynamo_local.runtime.requests.lines import Line, Lines
from dynamo_local.runtime.requests.listener import Offer, ResponseListener
from dynamo_local.runtime.requests.stream import InboundStream
from dynamo_local.system.logs.request_log import x_request_id

ACCEPT_TIMEOUT_S: Final = 5.0
"""A worker that takes nothing for so long, of what was sent to it, counts as gone. A healthy one needs under a
millisecond for one request; one that is asked a thousand at once may need longer for the last (`requests.lines`)."""

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
        self._lines = Lines(accept_timeout_s, self._silent, self._probe)
        self._numbers = itertools.count(1)

    async def start(self) -> None:
        """Raises `NatsUnavailable`."""
        await self.listener.start()
        self._inbox = self._nats.new_inbox()
        try:
            with nats_call(self._nats, "subscribe to the inbox for refusals"):
                self._subscription = await self._nats.subscribe(f"{self._inbox}.*", cb=self._on_reply)
                await flush(self._nats)
        except BaseException:
            await self.listener.close()
            raise

    async def close(self) -> None:
        """Calls that wait, and streams that are open, end with `RequestCancelled`."""
        await self.listener.close()
        await self._lines.close()
        if self._subscription is None:
            return
        subscription, self._subscription = self._subscription, None
        try:
            await subscription.unsubscribe()
        except NatsError:
            return  # the connection is closed, and the subscription with it

    async def send(
        self, instance: Instance, request_id: str, payload: bytes, deadline_s: float | None
    ) -> InboundStream:
        """Returns the connection on which the answer comes. `deadline_s` is absolute, of `clock.now_s()`.

        Raises what the worker refused with, `WorkerLost`, `DeadlineExceeded` or `NatsUnavailable`. After any of these
        the handler has not run and will not: it starts only when we have greeted its connection, or within the time for
        which we wait where the worker has left one open.
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
        )
        try:
            with self._lines.waiting(offer, self._nats.stats["reconnects"]):
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
                self._lines.took(instance.subject)
                return inbound
        except BaseException:
            inbound.discard()
            raise
        finally:
            timer.cancel()
        if inbound.refusal is None:
            kept.forget(instance.subject)
        elif inbound.refusal is not late or overdue or not self._lines.is_taking(instance.subject):
            raise inbound.refusal
        return None  # a worker that is busy with others does not hang: to the end of its line

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

    async def _probe(self, line: Line) -> None:
        """An empty message: servers ignore it, and NATS answers "no responders" if the worker is gone."""
        with nats_call(self._nats, f"hear from {line.subject}"):
            line.refuse(_restarted, unless_of=self._nats.stats["reconnects"])
            await self._nats.publish(line.subject, b"", reply=f"{self._inbox}.{line.name}")

    async def _on_reply(self, message: Msg) -> None:
        name = message.subject.rpartition(".")[2]
        gone = (message.headers or {}).get("Status") == NO_RESPONDERS
        if gone and (line := self._lines.named(name)) is not None:
            line.refuse(_gone)
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
