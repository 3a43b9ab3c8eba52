"""The prefill queue: a JetStream work queue `{ns}_prefill_queue` that all prefill workers share.

One subject per entry, `{ns}_prefill_queue.{run_id}.{request_id}`. From that follow, without any bookkeeping of ours:

* `cancel` purges the subject: in one round trip, from any process, also when the answer to `enqueue` was lost.
  The server takes the entry out of `num_pending` (or of what is in flight: then its ack is a no-op).
* a run's start purges the subjects of other runs of its namespace (lesson 18), and nothing else.

Dead letters. A server-side `max_deliver` leaves the message in the stream for ever, in no count, and says so once,
in a core-NATS advisory that is lost if nobody is connected just then (circus-facts, "NATS"): the worker that
would listen is the one that died. So the server redelivers without limit, every delivery carries its number, and
whoever is handed an entry for the (max_deliver + 1)th time moves it to `{ns}_prefill_dead`: none is stuck or uncounted.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import logging
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import APIError, BadRequestError, NoStreamResponseError, NotFoundError

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.errors import InvalidRequest, NatsUnavailable, WorkerBusy
from dynamo_local.ports import PrefillTask, PulledTask, QueueDepth
from dynamo_local.runtime.nats_errors import CALL_TIMEOUT_S, nats_call
from dynamo_local.runtime.prefill_codec import decode_entry, encode_entry

log = logging.getLogger(__name__)

DEFAULT_ACK_WAIT_S = 5.0
DEFAULT_MAX_DELIVER = 5
CONSUMER = "prefill_workers"
MAX_ENTRIES = 10_000
MAX_DEAD_LETTERS = 100
PULL_SLICE_S = 2.0
"""Longest single pull request: one that a server restart swallowed costs no more than this."""
PULL_GRACE_S = 0.5
"""How much longer we listen than the server holds the request, so that no entry arrives to nobody."""
RETRY_PAUSE_S = 0.1

_RUN, _ID, _EXPIRES = "Dynamo-Run-Id", "Dynamo-Request-Id", "Dynamo-Expires-At"
_ATTEMPTS, _REASON, _DIED = "Dynamo-Attempts", "Dynamo-Reason", "Dynamo-Died-At"
_MSG_ID = "Nats-Msg-Id"
_STREAM_FULL = {10023, 10047, 10077}  # nats-server: "insufficient (storage) resources", "maximum messages exceeded"
_PLAIN_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,128}")


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """An entry that was given up. `attempts` counts deliveries to workers, `died_at_s` is Unix seconds."""

    request_id: str
    run_id: str
    attempts: int
    reason: str
    died_at_s: float


class JetStreamPulledTask:
    """An entry in this worker's hands (`ports.PulledTask`).

    Each answer waits until the server has taken it, and raises `NatsUnavailable` otherwise; the entry is then
    delivered again `ack_wait` later, and the second reply to the decode side is refused as a duplicate.
    """

    def __init__(self, nats: Client, msg: Msg, task: PrefillTask) -> None:
        self._nats = nats
        self._reply = msg.reply
        self.task = task

    async def in_progress(self) -> None:
        """Start `ack_wait` anew."""
        await self._answer(Msg.Ack.Progress, "keep")

    async def ack(self) -> None:
        """Done: the entry leaves the queue. No error if it was cancelled meanwhile."""
        await self._answer(Msg.Ack.Ack, "ack")

    async def nak(self, delay_s: float = 0.0) -> None:
        """Give it back: another worker gets it, after `delay_s`. Counts as an attempt."""
        body = Msg.Ack.Nak
        if delay_s > 0:
            body += b" " + json.dumps({"delay": int(delay_s * 1e9)}).encode()
        await self._answer(body, "give back")

    async def _answer(self, body: bytes, verb: str) -> None:
        with nats_call(self._nats, f"{verb} prefill entry {self.task.request_id}"):
            await self._nats.request(self._reply, body, timeout=CALL_TIMEOUT_S)


@contextlib.asynccontextmanager
async def keep_in_progress(pulled: PulledTask, ack_wait_s: float = DEFAULT_ACK_WAIT_S) -> AsyncIterator[None]:
    """Tell the queue, while the block runs, that the entry is being worked on: thrice per `ack_wait_s`.

    An outage is logged, not raised: the work goes on, and at worst the entry is also done by somebody else.
    """
    beat = asyncio.create_task(_beat(pulled, ack_wait_s / 3), name=f"in progress {pulled.task.request_id}")
    try:
        yield
    finally:
        beat.cancel()
        await asyncio.wait((beat,))
        if not beat.cancelled() and (error := beat.exception()) is not None:
            log.error("in_progress for %s stopped early: %r", pulled.task.request_id, error)


async def _beat(pulled: PulledTask, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        try:
            await pulled.in_progress()
        except NatsUnavailable as error:
            log.warning("%s; it may be delivered to another worker too", error)


class JetStreamPrefillQueue:
    """`ports.PrefillQueue` on JetStream. Streams and consumer are created on first use, by whoever comes first.

    `run_id` separates this run's entries from those of an earlier run; `clock` gives the wall time of expiries.
    """

    def __init__(
        self,
        nats: Client,
        namespace: str,
        run_id: str,
        *,
        ack_wait_s: float = DEFAULT_ACK_WAIT_S,
        max_deliver: int = DEFAULT_MAX_DELIVER,
        clock: Clock | None = None,
    ) -> None:
        self._nats = nats
        self._js = nats.jetstream(timeout=CALL_TIMEOUT_S)
        self._stream = f"{namespace}_prefill_queue"
        self._dead_stream = f"{namespace}_prefill_dead"
        self._run_id = run_id
        self._run = _subject_token(run_id)
        self.ack_wait_s = ack_wait_s
        self.max_deliver = max_deliver
        self._clock = clock or AsyncioClock()
        self._ready = False
        self._ready_lock = asyncio.Lock()
        self._inbox = _PullInbox(nats, f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{CONSUMER}")

    async def start(self, *, purge_stale: bool = False) -> None:
        """Create what is missing. `purge_stale` (the arbiter's start) drops the entries and dead letters
        of other runs of this namespace. Raises `NatsUnavailable`."""
        await self._ensure(anew=True)
        if purge_stale:
            for stream in (self._stream, self._dead_stream):
                await self._purge_other_runs(stream)

    async def delete(self) -> None:
        """Remove the streams of this namespace, dead letters too: the run has left. Raises `NatsUnavailable`."""
        with nats_call(self._nats, f"delete {self._stream}"):
            for stream in (self._stream, self._dead_stream):
                with contextlib.suppress(NotFoundError):
                    await self._js.delete_stream(stream)
        self._ready = False

    async def close(self) -> None:
        """Pull no more. What was pulled can still be acked; the connection stays the caller's."""
        await self._inbox.close()

    async def enqueue(self, request_id: str, payload: Mapping[str, Any], *, deadline_s: float) -> None:
        """Append; returns when the server has stored it.

        `payload`'s `…token_ids` are carried as int32 (bound: `prefill_codec`). Enqueuing an id again within two
        minutes (the server's duplicate window), also a cancelled one, adds nothing: so a retry is safe.
        Raises `InvalidRequest` (too large, not encodable), `WorkerBusy` (10,000 entries wait, or no room on disk),
        `NatsUnavailable` (it may be stored nevertheless: `cancel` it).
        """
        data = encode_entry(payload, self._nats.max_payload)
        subject = f"{self._stream}.{self._run}.{_subject_token(request_id)}"
        headers = {
            _MSG_ID: subject,
            _RUN: quote(self._run_id),
            _ID: quote(request_id),
            _EXPIRES: repr(self._clock.wall_s() + deadline_s),
        }
        timeout_s = max(0.01, min(CALL_TIMEOUT_S, deadline_s))
        await self._ensure()
        with nats_call(self._nats, f"enqueue the prefill of {request_id}"):
            try:
                await self._js.publish(subject, data, timeout=timeout_s, headers=dict(headers))
            except NoStreamResponseError:  # the server came back without its data
                await self._ensure(anew=True)
                await self._js.publish(subject, data, timeout=timeout_s, headers=dict(headers))
            except APIError as error:
                if error.err_code not in _STREAM_FULL:
                    raise
                raise WorkerBusy(f"the prefill queue {self._stream} is full; prefill locally") from error

    async def cancel(self, request_id: str) -> None:
        """Drop the entry, waiting or in flight; no error if there is none. Raises `NatsUnavailable`.

        A worker that has begun it finishes, and is told that nobody wants the result when it replies.
        """
        await self._ensure()
        with nats_call(self._nats, f"cancel the prefill of {request_id}"):
            subject = f"{self._stream}.{self._run}.{_subject_token(request_id)}"
            await self._js.purge_stream(self._stream, subject=subject)

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
            with nats_call(self._nats, f"pull from {self._stream}"):
                try:
                    msg = await self._inbox.next(slice_s)
                except _NoConsumer:
                    self._ready = False
                    msg = None
            if msg is not None and (pulled := await self._live(msg)) is not None:
                return pulled
            if msg is None and self._clock.now_s() < deadline_s - left_s + slice_s:
                # Refused before its time (server shutting down, consumer gone): do not ask in a tight loop.
                await self._clock.sleep_until(min(deadline_s, self._clock.now_s() + RETRY_PAUSE_S))

    async def depth(self) -> QueueDepth:
        """What waits, and what is not finished. Raises `NatsUnavailable`: an unknown depth is not 0."""
        await self._ensure()
        with nats_call(self._nats, f"read the depth of {self._stream}"):
            info = await self._js.consumer_info(self._stream, CONSUMER)
        if info.num_pending is None or info.num_ack_pending is None:
            raise NatsUnavailable(f"could not read the depth of {self._stream}: the server's answer has no counts")
        return QueueDepth(info.num_pending, info.num_pending + info.num_ack_pending)

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
        return [letter for msg in msgs if (letter := _dead_letter(msg.headers or {})) is not None]

    # --- inside -------------------------------------------------------------------------------

    async def _live(self, msg: Msg) -> JetStreamPulledTask | None:
        """What to hand out; None for an entry that was dropped or buried here."""
        headers = msg.headers or {}
        request_id = unquote(headers.get(_ID, msg.subject))
        attempt = msg.metadata.num_delivered
        if unquote(headers.get(_RUN, "")) != self._run_id:
            await self._drop(msg, f"prefill entry {request_id} belongs to another run")
            return None
        expires_at_s = _number(headers.get(_EXPIRES))
        if expires_at_s is not None and expires_at_s <= self._clock.wall_s():
            await self._drop(msg, f"prefill entry {request_id} expired unprefilled")
            return None
        if attempt > self.max_deliver:
            await self._bury(msg, self.max_deliver, f"not finished in {self.max_deliver} attempts")
            return None
        try:
            payload = decode_entry(msg.data)
        except InvalidRequest as error:
            await self._bury(msg, attempt, error.message)
            return None
        return JetStreamPulledTask(self._nats, msg, PrefillTask(request_id, payload, attempt))

    async def _drop(self, msg: Msg, why: str) -> None:
        log.info("%s: dropped", why)
        with nats_call(self._nats, "drop a prefill entry"):
            await msg.ack_sync(CALL_TIMEOUT_S)

    async def _bury(self, msg: Msg, attempts: int, reason: str) -> None:
        """Copy first, remove second: a death between the two is mended by the message id, never a loss."""
        headers = msg.headers or {}
        log.error("prefill entry %s is dead: %s", unquote(headers.get(_ID, msg.subject)), reason)
        subject = self._dead_stream + msg.subject.removeprefix(self._stream)
        about = {
            _ATTEMPTS: str(attempts),
            _REASON: quote(reason, safe=" "),
            _DIED: repr(self._clock.wall_s()),
            _MSG_ID: subject,
        }
        with nats_call(self._nats, f"move a prefill entry to {self._dead_stream}"):
            await self._js.publish(subject, msg.data, timeout=CALL_TIMEOUT_S, headers={**headers, **about})
            await msg.ack_sync(CALL_TIMEOUT_S)

    async def _ensure(self, *, anew: bool = False) -> None:
        if self._ready and not anew:
            return
        async with self._ready_lock:
            if self._ready and not anew:
                return
            with nats_call(self._nats, f"create the stream {self._stream}"):
                await self._ensure_stream(
                    StreamConfig(
                        name=self._stream,
                        subjects=[f"{self._stream}.>"],
                        retention=RetentionPolicy.WORK_QUEUE,
                        storage=StorageType.FILE,
                        discard=DiscardPolicy.NEW,  # an entry is refused, never pushed out
                        max_msgs=MAX_ENTRIES,
                    )
                )
                await self._ensure_stream(
                    StreamConfig(
                        name=self._dead_stream,
                        subjects=[f"{self._dead_stream}.>"],
                        storage=StorageType.FILE,
                        max_msgs=MAX_DEAD_LETTERS,
                    )
                )
                await self._js.add_consumer(
                    self._stream,
                    durable_name=CONSUMER,
                    ack_policy=AckPolicy.EXPLICIT,
                    ack_wait=self.ack_wait_s,
                    max_deliver=-1,
                    max_ack_pending=-1,
                )
            self._ready = True

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


class _NoConsumer(NatsError):
    """The server knows no such consumer: it lost its data."""


class _PullInbox:
    """Pull requests, and the entries that answer them.

    nats-py's `fetch` gives up listening when the server's request expires, or when it is cancelled; an entry that
    arrives just then waits in its buffer for the next fetch while `ack_wait` runs out. Here an entry that nobody
    waits for is given back at once.
    """

    def __init__(self, nats: Client, subject: str) -> None:
        self._nats = nats
        self._subject = subject
        self._prefix: str | None = None
        self._subscription: Any = None
        self._numbers = itertools.count()
        self._waiting: OrderedDict[str, asyncio.Future[Msg | None]] = OrderedDict()

    async def next(self, timeout_s: float) -> Msg | None:
        """One entry, or None when the server has none within `timeout_s`."""
        if self._prefix is None:
            self._prefix = self._nats.new_inbox()
            self._subscription = await self._nats.subscribe(f"{self._prefix}.*", cb=self._on_message)
        inbox = f"{self._prefix}.{next(self._numbers)}"
        future: asyncio.Future[Msg | None] = asyncio.get_running_loop().create_future()
        self._waiting[inbox] = future
        try:
            body = json.dumps({"batch": 1, "expires": int(timeout_s * 1e9)}).encode()
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
        """Without a listener the server forgets the requests that are still open."""
        if self._subscription is not None and not self._nats.is_closed:
            await self._subscription.unsubscribe()
        self._subscription = self._prefix = None

    async def _on_message(self, msg: Msg) -> None:
        status = (msg.headers or {}).get("Status") if not msg.reply else None
        if status is not None:  # comes on the request's own subject: 404/408 nothing there, 409 refused, 503 unknown
            future = self._waiting.pop(msg.subject, None)
            if future is not None and not future.done():
                if status == "503":
                    future.set_exception(_NoConsumer("no such consumer"))
                else:
                    future.set_result(None)
            return
        # An entry comes under its own subject, not the request's: the one that has waited longest gets it.
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


def _subject_token(name: str) -> str:
    """`name` as one token of a NATS subject: as it is where it can be, else its hash."""
    return name if _PLAIN_TOKEN.fullmatch(name) else "=" + hashlib.blake2b(name.encode(), digest_size=16).hexdigest()


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _dead_letter(headers: Mapping[str, str]) -> DeadLetter | None:
    attempts, died_at_s = _number(headers.get(_ATTEMPTS)), _number(headers.get(_DIED))
    if attempts is None or died_at_s is None:
        log.warning("a dead letter without our headers is left out: %s", dict(headers))
        return None
    request_id, run_id, reason = (unquote(headers.get(name, "?")) for name in (_ID, _RUN, _REASON))
    return DeadLetter(request_id, run_id, int(attempts), reason, died_at_s)
