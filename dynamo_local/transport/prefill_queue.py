"""The prefill queue on JetStream, and how a prefill's result comes back. See `queue` for its guarantees."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

import msgspec

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.core.routing.prompts import Turns, is_late
from dynamo_local.errors import InvalidRequest, NatsUnavailable, WorkerBusy
from dynamo_local.ports import PrefillTask, PulledTask, QueueDepth
from dynamo_local.system import tracing
from dynamo_local.system.executors import ended, within
from dynamo_local.system.request_log import bound, x_request_id
from dynamo_local.transport.decoding import UNREADABLE, decode
from dynamo_local.transport.nats import (
    CALL_TIMEOUT_S,
    NO_RESPONDERS,
    NatsClient,
    flush,
    header_block,
    headers_of,
    nats_call,
    unsubscribe,
)
from dynamo_local.transport.nats_client import (
    AckPolicy,
    APIError,
    BadRequestError,
    ConsumerConfig,
    DiscardPolicy,
    Msg,
    NatsError,
    NoRespondersError,
    NotFoundError,
    RetentionPolicy,
    StorageType,
    StreamConfig,
    Subscription,
)

# The bytes of a prefill queue entry: msgpack, with token ids as little-endian int32.
#
# A list of 131,072 token ids is up to 655 kB as plain msgpack and 524,288 bytes here, whatever their values. So a
# prompt of 128k tokens fits NATS's default `max_payload` of 1 MiB. The bound is a quarter of `max_payload`: about
# 260,000 tokens there, 2 million with the embedded server's 8 MiB.

HEADROOM_BYTES = 4096
"""Kept free below the server's `max_payload`, which counts the headers too."""

_TOKEN_IDS = 1  # msgpack extension code
_INT32 = "i"
assert array(_INT32).itemsize == 4, "array('i') must be 32 bits wide"  # true on every platform CPython supports


def encode_entry(payload: Mapping[str, Any], max_payload_bytes: int) -> bytes:
    """Encode; values under keys that end in `token_ids` must be sequences of int32 and come back as lists.

    Raises `InvalidRequest` for what cannot be encoded, and for more than `max_payload_bytes` less the headroom.
    """
    try:
        data = msgspec.msgpack.encode(_pack(payload))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"a prefill entry cannot be encoded: {error}") from error
    limit = max_payload_bytes - HEADROOM_BYTES
    if len(data) > limit:
        raise InvalidRequest(
            f"a prefill entry of {len(data):,} bytes is over the {limit:,} bytes that NATS takes "
            f"(about {limit // 4:,} prompt tokens); prefill it locally, or raise max_payload in the NATS server",
            param="prompt",
        )
    return data


def decode_entry(data: bytes) -> dict[str, Any]:
    """The inverse of `encode_entry`. Raises `InvalidRequest` for bytes that are no entry."""
    try:
        entry = decode(_decoder, data)
    except (*UNREADABLE, ValueError) as error:
        raise InvalidRequest(f"not a prefill entry: {error}") from error
    if not isinstance(entry, dict):
        raise InvalidRequest(f"not a prefill entry: a {type(entry).__name__} instead of a mapping")
    return entry


def _unpack_ext(code: int, data: memoryview) -> list[int]:
    if code != _TOKEN_IDS:
        raise ValueError(f"unknown extension {code}")
    ids = array(_INT32)
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


_decoder = msgspec.msgpack.Decoder(ext_hook=_unpack_ext)


def _pack(value: Any, key: Any = None) -> Any:
    if isinstance(value, Mapping):
        return {k: _pack(v, k) for k, v in value.items()}
    if isinstance(key, str) and key.endswith("token_ids") and isinstance(value, Sequence):
        ids = array(_INT32, value)
        if sys.byteorder == "big":
            ids.byteswap()
        return msgspec.msgpack.Ext(_TOKEN_IDS, ids.tobytes())
    return value


# An entry on the server: its headers, its subject, and the fields of a dead letter.

log = logging.getLogger(__name__)

