"""One watch: its stream of changes, and how an etcd that lost its data is told from one whose workers have left."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from aetcd import rpc
from grpc.aio import EOF, UsageError

from dynamo_local.ports import DeleteEvent, KeyValue, PutEvent, WatchEvent
from dynamo_local.runtime.etcd.connection import Member, details_of, key_value, prefix_end

log = logging.getLogger(__name__)

REFILL_S = 2.0
"""When etcd comes back without any key that we knew, workers register again after their next keepalive. For this long
the last known state is kept, so that requests are served meanwhile."""
HEARTBEAT_S = 1.0
"""A silent watch is asked for its progress this often; after `HEARTBEATS_MISSED` without an answer it is dead."""
HEARTBEATS_MISSED = 2


class KnownKeys:
    """The keys that a watch has reported, to tell an etcd that lost its data from one whose workers have left."""

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._until_s: float | None = None

    def may_come_back(self, kvs: Sequence[KeyValue]) -> bool:
        """Whether, for less than `REFILL_S`, fewer keys are listed than we knew and none of those that we knew."""
        if len(kvs) >= len(self._keys) or any(kv.key in self._keys for kv in kvs):
            return False
        now_s = time.monotonic()
        if self._until_s is None:
            self._until_s = now_s + REFILL_S
        return now_s < self._until_s

    def listed(self, kvs: Sequence[KeyValue]) -> None:
        """These are all keys, as they were just reported."""
        self._keys, self._until_s = {kv.key for kv in kvs}, None

    def changed(self, event: WatchEvent) -> None:
        """This change was just reported."""
        if isinstance(event, PutEvent):
            self._keys.add(event.kv.key)
        elif isinstance(event, DeleteEvent):
            self._keys.discard(event.key)


async def follow(member: Member, prefix: str, revision: int, timeout_s: float) -> AsyncGenerator[WatchEvent, None]:
    """Changes from that revision on. Ends when the stream breaks, falls silent, or etcd has lost its data.

    `timeout_s` bounds each message to the member.
    """
    raw = prefix.encode()
    create = rpc.WatchCreateRequest(key=raw or b"\0", range_end=prefix_end(raw), start_revision=revision)
    call = member.watch.Watch(metadata=member.metadata)
    read: asyncio.Future[Any] | None = None
    silent = 0
    try:
        await _send(call, rpc.WatchRequest(create_request=create), timeout_s)
        read = asyncio.ensure_future(call.read())
        while True:
            done, _ = await asyncio.wait({read}, timeout=HEARTBEAT_S)
            if not done:
                if silent >= HEARTBEATS_MISSED:
                    log.warning("watch of %s: etcd has been silent for %g s", prefix, HEARTBEAT_S * (silent + 1))
                    return
                silent += 1
                await _send(call, rpc.WatchRequest(progress_request=rpc.WatchProgressRequest()), timeout_s)
                continue
            silent = 0
            response = None if read.cancelled() else read.result()  # cancelled: the channel was closed
            # A header older than our list: etcd came back without its data in between.
            if response in (None, EOF) or response.canceled or response.header.revision < revision - 1:
                return
            read = asyncio.ensure_future(call.read())
            for event in response.events:
                yield _watch_event(event)
    except (rpc.AioRpcError, asyncio.InvalidStateError, UsageError, TimeoutError) as error:
        log.info("watch of %s broke: %s", prefix, details_of(error))
    finally:
        call.cancel()
        if read is not None:
            read.cancel()
            await asyncio.gather(read, return_exceptions=True)


async def _send(call: Any, request: Any, timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        await call.write(request)


def _watch_event(event: Any) -> WatchEvent:
    if event.type == rpc.Event.DELETE:
        return DeleteEvent(event.kv.key.decode(errors="replace"))
    return PutEvent(key_value(event.kv))
