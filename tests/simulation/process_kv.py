"""etcd as one simulated process sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

from dynamo_local.ports import KeyValue, WatchEvent

if TYPE_CHECKING:
    from tests.simulation.world import World


class ProcessKv:
    """The store as one process sees it: while the process is stopped nothing is asked and no answer is taken, and up to
    `World.etcd_s` pass before anything is asked."""

    def __init__(self, world: World, go: asyncio.Event) -> None:
        self._world = world
        self._etcd = world.etcd
        self._go = go

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._etcd, name)

        async def held(*words: Any, **options: Any) -> Any:
            if self._world.etcd_s:
                await asyncio.sleep(self._world.rng.uniform(0.0, self._world.etcd_s))
            await self._go.wait()
            answer = await call(*words, **options)
            await self._go.wait()
            return answer

        return held

    async def watch_prefix(
        self, prefix: str, on_lost: Callable[[], None] | None = None
    ) -> AsyncGenerator[WatchEvent, None]:
        """See `KeyValueStore`."""
        async for event in self._etcd.watch_prefix(prefix, on_lost):
            await self._go.wait()
            yield event

    async def get(self, key: str) -> KeyValue | None:
        """See `KeyValueStore`."""
        await self._go.wait()
        return await self._etcd.get(key)
