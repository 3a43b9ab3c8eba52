"""How KV events travel: msgpack arrays on the NATS subject `{ns}.kv_events.{component}`, and a worker's answer.

Hashes are packed, 8 bytes each, little endian: reading them as msgpack numbers takes twice as long.

A worker's endpoint `kv_blocks` takes `{"epoch", "seq"}` (what the caller has; `""`, 0 for nothing) and streams

    {"block_size", "epoch", "seq", "replay": bool}      first; after this answer the asker has everything up to `seq`
    {"batches": [bytes, …]}                             replay: what was published since, as it was published
    {"runs": [bytes, …]}                                else: all blocks that it holds, as they follow each other
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from dynamo_local.core.kv.events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvent
from dynamo_local.core.kv.tracker import EventBatch
from dynamo_local.runtime.decoding import decode
from dynamo_local.runtime.requests.frames import invalid_payload

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
    """What a Router asks a worker's `kv_blocks`: the last batch that it has."""

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
