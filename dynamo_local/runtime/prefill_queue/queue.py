"""The prefill queue: a JetStream work queue `{ns}_prefill_queue` that all prefill workers share.

One subject per entry, `{ns}_prefill_queue.{run_id}.{request_id}`. This gives, without any bookkeeping of ours:

* `cancel` purges the subject: in one round trip, from any process, also when the answer to `enqueue` was lost.
  The server takes the entry out of `num_pending` (or of what is in flight: then its ack is a no-op).
* a run's start purges the subjects of other runs of its namespace (lesson 18), and nothing else.

Two lines. An entry that says when it has to be begun (`start_within_s`) and comes to its turn after that, while others
wait, is moved to the stream `{ns}_prefill_late`: copied, then removed, so that a death in between loses nothing, and
the copy's message id makes the second one a duplicate. That stream is pulled from when the first has nothing, and at
every eighth turn (`core.dispatch.line`). Nobody has to wait on both: who moves an entry looks for work just then, and
ends at the second line before it waits.

Dead letters. A server-side `max_deliver` leaves the message in the stream for ever, in no count, and says so once,
in a core-NATS advisory that is lost if nobody is connected just then (circus-facts, "NATS"): the worker that
would listen is the one that died. So the server redelivers without limit, every delivery carries its number, and
whoever is handed an entry for the (max_deliver + 1)th time moves it to `{ns}_prefill_dead`: none is stuck or uncounted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.core.dispatch.line import Turns, is_late
from dynamo_local.errors import InvalidRequest, NatsUnavailable, WorkerBusy
from dynamo_local.ports import PrefillTask, QueueDepth
from dynamo_local.runtime.nats_client import (
    AckPolicy,
    APIError,
    BadRequestError,
    Client,
    ConsumerConfig,
    DiscardPolicy,
    Msg,
    NoStreamResponseError,
    NotFoundError,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from dynamo_local.runtime.nats_errors import CALL_TIMEOUT_S, nats_call
from dynamo_local.runtime.prefill_queue.codec import decode_entry, encode_entry
from dynamo_local.runtime.prefill_queue.entries import (
    ATTEMPTS,
    BEFORE,
    DIED,
    EXPIRES,
    ID,
    MSG_ID,
    REASON,
    RUN,
    START_BY,
    X_REQUEST_ID,
    DeadLetter,
    dead_letter_of,
    number_of,
    subject_token,
)
from dynamo_local.runtime.prefill_queue.pull_inbox import NoConsumer, PullInbox
from dynamo_local.runtime.prefill_queue.pulled import DEFAULT_ACK_WAIT_S, JetStreamPulledTask
from dynamo_local.system.logs.request_log import bound, x_request_id

log = logging.getLogger(__name__)

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
        nats: Client,
        namespace: str,
        run_id: str,
        *,
        ack_wait_s: float = DEFAULT_ACK_WAIT_S,
        max_deliver: int = DEFAULT_MAX_DELIVER,
        clock: Clock | None = None,
        known: bool = False,
    ) -> None:
        self._nats = nats
        self._js = nats.jetstream(timeout=CALL_TIMEOUT_S)
        self.stream = f"{namespace}_prefill_queue"
        """JetStream's name of the queue."""
        self._late_stream = f"{namespace}_prefill_late"
        self._dead_stream = f"{namespace}_prefill_dead"
        self._run_id = run_id
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
            RUN: quote(self._run_id),
            ID: quote(request_id),
            EXPIRES: repr(self._clock.wall_s() + deadline_s),
        }
        if start_within_s is not None:
            self._deadlines = True
            headers[START_BY] = repr(self._clock.wall_s() + start_within_s)
        if x_request_id():
            headers[X_REQUEST_ID] = quote(x_request_id())
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

    async def _next(self, wait_s: float) -> Msg | None:
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

    async def _live(self, msg: Msg) -> JetStreamPulledTask | None:
        """The entry to hand out; None for one that was dropped, or moved to the dead letters, here."""
        with bound(unquote((msg.headers or {}).get(X_REQUEST_ID, ""))):
            return await self._live_bound(msg)

    async def _live_bound(self, msg: Msg) -> JetStreamPulledTask | None:
        headers = msg.headers or {}
        request_id = unquote(headers.get(ID, msg.subject))
        attempt = int(number_of(headers.get(BEFORE)) or 0) + msg.metadata.num_delivered
        late = msg.metadata.stream == self._late_stream
        self._deadlines = self._deadlines or late or START_BY in headers
        if unquote(headers.get(RUN, "")) != self._run_id:
            await self._drop(msg, f"prefill entry {request_id} belongs to another run")
            return None
        expires_at_s = number_of(headers.get(EXPIRES))
        if expires_at_s is not None and expires_at_s <= self._clock.wall_s():
            await self._drop(msg, f"prefill entry {request_id} expired unprefilled")
            return None
        if attempt > self.max_deliver:
            await self._bury(msg, self.max_deliver, f"not finished in {self.max_deliver} attempts")
            return None
        if not late and msg.metadata.num_pending and is_late(number_of(headers.get(START_BY)), self._clock.wall_s()):
            await self._put_behind(msg, attempt - 1)
            return None
        try:
            payload = decode_entry(msg.data)
        except InvalidRequest as error:
            await self._bury(msg, attempt, error.message)
            return None
        self._turns.pulled(late=late)
        self.late_pulled += late
        return JetStreamPulledTask(self._nats, msg, PrefillTask(request_id, payload, attempt, x_request_id()))

    async def _drop(self, msg: Msg, why: str) -> None:
        log.info("%s: dropped", why)
        with nats_call(self._nats, "drop a prefill entry"):
            await msg.ack_sync(CALL_TIMEOUT_S)

    async def _put_behind(self, msg: Msg, attempts: int) -> None:
        """Move the entry to the second line, as `_bury` moves one to the dead letters."""
        subject = self._late_stream + msg.subject.removeprefix(self.stream)
        headers = {**(msg.headers or {}), BEFORE: str(attempts), MSG_ID: subject}
        with nats_call(self._nats, f"move a prefill entry to {self._late_stream}"):
            await self._js.publish(subject, msg.data, timeout=CALL_TIMEOUT_S, headers=headers)
            await msg.ack_sync(CALL_TIMEOUT_S)
        self.deferred += 1

    async def _bury(self, msg: Msg, attempts: int, reason: str) -> None:
        """Move the entry to the dead letters: copy, then remove. If we die in between, the next copy has the same
        message id and is dropped as a duplicate."""
        headers = msg.headers or {}
        log.error("prefill entry %s is dead: %s", unquote(headers.get(ID, msg.subject)), reason)
        subject = self._dead_stream + msg.subject.removeprefix(msg.metadata.stream)
        about = {
            ATTEMPTS: str(attempts),
            REASON: quote(reason, safe=" "),
            DIED: repr(self._clock.wall_s()),
            MSG_ID: subject,
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
