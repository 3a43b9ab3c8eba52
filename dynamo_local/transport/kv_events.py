"""The Router's side of KV events: an index that follows all workers of a component.

etcd lists the workers. The index drops the blocks of a worker that is gone. NATS brings the batches of events. If a
worker is new, or its numbers have a gap, the index requests its blocks from its endpoint `kv_blocks`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import uuid
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.core.routing.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from dynamo_local.core.routing.kv_index import EventBatch, KvIndex, KvTracker, Snapshot
from dynamo_local.errors import DynamoError, NatsUnavailable
from dynamo_local.ports import EndpointClient, KeyValueStore
from dynamo_local.system.executors import ended
from dynamo_local.transport.decoding import UNREADABLE, decode
from dynamo_local.transport.discovery import InstanceView
from dynamo_local.transport.nats import nats_call, subscribe, unsubscribe
from dynamo_local.transport.nats_client import Client, Msg, Subscription
from dynamo_local.transport.requests.frames import invalid_payload

# How KV events travel: msgpack arrays on the NATS subject `{ns}.kv_events.{component}`, and a worker's answer.
#
# Hashes are packed, 8 bytes each, little endian: reading them as msgpack numbers takes twice as long.
#
# A worker's endpoint `kv_blocks` takes `{"epoch", "seq"}` (what the caller has; `""`, 0 for nothing) and streams
#
# three kinds of items:
#
# * `{"block_size", "epoch", "seq", "replay": bool}`, first. After this answer the caller has everything up to `seq`.
# * `{"batches": [bytes, …]}` with replay: the batches published since.
# * `{"runs": [bytes, …]}` without replay: all blocks that the worker holds, in runs.

KV_BLOCKS_ENDPOINT = "kv_blocks"

MAX_BATCH_BYTES = 2**20
"""A longer message is no batch of a worker's: an event of so many hashes would be a prompt of two million tokens."""


def kv_events_subject(namespace: str, component: str) -> str:
    """Where a component's workers publish."""
    return f"{namespace}.kv_events.{component}"


class _Stored(msgspec.Struct, array_like=True, tag="stored"):
    block_hashes: bytes
    parent: int | None = None


class _Removed(msgspec.Struct, array_like=True, tag="removed"):
    block_hashes: bytes


class _Cleared(msgspec.Struct, array_like=True, tag="cleared"):
    pass


_Event = _Stored | _Removed | _Cleared


class _Batch(msgspec.Struct, array_like=True):
    worker: int
    epoch: str
    seq: int
    events: tuple[_Event, ...] = ()


class KvBlocksRequest(msgspec.Struct):
    """A Router's question to a worker's `kv_blocks`: the number of the last batch that the Router has."""

    epoch: str = ""
    seq: int = 0


class Answer(msgspec.Struct):
    """The first item of a worker's answer. `block_size` is in tokens."""

    block_size: int
    epoch: str
    seq: int
    replay: bool


class _Part(msgspec.Struct):
    batches: list[bytes] = []
    runs: list[bytes] = []


_decoder = msgspec.msgpack.Decoder(_Batch)


def encode_batch(worker: int, batch: EventBatch) -> bytes:
    """For NATS."""
    events = tuple(_event_to_wire(event) for event in batch.events)
    return msgspec.msgpack.encode(_Batch(worker, batch.epoch, batch.seq, events))


def decode_batch(data: bytes) -> tuple[int, EventBatch]:
    """`(worker, batch)`. Raises `msgspec.DecodeError` for anything else."""
    if len(data) > MAX_BATCH_BYTES:
        raise msgspec.DecodeError(f"a batch of {len(data)} bytes; a worker's has {MAX_BATCH_BYTES} at most")
    found = decode(_decoder, data)
    try:
        return found.worker, EventBatch(
            found.epoch, found.seq, tuple([_event_from_wire(each) for each in found.events])
        )
    except ValueError as error:
        raise msgspec.DecodeError(f"hashes are not packed: {error}") from error


def parse_blocks_request(request: Any) -> KvBlocksRequest:
    """Raises `InvalidRequest`."""
    try:
        return msgspec.convert(request, KvBlocksRequest)
    except msgspec.ValidationError as error:
        raise invalid_payload(error) from error


def runs_item(runs: Iterable[Sequence[int]]) -> dict[str, Any]:
    """One item of an answer with all blocks."""
    return {"runs": [_pack(run) for run in runs]}


