"""The Router's side of KV events: an index that follows all workers of a component.

etcd lists the workers (the blocks of a worker that is gone are dropped), NATS brings their batches, and a worker that
is new, or whose numbers have a gap, is asked through its endpoint `kv_blocks`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.core.kv.index import KvIndex
from dynamo_local.core.kv.tracker import EventBatch, KvTracker, Snapshot
from dynamo_local.errors import DynamoError
from dynamo_local.ports import EndpointClient, KeyValueStore
from dynamo_local.runtime.decoding import UNREADABLE
from dynamo_local.runtime.discovery import InstanceView
from dynamo_local.runtime.kv_wire import (
    KV_BLOCKS_ENDPOINT,
    decode_batch,
    kv_events_subject,
    parse_answer,
    parse_part,
)
from dynamo_local.runtime.nats_client import Client, Msg, Subscription
from dynamo_local.runtime.nats_errors import subscribe, unsubscribe
from dynamo_local.system.cancelling import ended

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
