"""An etcd in memory that passes the contract suite of the real one, with faults on demand."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field

from dynamo_local.errors import EtcdUnavailable, LeaseNotFound
from dynamo_local.ports import DeleteEvent, KeyValue, PutEvent, SnapshotEvent, WatchEvent


@dataclass
class _Lease:
    ttl_s: float
    expires_at_s: float
    keys: set[str] = field(default_factory=set)


class _Lost:
    """In a watcher's queue: its stream broke."""


@dataclass
class _Watcher:
    prefix: str
    queue: asyncio.Queue[WatchEvent | _Lost] = field(default_factory=asyncio.Queue)


class FakeEtcd:
    """`ports.KeyValueStore` in memory. Leases expire on the event loop's clock, plus what `advance` added.

    Faults: `available = False` (calls fail, watches wait), `fail_next(n)`, `restart(lose_data=...)`, `delay_s`.
    """

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.calls: list[str] = []
        self._lease_ids = itertools.count(0x694D967DA694EA16)
        self._available = True
        self._failures = 0
        self._ahead_s = 0.0
        self._closed = False
        self._watchers: list[_Watcher] = []
        self._back = asyncio.Event()
        self._back.set()
        self._reset()

    def _reset(self) -> None:
        self._keys: dict[str, KeyValue] = {}
        self._history: set[tuple[str, int]] = set()
        self._leases: dict[int, _Lease] = {}
        self._revision = 1

    @property
    def available(self) -> bool:
        return self._available

    @available.setter
    def available(self, value: bool) -> None:
        self._available = value
        if value:
            self._back.set()
        else:
            self._back.clear()
            self._break_watches()

    def fail_next(self, count: int) -> None:
        self._failures = count

    def restart(self, *, lose_data: bool = False) -> None:
        """Come back at once: watches break; leases start their TTL anew, or everything is gone."""
        if lose_data:
            self._reset()
        for lease in self._leases.values():
            lease.expires_at_s = self._now_s() + lease.ttl_s
        self._break_watches()
        self.available = True

    def advance(self, seconds: float) -> None:
        self._ahead_s += seconds
        self._expire()

    def lease_ids(self) -> tuple[int, ...]:
        self._expire()
        return tuple(self._leases)

    def _break_watches(self) -> None:
        for watcher in self._watchers:
            watcher.queue.put_nowait(_Lost())

    async def get(self, key: str) -> KeyValue | None:
        await self._enter("get")
        return self._keys.get(key)

    async def get_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        await self._enter("get_prefix")
        return self._list(prefix), self._revision

    async def put(self, key: str, value: bytes, lease_id: int = 0) -> int:
        await self._enter("put")
        return self.put_now(key, value, lease_id)

    async def put_all(self, values: Mapping[str, bytes], lease_id: int = 0) -> int:
        await self._enter("put_all")
        return self._put_now(values, lease_id)

    async def delete(self, key: str) -> bool:
        await self._enter("delete")
        if key not in self._keys:
            return False
        self._revision += 1
        self._drop(key)
        return True

    async def revision(self) -> int:
        await self._enter("revision")
        return self._revision

    async def remembers(self, key: str, mod_revision: int) -> bool:
        await self._enter("remembers")
        return (key, mod_revision) in self._history

    async def grant(self, ttl_s: int) -> int:
        await self._enter("grant")
        lease_id = next(self._lease_ids)
        self._leases[lease_id] = _Lease(ttl_s, self._now_s() + ttl_s)
        asyncio.get_running_loop().call_later(ttl_s + 0.001, self._expire)
        return lease_id

    async def keepalive(self, lease_id: int) -> int:
        await self._enter("keepalive")
        lease = self._lease(lease_id)
        lease.expires_at_s = self._now_s() + lease.ttl_s
        asyncio.get_running_loop().call_later(lease.ttl_s + 0.001, self._expire)
        return int(lease.ttl_s)

    async def revoke(self, lease_id: int) -> None:
        await self._enter("revoke")
        self._end_lease(lease_id)

    async def watch_prefix(
        self, prefix: str, on_lost: Callable[[], None] | None = None
    ) -> AsyncGenerator[WatchEvent, None]:
        watcher = _Watcher(prefix)
        self._watchers.append(watcher)
        try:
            while not self._closed:
                await self._back.wait()
                watcher.queue = asyncio.Queue()
                yield SnapshotEvent(tuple(self._list(prefix)), self._revision)
                while not isinstance(event := await watcher.queue.get(), _Lost):
                    yield event
                if on_lost is not None and not self._closed:
                    on_lost()
        finally:
            self._watchers.remove(watcher)

    async def close(self) -> None:
        self._closed = True
        self._back.set()
        self._break_watches()

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time() + self._ahead_s

    async def _enter(self, call: str) -> None:
        self.calls.append(call)
        await asyncio.sleep(self.delay_s)
        if self._failures > 0:
            self._failures -= 1
            raise EtcdUnavailable(f"cannot {call}: a fault was injected")
        if self._closed or not self._available:
            raise EtcdUnavailable(f"cannot {call}: etcd does not answer")
        self._expire()

    def _expire(self) -> None:
        now_s = self._now_s()
        for lease_id in [i for i, lease in self._leases.items() if lease.expires_at_s <= now_s]:
            self._end_lease(lease_id)

    def _end_lease(self, lease_id: int) -> None:
        lease = self._leases.pop(lease_id, None)
        if lease is None or not lease.keys:
            return
        self._revision += 1
        for key in sorted(lease.keys):
            self._drop(key)

    def _lease(self, lease_id: int) -> _Lease:
        if lease_id not in self._leases:
            raise LeaseNotFound(f"no lease {lease_id:x}")
        return self._leases[lease_id]

    def _list(self, prefix: str) -> list[KeyValue]:
        return [kv for key, kv in sorted(self._keys.items()) if key.startswith(prefix)]

    def end_lease_now(self, lease_id: int) -> None:
        self._end_lease(lease_id)

    def put_now(self, key: str, value: bytes, lease_id: int = 0) -> int:
        """A put by somebody else, without a turn of the event loop: nobody can come before it."""
        return self._put_now({key: value}, lease_id)

    def _put_now(self, values: Mapping[str, bytes], lease_id: int) -> int:
        lease = self._lease(lease_id) if lease_id else None
        self._revision += 1
        for key, value in values.items():
            before = self._keys.get(key)
            if before is not None and before.lease_id in self._leases:
                self._leases[before.lease_id].keys.discard(key)
            if lease is not None:
                lease.keys.add(key)
            self._keys[key] = KeyValue(key, value, lease_id, self._revision)
            self._history.add((key, self._revision))
            self._tell(key, PutEvent(self._keys[key]))
        return self._revision

    def _drop(self, key: str) -> None:
        kv = self._keys.pop(key)
        if kv.lease_id in self._leases:
            self._leases[kv.lease_id].keys.discard(key)
        self._tell(key, DeleteEvent(key))

    def _tell(self, key: str, event: WatchEvent) -> None:
        for watcher in self._watchers:
            if key.startswith(watcher.prefix):
                watcher.queue.put_nowait(event)