def parse_answer(item: Any) -> Answer:
    """Raises `msgspec.ValidationError`."""
    return msgspec.convert(item, Answer)


def parse_part(item: Any) -> tuple[list[EventBatch], list[list[int]]]:
    """`(batches, runs)` of an item behind the first. Raises `msgspec.DecodeError`."""
    part = msgspec.convert(item, _Part)
    try:
        return [decode_batch(data)[1] for data in part.batches], [_unpack(run).tolist() for run in part.runs]
    except ValueError as error:
        raise msgspec.DecodeError(f"hashes are not packed: {error}") from error


def _pack(block_hashes: Sequence[int]) -> bytes:
    packed = array("Q", block_hashes)
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def _unpack(data: bytes) -> array[int]:
    """Raises ValueError for a length that is no multiple of 8."""
    packed = array("Q")
    packed.frombytes(data)
    if sys.byteorder != "little":
        packed.byteswap()
    return packed


def _event_to_wire(event: KvEvent) -> _Event:
    if isinstance(event, BlocksStored):
        return _Stored(_pack(event.block_hashes), event.parent)
    return _Removed(_pack(event.block_hashes)) if isinstance(event, BlocksRemoved) else _Cleared()


def _event_from_wire(event: _Event) -> KvEvent:
    if isinstance(event, _Stored):
        return BlocksStored(tuple(_unpack(event.block_hashes)), event.parent)
    return BlocksRemoved(tuple(_unpack(event.block_hashes))) if isinstance(event, _Removed) else AllBlocksCleared()


log = logging.getLogger(__name__)

VIEW_TIMEOUT_S = 2.0
SYNC_TIMEOUT_S = 5.0
SYNC_RETRY_S = 0.25
SYNC_RETRY_MAX_S = 5.0


