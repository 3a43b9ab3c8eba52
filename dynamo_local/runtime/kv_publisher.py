"""A worker's side of KV events: the engine's events are published in numbered batches, and can be asked for again.

Nothing here can fail a request: while NATS is away batches are only kept, and the next published number shows the gap.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from itertools import islice
from typing import Any

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.core.kv.events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from dynamo_local.core.kv.tracker import EventBatch
from dynamo_local.errors import NatsUnavailable
from dynamo_local.runtime.kv_wire import (
    encode_batch,
    kv_events_subject,
    parse_blocks_request,
    runs_item,
)
from dynamo_local.runtime.nats_client import Client
from dynamo_local.runtime.nats_errors import nats_call
from dynamo_local.system.cancelling import ended

log = logging.getLogger(__name__)

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
        `runtime.kv_wire`)."""
        asked = parse_blocks_request(request)
        since = self._since(asked.epoch, asked.seq)
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