RUN, ID, EXPIRES = "Dynamo-Run-Id", "Dynamo-Request-Id", "Dynamo-Expires-Uptime"
ATTEMPTS, REASON, DIED = "Dynamo-Attempts", "Dynamo-Reason", "Dynamo-Died-At"
"""`EXPIRES` and `START_BY` are seconds on the host's monotonic clock: the time of day may be set meanwhile."""
START_BY = "Dynamo-Start-By-Uptime"
"""When its prefill has to begin for its target to be kept; absent: there is no target."""
BEFORE = "Dynamo-Attempts-Before"
"""Deliveries to workers before the entry went to the second line."""
X_REQUEST_ID = "Dynamo-X-Request-Id"
"""The client's id, for the logs of prefill workers; absent from entries of an older version."""
QUEUED_AT = "Dynamo-Queued-At"
"""When a traced entry came, Unix seconds. Its trace's own headers stand beside it."""
MSG_ID = "Nats-Msg-Id"
_PLAIN_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,128}")


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An entry that was given up. `attempts` counts deliveries to workers, `died_at_s` is Unix seconds."""

    request_id: str
    run_id: str
    attempts: int
    reason: str
    died_at_s: float


def subject_token(name: str) -> str:
    """`name` as one token of a NATS subject: as it is where it can be, else its hash."""
    return name if _PLAIN_TOKEN.fullmatch(name) else "=" + hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


def number_of(text: str | None) -> float | None:
    """A header's number; None if it is absent or not a number."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def dead_letter_of(headers: Mapping[str, str]) -> DeadLetter | None:
    """The dead letter in these headers; None if they are not ours."""
    attempts, died_at_s = number_of(headers.get(ATTEMPTS)), number_of(headers.get(DIED))
    if attempts is None or died_at_s is None:
        log.warning("a dead letter without our headers is left out: %s", dict(headers))
        return None
    request_id, run_id, reason = (unquote(headers.get(name, "?")) for name in (ID, RUN, REASON))
    return DeadLetter(request_id, run_id, int(attempts), reason, died_at_s)


# Gets entries from the server: pull requests, and the messages that answer them.

PULL_GRACE_S = 0.5
"""How much longer we listen than the server holds the request, so that no entry arrives unnoticed."""


