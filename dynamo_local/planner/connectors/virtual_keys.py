"""The virtual connector's four keys, followed and written. See `core.virtual` for the protocol."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing

from dynamo_local.core.virtual import (
    DECISION_ID,
    NUM_DECODE_WORKERS,
    NUM_PREFILL_WORKERS,
    SCALED_DECISION_ID,
    KeysState,
    Layout,
    Stored,
    encode,
    read,
    root,
)
from dynamo_local.ports import DeleteEvent, KeyValue, KeyValueStore, PutEvent, SnapshotEvent, WatchEvent

log = logging.getLogger(__name__)

REWATCH_PAUSE_S = 0.5
"""Before a watch that failed is begun again."""


class VirtualKeys:
    """A view of the keys of one namespace. `told`: their last known values; `current` is False before the first list,
    and while etcd is away.

    `on_change` is called whenever either may have changed.
    """

    def __init__(self, kv: KeyValueStore, namespace: str, layout: Layout = Layout.V1) -> None:
        self.root = root(namespace, layout)
        self.told = KeysState()
        self.current = False
        self.on_change: Callable[[], None] = lambda: None
        self._kv = kv
        self._stored: dict[str, Stored] = {}
        self._changed = asyncio.Event()

    async def follow(self) -> None:
        """For ever; survives restarts of etcd."""
        while True:
            try:
                # Typed as AsyncIterator by the Protocol, but every watch is a generator, which must be closed here.
                async with aclosing(self._kv.watch_prefix(self.root, self._lost)) as events:  # type: ignore[type-var]
                    async for event in events:
                        self._apply(event)
            except Exception:
                log.exception("the watch of %s failed; it begins again in %g s", self.root, REWATCH_PAUSE_S)
            self._lost()
            await asyncio.sleep(REWATCH_PAUSE_S)

    async def refresh(self) -> KeysState:
        """What the keys say now. Raises `EtcdUnavailable`."""
        kvs, revision = await self._kv.get_prefix(self.root)
        names = {kv.key.removeprefix(self.root) for kv in kvs}
        for name in [name for name, known in self._stored.items() if known.revision <= revision]:
            if name not in names:  # otherwise it was written after this list was made
                del self._stored[name]
        for kv in kvs:
            self._store(kv)
        self.current = True
        self._announce()
        return self.told

    async def until(self, done: Callable[[KeysState], bool]) -> KeysState:
        """Wait, while `follow` runs, until `done` of the keys; returns their values then."""
        while not done(self.told):
            await self._changed.wait()
        return self.told

    async def decide(self, prefill: int | None, decode: int | None, decision_id: int) -> None:
        """Write a decision, its id last; None leaves a number as it is. Raises `EtcdUnavailable`, perhaps half way:
        the numbers do not count without their id."""
        for name, number in ((NUM_PREFILL_WORKERS, prefill), (NUM_DECODE_WORKERS, decode), (DECISION_ID, decision_id)):
            if number is not None:
                await self._put(name, number)

    async def acknowledge(self, decision_id: int) -> None:
        """Write that this decision, and all before it, are carried out. Raises `EtcdUnavailable`."""
        await self._put(SCALED_DECISION_ID, decision_id)

    async def _put(self, name: str, number: int) -> None:
        key, value = f"{self.root}{name}", encode(number)
        revision = await self._kv.put(key, value)  # no lease: the key outlives its writer
        self._apply(PutEvent(KeyValue(key, value, mod_revision=revision)))

    def _apply(self, event: WatchEvent) -> None:
        if isinstance(event, SnapshotEvent):
            self._stored, self.current = {}, True
            for kv in event.kvs:
                self._store(kv)
        elif isinstance(event, DeleteEvent):
            self._stored.pop(event.key.removeprefix(self.root), None)
        else:
            self._store(event.kv)
        self._announce()

    def _store(self, kv: KeyValue) -> None:
        """Store the key, unless an answer that came earlier was more recent."""
        name = kv.key.removeprefix(self.root)
        known = self._stored.get(name)
        if known is None or known.revision < kv.mod_revision:
            self._stored[name] = Stored(kv.value, kv.mod_revision)

    def _lost(self) -> None:
        if self.current:
            self.current = False
            self._announce()

    def _announce(self) -> None:
        self.told = read(self._stored)
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_change()
