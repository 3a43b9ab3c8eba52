"""vLLM's KV events under our own hashes: which blocks the engine has cached, for the Router and for ourselves.

vLLM names blocks by its own hashes, whose kind is an option. Its events contain the tokens, so each block is hashed
again with `kv_hashes`. Events come numbered over a ZeroMQ socket. After a gap the cache is unknown, and unknown blocks
count as not cached.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from dynamo_local.core.routing.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from dynamo_local.kv_hashes import block_hashes
from dynamo_local.ports import KvEventPublisher


class ZmqListener:
    """Hands each message to `heard`, as its frames, until it is closed. `what` names the task. `heard` may not raise:
    that would end the listening."""

    def __init__(self, heard: Callable[[Sequence[bytes]], None], what: str) -> None:
        self._heard = heard
        self._what = what
        self._context: zmq.asyncio.Context | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, kind: int, attach: Callable[[zmq.asyncio.Socket], object]) -> None:
        """Listen on a socket of that kind; `attach` sets its options and binds or connects it. Call it before the
        engine starts, so that nothing is missed. Raises `zmq.ZMQError`."""
        self._context = zmq.asyncio.Context()
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        attach(socket)
        self._task = asyncio.create_task(self._listen(socket), name=self._what)

    async def _listen(self, socket: zmq.asyncio.Socket) -> None:
        try:
            while True:
                self._heard(await socket.recv_multipart())
        finally:
            socket.close()

    async def close(self) -> None:
        """Stop listening."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        if self._context is not None:
            self._context.term()


log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Block:
    """Our hash of a block that vLLM has, and how many copies of it."""

    ours: int
    copies: int = 1


class KvBlocks:
    """vLLM's events in, ours out. Keeps which blocks are cached. Pure."""

    def __init__(self) -> None:
        self._blocks: dict[Any, _Block] = {}
        self._cached: set[int] = set()

    def translate(self, events: Sequence[Any]) -> list[KvEvent]:
        """vLLM's events of one batch, as msgpack decodes them (tagged mappings)."""
        return [ours for event in events for ours in self._one(event)]

    def _one(self, event: Any) -> Iterator[KvEvent]:
        kind = event.get("type") if isinstance(event, dict) else None
        if kind == "BlockStored":
            yield from self._stored(event)
        elif kind == "BlockRemoved":
            yield from self._removed(event)
        elif kind == "AllBlocksCleared":
            yield from self.clear()

    def clear(self) -> Iterator[KvEvent]:
        """Forget all blocks: nothing is cached, or nothing is known."""
        self._blocks.clear()
        self._cached.clear()
        yield AllBlocksCleared()

    def _stored(self, event: dict[str, Any]) -> Iterator[KvEvent]:
        parent = None
        if event.get("parent_block_hash") is not None:
            before = self._blocks.get(event["parent_block_hash"])
            if before is None:
                return  # its parent block has no hash of ours
            parent = before.ours
        # With images, salts, other tiers or groups, tokens alone do not identify a block.
        special = any(key for key in event.get("extra_keys") or () if key) and not event.get("lora_id")
        if special or event.get("medium") not in (None, "GPU") or event.get("group_idx"):
            return
        hashes = block_hashes(
            event["token_ids"], event["block_size"], parent=parent, lora_id=int(event.get("lora_id") or 0)
        )
        new = []
        for theirs, ours in zip(event["block_hashes"], hashes, strict=False):
            known = self._blocks.get(theirs)
            if known is not None:
                known.copies += 1
                continue
            self._blocks[theirs] = _Block(ours)
            self._cached.add(ours)
            new.append(ours)
        if len(new) == len(hashes):
            yield BlocksStored(tuple(new), parent)
        else:  # some were known: one event for each, with its own parent
            chain = [parent, *hashes]
            yield from (BlocksStored((ours,), chain[n]) for n, ours in enumerate(hashes) if ours in new)

    def _removed(self, event: dict[str, Any]) -> Iterator[KvEvent]:
        if event.get("medium") not in (None, "GPU") or event.get("group_idx"):
            return
        gone = []
        for theirs in event["block_hashes"]:
            known = self._blocks.get(theirs)
            if known is None:
                continue
            known.copies -= 1
            if not known.copies:
                del self._blocks[theirs]
                self._cached.discard(known.ours)
                gone.append(known.ours)
        if gone:
            yield BlocksRemoved(tuple(gone))

    def hit_rate(self, token_ids: Sequence[int], block_size: int) -> float:
        """The share of these tokens whose blocks are cached, from the first on."""
        if not token_ids or not self._cached:
            return 0.0
        hits = 0
        for value in block_hashes(token_ids, block_size):
            if value not in self._cached:
                break
            hits += 1
        return hits * block_size / len(token_ids)


class KvEventBridge:
    """Listens to one engine's events until it is closed. `endpoint` is where vLLM binds its publisher."""

    def __init__(self, endpoint: str, publisher: KvEventPublisher) -> None:
        self.endpoint = endpoint
        self.blocks = KvBlocks()
        self._publisher = publisher
        self._next_seq = 0
        self._listener = ZmqListener(self._heard, "vLLM's KV events")

    def start(self) -> None:
        """Listen. Call it before the engine starts, so that no event is missed."""

        def attach(socket: zmq.asyncio.Socket) -> None:
            socket.setsockopt(zmq.RCVHWM, 0)  # no bound: a dropped event would be a gap
            socket.subscribe(b"")
            socket.connect(self.endpoint)

        self._listener.start(zmq.SUB, attach)

    def _heard(self, frames: Sequence[bytes]) -> None:
        try:
            self.received(frames)
        except (msgspec.DecodeError, ValueError, KeyError, TypeError, OverflowError):
            log.exception("an event of vLLM's KV cache cannot be read; nothing is known of the cache any more")
            self._publisher.publish(list(self.blocks.clear()))

    def received(self, frames: Sequence[bytes]) -> None:
        """`topic, sequence number (8 bytes, big endian), msgpack of [timestamp, events, rank]`."""
        _topic, number, payload = frames
        seq = int.from_bytes(number, "big")
        events: list[KvEvent] = []
        if seq != self._next_seq:
            log.warning("KV events %d to %d of vLLM were lost; its cache counts as empty", self._next_seq, seq - 1)
            events += self.blocks.clear()
        self._next_seq = seq + 1
        events += self.blocks.translate(msgspec.msgpack.decode(payload)[1])
        if events:
            self._publisher.publish(events)

    async def close(self) -> None:
        """Stop listening."""
        await self._listener.close()
