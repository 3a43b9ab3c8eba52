"""How KV events travel: msgpack arrays on the NATS subject `{ns}.kv_events.{component}`, and a worker's answer.

A worker's endpoint `kv_blocks` takes `{"epoch", "seq"}` (what the asker has; `""`, 0 for nothing) and streams

    {"block_size", "epoch", "seq", "replay": bool}      first; after this answer the asker has everything up to `seq`
    {"batches": [batch, …]}                             replay: what was published since
    {"block_hashes": [int, …]}                          else: all blocks that the worker holds
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from dynamo_local.core.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from dynamo_local.core.kv_tracker import EventBatch

KV_BLOCKS_ENDPOINT = "kv_blocks"


def kv_events_subject(namespace: str, component: str) -> str:
    """Where a component's workers publish."""
    return f"{namespace}.kv_events.{component}"


class _Stored(msgspec.Struct, array_like=True, tag="stored"):
    block_hashes: tuple[int, ...]
    parent: int | None = None


class _Removed(msgspec.Struct, array_like=True, tag="removed"):
    block_hashes: tuple[int, ...]


class _Cleared(msgspec.Struct, array_like=True, tag="cleared"):
    pass


_Event = _Stored | _Removed | _Cleared


class _Batch(msgspec.Struct, array_like=True):
    worker: int
    epoch: str
    seq: int
    events: tuple[_Event, ...] = ()


class Answer(msgspec.Struct):
    """The first item of a worker's answer. `block_size` is in tokens."""

    block_size: int
    epoch: str
    seq: int
    replay: bool


class _Part(msgspec.Struct):
    batches: list[_Batch] = []
    block_hashes: list[int] = []


_decoder = msgspec.msgpack.Decoder(_Batch)


def encode_batch(worker: int, batch: EventBatch) -> bytes:
    """For NATS."""
    return msgspec.msgpack.encode(_to_wire(worker, batch))


def decode_batch(data: bytes) -> tuple[int, EventBatch]:
    """`(worker, batch)`. Raises `msgspec.DecodeError` for anything else."""
    found = _decoder.decode(data)
    return found.worker, _from_wire(found)


def batches_item(batches: Iterable[EventBatch]) -> dict[str, Any]:
    """One item of a replay."""
    return {"batches": [msgspec.to_builtins(_to_wire(0, batch)) for batch in batches]}


def parse_answer(item: Any) -> Answer:
    """Raises `msgspec.ValidationError`."""
    return msgspec.convert(item, Answer)


def parse_part(item: Any) -> tuple[list[EventBatch], list[int]]:
    """`(batches, block hashes)` of an item behind the first. Raises `msgspec.ValidationError`."""
    part = msgspec.convert(item, _Part)
    return [_from_wire(batch) for batch in part.batches], part.block_hashes


def _to_wire(worker: int, batch: EventBatch) -> _Batch:
    return _Batch(worker, batch.epoch, batch.seq, tuple(_event_to_wire(event) for event in batch.events))


def _from_wire(batch: _Batch) -> EventBatch:
    return EventBatch(batch.epoch, batch.seq, tuple(_event_from_wire(event) for event in batch.events))


def _event_to_wire(event: KvEvent) -> _Event:
    if isinstance(event, BlocksStored):
        return _Stored(event.block_hashes, event.parent)
    return _Removed(event.block_hashes) if isinstance(event, BlocksRemoved) else _Cleared()


def _event_from_wire(event: _Event) -> KvEvent:
    if isinstance(event, _Stored):
        return BlocksStored(event.block_hashes, event.parent)
    return BlocksRemoved(event.block_hashes) if isinstance(event, _Removed) else AllBlocksCleared()