class KvFeed:
    """Keeps `index` current. `client` calls the component's `kv_blocks`."""

    def __init__(
        self,
        nats: Client,
        kv: KeyValueStore,
        namespace: str,
        component: str,
        client: EndpointClient,
        index: KvIndex,
        clock: Clock | None = None,
    ) -> None:
        self.block_sizes: dict[int, int] = {}
        """worker -> tokens per block, of those that have answered."""
        self.garbage = 0
        self._nats = nats
        self._subject = kv_events_subject(namespace, component)
        self._client = client
        self._clock = clock or AsyncioClock()
        self._tracker = KvTracker(index)
        self._view = InstanceView(kv, namespace, component, KV_BLOCKS_ENDPOINT)
        self._syncs: dict[int, asyncio.Task[None]] = {}
        self._subscription: Subscription | None = None
        self._following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen, then list the workers. Raises `NatsUnavailable`; without etcd the view is empty until it answers."""
        self._subscription = await subscribe(self._nats, self._subject, self._on_batch, f"listen on {self._subject}")
        await self._view.start(VIEW_TIMEOUT_S)
        self._join()
        self._following = asyncio.create_task(self._follow(), name=f"follow {self._subject}")

    async def close(self) -> None:
        """Stop listening; the index stays as it is."""
        await ended(self._following, *self._syncs.values())
        await self._view.close()
        await unsubscribe(self._nats, self._subscription)
        self._subscription = None

    async def synced(self, timeout_s: float) -> bool:
        """Whether the blocks of all workers are known, waiting for that up to `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._syncs:
                    await asyncio.wait(tuple(self._syncs.values()))
        except TimeoutError:
            return False
        return True

    def workers(self) -> frozenset[int]:
        """The workers whose events are followed."""
        return self._tracker.workers()

    async def _follow(self) -> None:
        while True:
            await self._view.changed()
            self._join()

    def _join(self) -> None:
        """Update the workers to those that are registered now."""
        there = {instance.instance_id for instance in self._view.instances()}
        for worker in self._tracker.workers() - there:
            self._tracker.gone(worker)
            self.block_sizes.pop(worker, None)
            log.info("worker %x is gone: its blocks are forgotten", worker)
        for worker in there:
            self._tracker.joined(worker)
            self._sync_if_needed(worker)

    async def _on_batch(self, msg: Msg) -> None:
        try:
            worker, batch = decode_batch(msg.data)
        except UNREADABLE as error:
            self.garbage += 1
            log.log(
                logging.WARNING if self.garbage == 1 else logging.DEBUG,
                "something that is no batch of KV events came on %s: %s",
                msg.subject,
                error,
            )
            return
        self._tracker.receive(worker, batch, self._clock.now_s())
        self._sync_if_needed(worker)

    def _sync_if_needed(self, worker: int) -> None:
        if worker not in self._syncs and self._tracker.needs_sync(worker):
            task = asyncio.create_task(self._sync(worker), name=f"KV blocks of {worker:x}")
            self._syncs[worker] = task
            task.add_done_callback(self._synced(worker))

    def _synced(self, worker: int) -> Callable[[asyncio.Task[None]], None]:
        def done(task: asyncio.Task[None]) -> None:
            self._syncs.pop(worker, None)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("asking worker %x for its KV blocks failed unexpectedly", worker, exc_info=error)

        return done

    async def _sync(self, worker: int) -> None:
        """Ask until nothing is missing, or the worker has gone."""
        wait_s = SYNC_RETRY_S
        while self._tracker.needs_sync(worker):
            try:
                async with asyncio.timeout(SYNC_TIMEOUT_S):
                    await self._ask(worker)
            except TimeoutError:
                log.warning("worker %x did not tell its KV blocks within %g s; asking again", worker, SYNC_TIMEOUT_S)
            except (DynamoError, msgspec.DecodeError) as error:
                log.info("worker %x cannot be asked for its KV blocks; trying again: %s", worker, error)
            else:
                if not self._tracker.needs_sync(worker):
                    return
            await self._clock.sleep_until(self._clock.now_s() + wait_s)
            wait_s = min(2 * wait_s, SYNC_RETRY_MAX_S)

    async def _ask(self, worker: int) -> None:
        epoch, seq = self._tracker.position(worker)
        stream = await self._client.call({"epoch": epoch, "seq": seq}, instance_id=worker, timeout_s=SYNC_TIMEOUT_S)
        answer, batches, runs = None, list[EventBatch](), list[list[int]]()
        try:
            async for item in stream:
                if answer is None:
                    answer = parse_answer(item)
                else:
                    more, held = parse_part(item)
                    batches += more
                    runs += held
        finally:
            await stream.aclose()
        if answer is None:
            raise DynamoError(f"worker {worker:x} gave an empty answer")
        self.block_sizes[worker] = answer.block_size
        now_s = self._clock.now_s()
        if answer.replay:
            self._tracker.replayed(worker, batches, now_s)
            log.info("worker %x: %d batches of KV events made good", worker, len(batches))
        else:
            self._tracker.rebuilt(worker, Snapshot(answer.epoch, answer.seq, runs), now_s)
            log.info("worker %x: its view is rebuilt, %d KV blocks", worker, sum(map(len, runs)))


# The worker publishes its engine's KV events in numbered batches. A reader that missed some can request them again.
#
# Nothing here can fail a request: while NATS is away batches are only kept, and the next published number shows the
# gap.

SIGN_OF_LIFE_S = 1.0
"""Without new events the last number is published again this often, so that a lost last batch is noticed."""
KEPT_BATCHES = 1024
KEPT_BLOCKS = 131_072
"""Bounds of what can be replayed: hashes are 8 bytes on the wire and some 40 in memory, so about 5 MB."""
BATCH_BLOCKS = 16_384
"""Hashes in one message: NATS refuses messages above 1 MiB unless configured."""

RUNS_PER_ITEM = 256
RUN_BLOCKS = 1024


class NatsKvEventPublisher:
    """`ports.KvEventPublisher` over NATS. `lease_id_getter` gives the current instance id.

    It also remembers which blocks the engine holds, so that a Router that has missed too much can ask for all.
    """

    def __init__(
        self,
        nats: Client,
        namespace: str,
        component: str,
        lease_id_getter: Callable[[], int],
        clock: Clock | None = None,
    ) -> None:
        self.block_size = 0
        """Tokens per block; set by the component once its engine has started."""
        self._nats = nats
        self._namespace = namespace
        self._subject = kv_events_subject(namespace, component)
        self._lease_id = lease_id_getter
        self._clock = clock or AsyncioClock()
        self._epoch = uuid.uuid4().hex
        self._seq = 0
        self._held: dict[int, int | None] = {}
        """block -> the block before it."""
        self._kept: deque[EventBatch] = deque()
        self._kept_blocks = 0
        self._unsent: deque[EventBatch] = deque(maxlen=KEPT_BATCHES)
        self._news = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start sending."""
        self._loop_task = asyncio.create_task(self._run(), name=f"KV events on {self._subject}")

    def moved(self, component: str, lease_id_getter: Callable[[], int]) -> None:
        """The same engine works for another component from now on: Routers of that one ask for all that is held."""
        self._subject = kv_events_subject(self._namespace, component)
        self._lease_id = lease_id_getter
        self._epoch = uuid.uuid4().hex
        self._unsent.clear()
        self._kept.clear()
        self._kept_blocks = 0
        self._news.set()

    async def close(self) -> None:
        """Send the batches that are left, if NATS is connected, and stop."""
        if self._loop_task is not None:
            await ended(self._loop_task)
            self._loop_task = None
            await self._send_all()

    def publish(self, events: Sequence[KvEvent]) -> None:
        part: list[KvEvent] = []
        size = 0
        for event in events:
            self._remember(event)
            if part and size + _blocks(event) > BATCH_BLOCKS:
                self._cut(part)
                part, size = [], 0
            part.append(event)
            size += _blocks(event)
        if part:
            self._cut(part)
        self._news.set()

    async def answer(self, request: Any) -> AsyncGenerator[dict[str, Any], None]:
        """Items for the endpoint `kv_blocks`: what the asker of a `KvBlocksRequest` has not yet, or all (see
        `transport.kv_events`)."""
        question = parse_blocks_request(request)
        since = self._since(question.epoch, question.seq)
        runs = _runs(self._held) if since is None else []  # of this moment: the items are read later
        yield {"block_size": self.block_size, "epoch": self._epoch, "seq": self._seq, "replay": since is not None}
        for batch in since or ():
            yield {"batches": [encode_batch(0, batch)]}
        for begin in range(0, len(runs), RUNS_PER_ITEM):
            yield runs_item(runs[begin : begin + RUNS_PER_ITEM])

    def _since(self, epoch: str, seq: int) -> list[EventBatch] | None:
        """Batches after `seq`; None if they are not kept any more (or for another epoch)."""
        first = self._seq - len(self._kept)
        if epoch != self._epoch or not first <= seq <= self._seq:
            return None
        return list(islice(self._kept, seq - first, None))

    def _remember(self, event: KvEvent) -> None:
        if isinstance(event, BlocksStored):
            self._held.update(zip(event.block_hashes, (event.parent, *event.block_hashes), strict=False))
        elif isinstance(event, BlocksRemoved):
            for block in event.block_hashes:
                self._held.pop(block, None)
        elif isinstance(event, AllBlocksCleared):
            self._held.clear()

    def _cut(self, events: list[KvEvent]) -> None:
        self._seq += 1
        batch = EventBatch(self._epoch, self._seq, tuple(events))
        self._kept.append(batch)
        self._unsent.append(batch)
        self._kept_blocks += sum(map(_blocks, batch.events))
        while len(self._kept) > KEPT_BATCHES or self._kept_blocks > KEPT_BLOCKS:
            self._kept_blocks -= sum(map(_blocks, self._kept.popleft().events))

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(SIGN_OF_LIFE_S):
                    await self._news.wait()
            except TimeoutError:
                self._unsent.append(EventBatch(self._epoch, self._seq))
            self._news.clear()
            await self._send_all()

    async def _send_all(self) -> None:
        while self._unsent:
            batch = self._unsent.popleft()
            # While disconnected the client would buffer it; the Router will ask for what it has missed.
            if not self._nats.is_connected:
                continue
            try:
                with nats_call(self._nats, "publish KV events"):
                    await self._nats.publish(self._subject, encode_batch(self._lease_id(), batch))
            except NatsUnavailable as error:
                log.warning("%s (batch %d; whoever misses it asks for it)", error, batch.seq)


def _runs(held: Mapping[int, int | None]) -> list[list[int]]:
    """The blocks as they follow each other; a long run in parts."""
    runs: list[list[int]] = []
    before: int | None = None
    for block, parent in held.items():
        if runs and parent == before and len(runs[-1]) < RUN_BLOCKS:
            runs[-1].append(block)
        else:
            runs.append([block])
        before = block
    return runs


def _blocks(event: KvEvent) -> int:
    return 0 if isinstance(event, AllBlocksCleared) else len(event.block_hashes)
