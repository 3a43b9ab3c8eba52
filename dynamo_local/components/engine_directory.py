"""The engines that hand over KV: `{namespace}/nixl_metadata/{engine id}` in etcd, under each worker's lease.

A decode worker learns of an engine when the first KV comes from it (any number of prefill workers may come and go),
and forgets it when its key goes. The address of the KV is part of each hand-off, so the KV of a leaving
prefill worker, which has given its lease back, can still be pulled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Any, cast

import msgspec

from dynamo_local.errors import InfraUnavailable, KvTransferError
from dynamo_local.ports import DeleteEvent, EngineInfo, KeyValueStore, PutEvent, SnapshotEvent, WatchEvent
from dynamo_local.system.cancelling import ended

log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 0.5
"""After this the KV is pulled unchecked: etcd may be away, and the pull has a deadline of its own."""


class EngineCard(msgspec.Struct, frozen=True):
    """The value of a key."""

    engine_id: str
    engine: str
    model: str
    block_size: int
    host: str
    port: int
    worker: str

    @classmethod
    def of(cls, info: EngineInfo, worker: str) -> EngineCard | None:
        """None for an engine that does not hand over KV."""
        if info.handoff_address is None:
            return None
        host, port = info.handoff_address
        return cls(info.engine_id, info.engine, info.model, info.block_size, host, port, worker)

    def encode(self) -> bytes:
        """The JSON to register."""
        return msgspec.json.encode(self)


def engine_key(namespace: str, engine_id: str) -> str:
    """`dynamo/nixl_metadata/{engine id}`"""
    return f"{namespace}/nixl_metadata/{engine_id}"


class EngineDirectory:
    """The cards of the engines that were asked about, each watched until it goes. `info` is our own engine's."""

    def __init__(self, kv: KeyValueStore, namespace: str, info: EngineInfo) -> None:
        self._kv = kv
        self._namespace = namespace
        self._info = info
        self._cards: dict[str, EngineCard | None] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._loaded: dict[str, asyncio.Event] = {}

    @property
    def known(self) -> frozenset[str]:
        """Ids of the engines whose cards are loaded."""
        return frozenset(engine_id for engine_id, card in self._cards.items() if card is not None)

    async def check(self, params: Mapping[str, Any]) -> None:
        """Raises `KvTransferError` if these `kv_transfer_params` contradict the engine's card.

        An engine without a card is leaving, or dead: the pull will tell.
        """
        engine_id = str(params.get("remote_engine_id"))
        card = await self._load(engine_id)
        if card is None:
            return
        if card.model != self._info.model:
            raise KvTransferError(
                f"engine {engine_id} of {card.worker} runs model {card.model}, and this worker {self._info.model}: its "
                "KV is of no use here; give both the same model"
            )
        if card.engine != self._info.engine:
            raise KvTransferError(
                f"{card.worker} runs the {card.engine} engine, and this worker {self._info.engine}; give both the same"
            )
        if (params.get("remote_host"), params.get("remote_port")) != (card.host, card.port):
            raise KvTransferError(
                f"the KV is said to be at {params.get('remote_host')}:{params.get('remote_port')}, but engine "
                f"{engine_id} of {card.worker} is at {card.host}:{card.port}"
            )

    async def _load(self, engine_id: str) -> EngineCard | None:
        if engine_id not in self._watches:
            self._loaded[engine_id] = asyncio.Event()
            self._watches[engine_id] = asyncio.create_task(self._follow(engine_id), name=f"engine {engine_id}")
        try:
            async with asyncio.timeout(LOAD_TIMEOUT_S):
                await self._loaded[engine_id].wait()
        except TimeoutError:
            log.warning("etcd does not say who engine %s is; its KV is pulled all the same", engine_id)
        return self._cards.get(engine_id)

    async def _follow(self, engine_id: str) -> None:
        """Load its card, and keep it as long as it is there."""
        key = engine_key(self._namespace, engine_id)
        events = cast(AsyncGenerator[WatchEvent, None], self._kv.watch_prefix(key))
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    value = self._value(event, key)
                    if value is None:
                        break
                    self._cards[engine_id] = _decoded(value, key)
                    self._loaded[engine_id].set()
        except InfraUnavailable as error:
            log.warning("engine %s is looked up again at its next KV: %s", engine_id, error)
        finally:
            self._cards.pop(engine_id, None)
            self._watches.pop(engine_id, None)
            self._loaded.pop(engine_id).set()

    @staticmethod
    def _value(event: WatchEvent, key: str) -> bytes | None:
        """The card's bytes after the event; None if it is gone."""
        if isinstance(event, SnapshotEvent):
            return next((kv.value for kv in event.kvs if kv.key == key), None)
        if isinstance(event, PutEvent):
            return event.kv.value
        assert isinstance(event, DeleteEvent)
        return None

    async def close(self) -> None:
        """End the watches."""
        await ended(*self._watches.values())


def _decoded(value: bytes, key: str) -> EngineCard | None:
    try:
        return msgspec.json.decode(value, type=EngineCard)
    except msgspec.DecodeError as error:
        log.warning("the value of %s in etcd is skipped: %s", key, error)
        return None