class NoConsumer(NatsError):
    """The server knows no such consumer: it lost its data."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """An entry as it came. `reply` is where it is answered. `count`: how often it was delivered, this time included.
    `pending`: how many entries of its stream wait."""

    reply: str
    subject: str
    data: bytes
    headers: Mapping[str, str]
    stream: str
    count: int
    pending: int

    @classmethod
    def of(cls, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> Delivery:
        """`reply` is `$JS.ACK.STREAM.CONSUMER.COUNT.SEQ.SEQ.TIME.PENDING`, or has DOMAIN.ACCOUNT before the stream and
        a token at the end. Raises ValueError or IndexError for another one."""
        parts = reply.decode().split(".")
        first = 2 if len(parts) == 9 else 4
        count, pending = int(parts[first + 2]), int(parts[first + 6])
        return cls(reply.decode(), subject.decode(), data, headers_of(headers), parts[first], count, pending)


class PullInbox:
    """Pull requests, and the entries that answer them.

    nats-py's `fetch` stops listening when the server's request expires, or when it is cancelled. An entry that
    arrives just then waits in its buffer for the next fetch while `ack_wait` runs out. Here an entry that nobody
    waits for is given back at once.
    """

    def __init__(self, nats: NatsClient, subject: str) -> None:
        self._nats = nats
        self._subject = subject
        self._prefix: str | None = None
        self._subscription: Subscription | None = None
        self._numbers = itertools.count()
        self._waiting: OrderedDict[bytes, asyncio.Future[Delivery | None]] = OrderedDict()

    async def next(self, timeout_s: float, *, wait: bool = True) -> Delivery | None:
        """One entry, or None when the server has none within `timeout_s`; without `wait`, when it has none now."""
        if self._prefix is None:
            self._prefix = self._nats.new_inbox()
            self._subscription = await self._nats.hear(f"{self._prefix}.*", self._on_message)
        inbox = f"{self._prefix}.{next(self._numbers)}"
        key = inbox.encode()
        future: asyncio.Future[Delivery | None] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        try:
            pull = b'{"batch":1,"expires":%d}' % int(timeout_s * 1e9) if wait else b'{"batch":1,"no_wait":true}'
            self._nats.post(self._subject, pull, reply=inbox)
            return await within(future, timeout_s + PULL_GRACE_S)
        except TimeoutError:
            return None
        except asyncio.CancelledError:
            if not future.cancelled() and future.exception() is None and (delivery := future.result()) is not None:
                self._give_back(delivery)
            raise
        finally:
            self._waiting.pop(key, None)

    async def close(self) -> None:
        """Stop listening: the server then forgets the requests that are still open."""
        await unsubscribe(self._nats, self._subscription)
        self._subscription = self._prefix = None

    def _on_message(self, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        if not reply:  # a status on the request's own subject: 404/408 nothing there, 409 refused, 503 unknown
            future = self._waiting.pop(subject, None)
            if future is not None and not future.done():
                if headers is not None and headers.startswith(NO_RESPONDERS):
                    future.set_exception(NoConsumer("no such consumer"))
                else:
                    future.set_result(None)
            return
        delivery = Delivery.of(subject, reply, data, headers)
        # An entry comes under its own subject, not the request's: the request that has waited longest gets it.
        while self._waiting:
            _, future = self._waiting.popitem(last=False)
            if not future.done():
                future.set_result(delivery)
                return
        self._give_back(delivery)

    def _give_back(self, delivery: Delivery) -> None:
        log.info("prefill entry %s came when nobody waited for it: given back", delivery.subject)
        try:
            self._nats.post(delivery.reply, Msg.Ack.Nak)
        except NatsError as error:
            log.warning("could not give %s back, it is delivered again after ack_wait: %s", delivery.subject, error)


# An entry that a prefill worker has pulled: it is acked, given back, or kept while the worker computes.

DEFAULT_ACK_WAIT_S = 5.0
ACK_WITHIN_S = 0.01
"""An ack waits so long for the next pull, to be sent in one write with it."""


class JetStreamPulledTask:
    """An entry in this worker's hands (`ports.PulledTask`).

    `in_progress` and `nak` wait until the server has taken them, and raise `NatsUnavailable` otherwise. `ack` is sent
    and not waited for: a round trip per entry would tell only what happens next anyway. An entry whose answer is lost
    is delivered again `ack_wait` later, and the second reply to the decode side is refused as a duplicate.
    """

    def __init__(self, nats: NatsClient, reply: str, task: PrefillTask) -> None:
        self._nats = nats
        self._reply = reply
        self.task = task

    async def in_progress(self) -> None:
        """Restart `ack_wait`."""
        await self._answer(Msg.Ack.Progress, "keep")

    async def ack(self) -> None:
        """Done: the entry leaves the queue. No error if it was cancelled meanwhile."""
        with nats_call(self._nats, f"ack prefill entry {self.task.request_id}"):
            self._nats.post(self._reply, Msg.Ack.Ack, within_s=ACK_WITHIN_S)

    async def nak(self, delay_s: float = 0.0) -> None:
        """Give it back: another worker gets it, after `delay_s`. Counts as an attempt."""
        body = Msg.Ack.Nak
        if delay_s > 0:
            body += b" " + json.dumps({"delay": int(delay_s * 1e9)}).encode()
        await self._answer(body, "give back")

    async def _answer(self, body: bytes, verb: str) -> None:
        with nats_call(self._nats, f"{verb} prefill entry {self.task.request_id}"):
            await self._nats.ask(self._reply, body, CALL_TIMEOUT_S)


@contextlib.asynccontextmanager
async def keep_in_progress(pulled: PulledTask, ack_wait_s: float = DEFAULT_ACK_WAIT_S) -> AsyncIterator[None]:
    """Tell the queue, while the block runs, that the entry is being worked on: thrice per `ack_wait_s`.

    An outage is logged, not raised: the work goes on, and at worst the entry is also done by somebody else.
    """
    beats: list[asyncio.Task[None]] = []  # most entries are over before the first is due, and need no task

    def begin() -> None:
        name = f"in progress {pulled.task.request_id}"
        beats.append(asyncio.create_task(_beat(pulled, ack_wait_s / 3), name=name))

    first = asyncio.get_running_loop().call_later(ack_wait_s / 3, begin)
    try:
        yield
    finally:
        first.cancel()
        await ended(*beats)
        for beat in beats:
            if not beat.cancelled() and (error := beat.exception()) is not None:
                log.error("in_progress for %s stopped early: %r", pulled.task.request_id, error)


async def _beat(pulled: PulledTask, every_s: float) -> None:
    while True:
        try:
            await pulled.in_progress()
        except NatsUnavailable as error:
            log.warning("%s. The entry may be delivered to another worker too", error)
        await asyncio.sleep(every_s)


# The prefill queue: a JetStream work queue `{ns}_prefill_queue` that all prefill workers share. Where several models
# are served, each has one of its own: `{ns}_prefill_queue_{name}`, and the other streams likewise.
#
# One subject per entry, `{ns}_prefill_queue.{run_id}.{request_id}`. This gives, without any bookkeeping of ours:
#
# * `cancel` purges the subject: in one round trip, from any process, also when the answer to `enqueue` was lost.
#   The server takes the entry out of `num_pending` (or of what is in flight: then its ack is a no-op).
# * a run's start purges the subjects of other runs of its namespace, and nothing else.
#
# Two lines. An entry may say when a worker has to begin it (`start_within_s`). If its turn comes later than that, and
# others wait, it is moved to the stream `{ns}_prefill_late`. The entry is copied, then removed, so that a death in
# between loses nothing. The copy's message id makes a second copy a duplicate. That stream is pulled from when the
# first has nothing, and at every eighth turn (`core.routing.prompts`). Nobody has to wait on both: who moves an entry
# looks for
# work just then, and ends at the second line before it waits.
#
# Dead letters. A server-side `max_deliver` leaves the message in the stream for ever, in no count. It says so once, in
# a core-NATS advisory that is lost if nobody is connected just then: the worker that would listen is the one that died.
# So the server redelivers without limit, and every delivery carries its number. A worker that gets an entry for the
# (max_deliver + 1)th time moves it to `{ns}_prefill_dead`: none is stuck or uncounted.

DEFAULT_MAX_DELIVER = 5
CONSUMER = "prefill_workers"
MAX_ENTRIES = 10_000
MAX_DEAD_LETTERS = 100
PULL_SLICE_S = 2.0
"""The longest single pull request: if a server restart loses one, no more than this is lost."""
RETRY_PAUSE_S = 0.1
LATE_LOOK_S = 1.0
"""How often the second line is looked at for its depth by who has not seen an entry that can become late."""

_STREAM_FULL = {10023, 10047, 10077}  # nats-server: "insufficient (storage) resources", "maximum messages exceeded"


class JetStreamPrefillQueue:
    """`ports.PrefillQueue` on JetStream. Streams and consumer are created by the first process that uses them.

    `run_id` separates this run's entries from those of an earlier run; `clock` gives the wall time of expiries.
    `known`: this process has found the streams before, so `start` need not ask; if gone, the first call tells.
    """

    def __init__(
        self,
        nats: NatsClient,
        namespace: str,
        run_id: str,
        *,
        name: str = "",
        ack_wait_s: float = DEFAULT_ACK_WAIT_S,
        max_deliver: int = DEFAULT_MAX_DELIVER,
        clock: Clock | None = None,
        known: bool = False,
    ) -> None:
        self._nats = nats
        self._js = nats.jetstream(timeout=CALL_TIMEOUT_S)
        own = f"_{name}" if name else ""
        self.stream = f"{namespace}_prefill_queue{own}"
        """JetStream's name of the queue."""
        self._late_stream = f"{namespace}_prefill_late{own}"
        self._dead_stream = f"{namespace}_prefill_dead{own}"
        self._run_id = quote(run_id)
        self._run = subject_token(run_id)
        self.ack_wait_s = ack_wait_s
        self.max_deliver = max_deliver
        self._clock = clock or AsyncioClock()
        self._ready = self._known = known
        self._ready_lock = asyncio.Lock()
        self._inbox = PullInbox(nats, f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}.{CONSUMER}")
        self._late_inbox = PullInbox(nats, f"$JS.API.CONSUMER.MSG.NEXT.{self._late_stream}.{CONSUMER}")
        self._turns = Turns()
        self._deadlines = False
        """An entry that can become late was seen here. Until then nobody puts one into the second line, but for those
        who have seen one: so it is looked into rarely. (Each question to the server costs both of them.)"""
        self._late, self._late_due_s = (0, 0), float("-inf")
        self.deferred = self.late_pulled = 0

    async def start(self, *, purge_stale: bool = False) -> None:
        """Create what is missing. `purge_stale` (the arbiter's start) drops the entries and dead letters
        of other runs of this namespace. Raises `NatsUnavailable`."""
        await self._ensure(anew=purge_stale or not self._known)
        if purge_stale:
            for stream in (self.stream, self._late_stream, self._dead_stream):
                await self._purge_other_runs(stream)

    async def delete(self) -> None:
        """Remove the streams of this namespace, dead letters too: the run has left. Raises `NatsUnavailable`."""
        with nats_call(self._nats, f"delete {self.stream}"):
            for stream in (self.stream, self._late_stream, self._dead_stream):
                with contextlib.suppress(NotFoundError):
                    await self._js.delete_stream(stream)
        self._ready = False

    async def close(self) -> None:
        """Stop pulling. Entries in hand can still be acked; the connection stays open, it is the caller's."""
        await self._inbox.close()
        await self._late_inbox.close()
        if self._nats.is_connected:
            with contextlib.suppress(NatsError, OSError, TimeoutError):
                await flush(self._nats)  # the last acks

    async def enqueue(
        self,
        request_id: str,
        payload: Mapping[str, Any],
        *,
        deadline_s: float,
        start_within_s: float | None = None,
    ) -> None:
        """Append; returns when the server has stored it.

        `payload`'s `…token_ids` must be int32: `codec` refuses others. Enqueuing an id again within two
        minutes (the server's duplicate window), also a cancelled one, adds nothing: so a retry is safe.
        Raises `InvalidRequest` (too large, not encodable), `WorkerBusy` (10,000 entries wait, or no room on disk),
        `NatsUnavailable` (it may be stored nevertheless: `cancel` it).
        """
        data = encode_entry(payload, self._nats.max_payload)
        subject = f"{self.stream}.{self._run}.{subject_token(request_id)}"
        headers = {
            MSG_ID: subject,
            RUN: self._run_id,
            ID: quote(request_id),
            EXPIRES: repr(self._clock.now_s() + deadline_s),
        }
        if start_within_s is not None:
            self._deadlines = True
            headers[START_BY] = repr(self._clock.now_s() + start_within_s)
        if x_request_id():
            headers[X_REQUEST_ID] = quote(x_request_id())
        if (carrier := tracing.carrier()) is not None:
            headers |= {**carrier, QUEUED_AT: repr(self._clock.wall_s())}
        timeout_s = max(0.01, min(CALL_TIMEOUT_S, deadline_s))
        await self._ensure()
        with nats_call(self._nats, f"enqueue the prefill of {request_id}"):
            try:
                await self._publish(subject, data, timeout_s, headers)
            except NoRespondersError:  # the server came back without its data
                await self._ensure(anew=True)
                await self._publish(subject, data, timeout_s, headers)
            except APIError as error:
                if error.err_code not in _STREAM_FULL:
                    raise
                raise WorkerBusy(f"the prefill queue {self.stream} is full; prefill locally") from error

    async def cancel(self, request_id: str) -> None:
        """Drop the entry, waiting or in flight; no error if there is none. Raises `NatsUnavailable`.

        A worker that has begun it finishes it, and learns from its reply that the result is not wanted.
        """
        await self._ensure()
        with nats_call(self._nats, f"cancel the prefill of {request_id}"):
            for stream in (self.stream, self._late_stream):  # in the order in which an entry moves
                await self._js.purge_stream(stream, subject=f"{stream}.{self._run}.{subject_token(request_id)}")

    async def pull(self, timeout_s: float) -> JetStreamPulledTask | None:
        """The next live entry of this run, exactly one, or None past `timeout_s`. Raises `NatsUnavailable`.

        Cancelling the call gives an entry that has just arrived back to the queue at once.
        """
        deadline_s = self._clock.now_s() + timeout_s
        while True:
            await self._ensure()
            left_s = deadline_s - self._clock.now_s()
            if left_s <= 0:
                return None
            slice_s = min(left_s, PULL_SLICE_S)
            with nats_call(self._nats, f"pull from {self.stream}"):
                try:
                    msg = await self._next(slice_s)
                except NoConsumer:
                    self._ready = False
                    msg = None
            if msg is not None and (pulled := await self._live(msg)) is not None:
                return pulled
            if msg is None and self._clock.now_s() < deadline_s - left_s + slice_s:
                # Refused early (server shutting down, consumer gone): do not ask in a tight loop.
                await self._clock.sleep_until(min(deadline_s, self._clock.now_s() + RETRY_PAUSE_S))

    async def depth(self) -> QueueDepth:
        """How many entries wait, and how many are unfinished. Raises `NatsUnavailable`: an unknown depth is not 0."""
        await self._ensure()
        with nats_call(self._nats, f"read the depth of {self.stream}"):
            if self._deadlines or self._clock.now_s() >= self._late_due_s:
                first, self._late = await asyncio.gather(*map(self._counts, (self.stream, self._late_stream)))
                self._late_due_s = self._clock.now_s() + LATE_LOOK_S
            else:
                first = await self._counts(self.stream)
            late = self._late
        return QueueDepth(first[0] + late[0], sum(first) + sum(late), late[0])

    async def _counts(self, stream: str) -> tuple[int, int]:
        """Entries of a line that wait, and those in hand."""
        info = await self._js.consumer_info(stream, CONSUMER)
        if info.num_pending is None or info.num_ack_pending is None:
            raise NatsUnavailable(f"could not read the depth of {stream}: the server's answer has no counts")
        return info.num_pending, info.num_ack_pending

    async def dead_letters(self) -> list[DeadLetter]:
        """The last entries given up (100 at most), oldest first. Raises `NatsUnavailable`."""
        await self._ensure()
        with nats_call(self._nats, f"read {self._dead_stream}"):
            count = (await self._js.stream_info(self._dead_stream)).state.messages
            if not count:
                return []
            # Headers only: 100 prompts could be 100 MB.
            config = ConsumerConfig(
                headers_only=True, ack_policy=AckPolicy.NONE, mem_storage=True, inactive_threshold=CALL_TIMEOUT_S
            )
            sub = await self._js.pull_subscribe(f"{self._dead_stream}.>", stream=self._dead_stream, config=config)
            try:
                msgs = await sub.fetch(count, timeout=CALL_TIMEOUT_S)
            finally:
                await sub.unsubscribe()
        return [letter for msg in msgs if (letter := dead_letter_of(msg.headers or {})) is not None]

    # --- inside -------------------------------------------------------------------------------

    async def _publish(self, subject: str, data: bytes, timeout_s: float, headers: Mapping[str, str]) -> None:
        """Return when the server has stored it. Raises `APIError`, and `NoRespondersError` without a stream."""
        answer, _ = await self._nats.ask(subject, data, timeout_s, headers=header_block(headers))
        if b'"error":' in answer:
            APIError.from_error(json.loads(answer)["error"])

    async def _next(self, wait_s: float) -> Delivery | None:
        """The next entry of either line, as it is their turn."""
        if self._turns.late_first:
            if (msg := await self._late_inbox.next(CALL_TIMEOUT_S, wait=False)) is not None:
                return msg
            self._turns.none_late()
        if not self._deadlines:
            msg = await self._inbox.next(wait_s)
            return await self._late_inbox.next(CALL_TIMEOUT_S, wait=False) if msg is None else msg
        for inbox in (self._inbox, self._late_inbox):
            if (msg := await inbox.next(CALL_TIMEOUT_S, wait=False)) is not None:
                return msg
        return await self._inbox.next(wait_s)

    async def _live(self, msg: Delivery) -> JetStreamPulledTask | None:
        """The entry to hand out; None for one that was dropped, or moved to the dead letters, here."""
        with bound(unquote(msg.headers.get(X_REQUEST_ID, ""))):
            return await self._live_bound(msg)

    async def _live_bound(self, msg: Delivery) -> JetStreamPulledTask | None:
        headers = msg.headers
        request_id = unquote(headers.get(ID, msg.subject))
        attempt = int(number_of(headers.get(BEFORE)) or 0) + msg.count
        late = msg.stream == self._late_stream
        self._deadlines = self._deadlines or late or START_BY in headers
        if headers.get(RUN, "") != self._run_id:
            await self._drop(msg, f"prefill entry {request_id} belongs to another run")
            return None
        expires_at_s = number_of(headers.get(EXPIRES))
        if expires_at_s is not None and expires_at_s <= self._clock.now_s():
            await self._drop(msg, f"prefill entry {request_id} expired unprefilled")
            return None
        if attempt > self.max_deliver:
            await self._bury(msg, self.max_deliver, f"not finished in {self.max_deliver} attempts")
            return None
        if not late and msg.pending and is_late(number_of(headers.get(START_BY)), self._clock.now_s()):
            await self._put_behind(msg, attempt - 1)
            return None
        try:
            payload = decode_entry(msg.data)
        except InvalidRequest as error:
            await self._bury(msg, attempt, error.message)
            return None
        self._turns.pulled(late=late)
        self.late_pulled += late
        trace, queued_at_s = tracing.carried(headers), number_of(headers.get(QUEUED_AT))
        task = PrefillTask(request_id, payload, attempt, x_request_id(), trace, queued_at_s)
        return JetStreamPulledTask(self._nats, msg.reply, task)

    async def _drop(self, msg: Delivery, why: str) -> None:
        log.info("%s: dropped", why)
        with nats_call(self._nats, "drop a prefill entry"):
            await self._nats.ask(msg.reply, Msg.Ack.Ack, CALL_TIMEOUT_S)

    async def _put_behind(self, msg: Delivery, attempts: int) -> None:
        """Move the entry to the second line, as `_bury` moves one to the dead letters."""
        subject = self._late_stream + msg.subject.removeprefix(self.stream)
        headers = {**msg.headers, BEFORE: str(attempts), MSG_ID: subject}
        with nats_call(self._nats, f"move a prefill entry to {self._late_stream}"):
            await self._js.publish(subject, msg.data, timeout=CALL_TIMEOUT_S, headers=headers)
            await self._nats.ask(msg.reply, Msg.Ack.Ack, CALL_TIMEOUT_S)
        self.deferred += 1

    async def _bury(self, msg: Delivery, attempts: int, reason: str) -> None:
        """Move the entry to the dead letters: copy, then remove. If we die in between, the next copy has the same
        message id and is dropped as a duplicate."""
        headers = msg.headers
        log.error("prefill entry %s is dead: %s", unquote(headers.get(ID, msg.subject)), reason)
        subject = self._dead_stream + msg.subject.removeprefix(msg.stream)
        about = {
            ATTEMPTS: str(attempts),
            REASON: quote(reason, safe=" "),
            DIED: repr(self._clock.wall_s()),
            MSG_ID: subject,
        }
        with nats_call(self._nats, f"move a prefill entry to {self._dead_stream}"):
            await self._js.publish(subject, msg.data, timeout=CALL_TIMEOUT_S, headers={**headers, **about})
            await self._nats.ask(msg.reply, Msg.Ack.Ack, CALL_TIMEOUT_S)

    async def _ensure(self, *, anew: bool = False) -> None:
        if self._ready and not anew:
            return
        async with self._ready_lock:
            if self._ready and not anew:
                return
            with nats_call(self._nats, f"create the stream {self.stream}"):
                for stream in (self.stream, self._late_stream):
                    await self._ensure_line(stream)
                await self._ensure_stream(
                    StreamConfig(
                        name=self._dead_stream,
                        subjects=[f"{self._dead_stream}.>"],
                        storage=StorageType.FILE,
                        max_msgs=MAX_DEAD_LETTERS,
                    )
                )
            self._ready = True

    async def _ensure_line(self, stream: str) -> None:
        await self._ensure_stream(
            StreamConfig(
                name=stream,
                subjects=[f"{stream}.>"],
                retention=RetentionPolicy.WORK_QUEUE,
                storage=StorageType.FILE,
                discard=DiscardPolicy.NEW,  # an entry is refused, never pushed out
                max_msgs=MAX_ENTRIES,
            )
        )
        await self._js.add_consumer(
            stream,
            durable_name=CONSUMER,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=self.ack_wait_s,
            max_deliver=-1,
            max_ack_pending=-1,
        )

    async def _ensure_stream(self, config: StreamConfig) -> None:
        try:
            await self._js.add_stream(config)
        except BadRequestError:  # it exists, made by another version of us
            await self._js.update_stream(config)

    async def _purge_other_runs(self, stream: str) -> None:
        with nats_call(self._nats, f"purge what earlier runs left in {stream}"):
            subjects = (await self._js.stream_info(stream, subjects_filter=">")).state.subjects or {}
            for run in {subject.split(".")[1] for subject in subjects} - {self._run}:
                await self._js.purge_stream(stream, subject=f"{stream}.{run}.>")
                log.info("purged what run %s left in %s", run, stream)
