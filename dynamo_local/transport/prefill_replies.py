"""How a prefill's result comes back to the decode worker: by a core-NATS request, not through the queue.

The decode side confirms each reply. So the prefill worker knows whether its KV is wanted: nobody listening
(`WorkerLost`) or nobody waiting (`RequestCancelled`) means "free it now".
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import msgspec

from dynamo_local.errors import DeadlineExceeded, NatsUnavailable, RequestCancelled, WorkerLost, from_wire, to_wire
from dynamo_local.system.request_log import bound, x_request_id
from dynamo_local.transport.decoding import UNREADABLE, decode
from dynamo_local.transport.nats import flush, nats_call, subscribe
from dynamo_local.transport.nats_client import Client, Msg, NoRespondersError

log = logging.getLogger(__name__)

SEND_TIMEOUT_S = 1.0
SEND_DEADLINE_S = 5.0
RETRY_PAUSE_S = 0.1
REMEMBERED = 1024
"""How many accepted replies are remembered, so that a repeated one (its confirmation was lost) is confirmed again."""

_decoder = msgspec.msgpack.Decoder()
_ACCEPTED, _UNWANTED = b"accepted", b"unwanted"


class ExpectedReply:
    """One awaited result. Use it as a context manager: leaving the block means "not wanted any more"."""

    def __init__(self, replies: PrefillReplies, request_id: str) -> None:
        self._replies = replies
        self.request_id = request_id
        self.future: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()

    async def wait(self, timeout_s: float) -> Any:
        """The result. Raises `DeadlineExceeded` past `timeout_s`, or the error that the prefill side sent."""
        await asyncio.wait((self.future,), timeout=max(0.0, timeout_s))
        self.close()
        if not self.future.done():
            raise DeadlineExceeded(f"no prefill of {self.request_id} within {timeout_s:.2f} s; prefill it locally")
        message = self.future.result()
        if message.get("error") is not None:
            raise from_wire(message["error"])
        return message.get("result")

    @property
    def taken(self) -> Any:
        """The result, if one was accepted: its KV is ours to pull. None for an error too."""
        return self.future.result().get("result") if self.future.done() and not self.future.cancelled() else None

    def close(self) -> None:
        """A reply that comes from now on is refused."""
        self._replies.forget(self)

    def __enter__(self) -> ExpectedReply:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class PrefillReplies:
    """Both ends: `expect` on the decode side, `send_reply` on the prefill side."""

    def __init__(self, nats: Client, namespace: str) -> None:
        self._nats = nats
        self._subject = f"{namespace}.prefill_replies.{uuid.uuid4().hex}"
        self._subscription: Any = None
        self._expected: dict[str, ExpectedReply] = {}
        self._accepted: OrderedDict[str, None] = OrderedDict()

    @property
    def reply_subject(self) -> str:
        """Goes into the entry's payload; the prefill side sends there."""
        return self._subject

    async def start(self) -> None:
        """Listen (decode side only). Raises `NatsUnavailable`."""
        if self._subscription is None:
            self._subscription = await subscribe(
                self._nats, self._subject, self._on_reply, "listen for prefill replies"
            )

    async def close(self) -> None:
        """Stop listening: senders are told that nobody is there."""
        if self._subscription is not None and self._nats.is_connected:
            try:
                with nats_call(self._nats, "stop listening for prefill replies"):
                    await self._subscription.unsubscribe()
                    await flush(self._nats)  # otherwise the next sender still finds a responder, which never answers
            except NatsUnavailable as error:
                log.debug("%s", error)
        self._subscription = None
        self._expected.clear()

    def expect(self, request_id: str) -> ExpectedReply:
        """Register *before* enqueuing. RuntimeError if not started, or if the id is awaited already."""
        if self._subscription is None:
            raise RuntimeError("PrefillReplies.expect() before start()")
        if request_id in self._expected:
            raise RuntimeError(f"a prefill of {request_id} is awaited already")
        expected = self._expected[request_id] = ExpectedReply(self, request_id)
        return expected

    def forget(self, expected: ExpectedReply) -> None:
        """Called by `ExpectedReply.close`."""
        if self._expected.get(expected.request_id) is expected:
            del self._expected[expected.request_id]

    async def send_reply(self, subject: str, request_id: str, result: Any) -> None:
        """Deliver `result` (what msgpack can carry), or an exception; returns when the decode side has taken it.

        Raises `WorkerLost` (the decode worker is gone), `RequestCancelled` (it does not wait: cancelled, past
        its deadline, or served by another attempt): in both cases free the KV. `NatsUnavailable`: it is not known
        whether it arrived.
        """
        message: dict[str, Any] = {"request_id": request_id, "reply_id": uuid.uuid4().hex}
        message["x_request_id"] = x_request_id()
        if isinstance(result, BaseException):
            message["error"] = to_wire(result)
        else:
            message["result"] = result
        answer = await self._request(subject, request_id, msgspec.msgpack.encode(message))
        if answer == _UNWANTED:
            raise RequestCancelled(f"the prefill of {request_id} is not wanted any more; free its KV")
        if answer != _ACCEPTED:
            raise NatsUnavailable(f"the decode side of {request_id} answered {answer[:80]!r}")

    async def _request(self, subject: str, request_id: str, data: bytes) -> bytes:
        """Ask until `SEND_DEADLINE_S`, over an outage of NATS too: the work behind this reply is expensive."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + SEND_DEADLINE_S
        reconnects = self._nats.stats["reconnects"]
        outage = False
        while True:
            try:
                with nats_call(self._nats, f"send the prefill result of {request_id}"):
                    return (await self._nats.request(subject, data, timeout=SEND_TIMEOUT_S)).data
            except NatsUnavailable as error:
                outage = outage or not self._nats.is_connected or self._nats.stats["reconnects"] != reconnects
                past = loop.time() >= deadline_s
                # After an outage the decode worker may simply not have reconnected yet.
                if isinstance(error.__cause__, NoRespondersError) and (past or not outage):
                    raise WorkerLost(f"the decode worker that asked for {request_id} is gone; free its KV") from error
                if past:
                    raise
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _on_reply(self, msg: Msg) -> None:
        try:
            message = decode(_decoder, msg.data)
            request_id, reply_id = str(message["request_id"]), str(message["reply_id"])
        except (*UNREADABLE, TypeError, KeyError) as error:
            log.warning("something that is no prefill reply came on %s: %s", self._subject, error)
            return
        with bound(str(message.get("x_request_id", ""))):
            with_answer = _ACCEPTED if self._accept(request_id, reply_id, message) else _UNWANTED
            if with_answer == _UNWANTED:
                log.info("a prefill of %s came that nobody waits for: refused", request_id)
            try:
                with nats_call(self._nats, f"confirm the prefill of {request_id}"):
                    await msg.respond(with_answer)
            except NatsUnavailable as error:
                log.warning("%s; the prefill worker asks again", error)

    def _accept(self, request_id: str, reply_id: str, message: Mapping[str, Any]) -> bool:
        if reply_id in self._accepted:
            return True
        expected = self._expected.get(request_id)
        if expected is None or expected.future.done():
            return False
        expected.future.set_result(message)
        self._accepted[reply_id] = None
        while len(self._accepted) > REMEMBERED:
            self._accepted.popitem(last=False)
        return True
