"""A planner of somebody else's, written from the virtual connector's protocol alone, on any key-value store."""

from __future__ import annotations

import asyncio

from dynamo_local.ports import KeyValueStore


class ForeignPlanner:
    """Writes decisions as Dynamo's does: numbers first, id last, from 0; None leaves a number as it is."""

    def __init__(self, kv: KeyValueStore, namespace: str = "dynamo", layout: str = "v1") -> None:
        self.kv = kv
        self.root = f"v1/{namespace}/planner/" if layout == "v1" else f"/{namespace}/planner/"
        self.decision_id = -1

    async def put(self, name: str, value: str | bytes | int) -> None:
        """One key."""
        raw = value if isinstance(value, bytes) else str(value).encode()
        await self.kv.put(self.root + name, raw)

    async def get(self, name: str) -> int:
        """One key; -1 where there is none."""
        kv = await self.kv.get(self.root + name)
        return -1 if kv is None else int(kv.value)

    async def decide(self, *, prefill: int | None = None, decode: int | None = None) -> int:
        if prefill is not None:
            await self.put("num_prefill_workers", prefill)
        if decode is not None:
            await self.put("num_decode_workers", decode)
        self.decision_id += 1
        await self.put("decision_id", self.decision_id)
        return self.decision_id

    async def acknowledged(self, decision_id: int, timeout_s: float = 30.0) -> None:
        """Return once it is; TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while await self.get("scaled_decision_id") < decision_id:
                await asyncio.sleep(0.05)
