"""`ports.KeyValueStore` over etcd's gRPC API, with the stubs of aetcd.

Only aetcd's protocol layer (`aetcd.rpc`) is used. Its `Client` has faults that we cannot accept: `add_callback`
without a timeout waits for ever while etcd is away, `_terminate_stream` makes the reading task await itself when the
stream breaks, and one broken stream ends every watch of the process. A stream per watch is thirty lines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from aetcd import rpc
from grpc.aio import UsageError

from dynamo_local.errors import EtcdUnavailable, LeaseNotFound
from dynamo_local.infra.access import EtcdAccess
from dynamo_local.ports import KeyValue, SnapshotEvent, WatchEvent
from dynamo_local.runtime.etcd.connection import (
    EtcdRefused,
    Member,
    OutOfRange,
    details_of,
    is_away,
    is_stale,
    key_value,
    parse_endpoints,
    prefix_end,
    translated,
)
from dynamo_local.runtime.etcd.watch import KnownKeys, follow

log = logging.getLogger(__name__)
T = TypeVar("T")

NO_ACCESS = EtcdAccess()
CONNECT_RETRY_S = 0.05
WATCH_RETRY_S = 0.1
"""Pause between attempts to list again while etcd is away. gRPC's own back-off (`connection`) bounds the recovery."""
REFILL_POLL_S = 0.05
"""Pause between attempts to list again while an etcd that came back has none of the keys that we knew."""


class EtcdStore:
    """etcd as a `KeyValueStore`. Safe to use from many tasks of one event loop.

    A call goes to the endpoint that answered last and, where that one is away, to each of the others once. It
    fails after `timeout_s`, or at once where every endpoint refuses the connection: callers retry if they can wait.
    """

    def __init__(
        self, endpoints: str | Sequence[str], timeout_s: float = 3.0, *, access: EtcdAccess = NO_ACCESS
    ) -> None:
        """Connects on first use; see `connect`. Needs a running event loop. `access` is how etcd knows us."""
        self.timeout_s = timeout_s
        self._members = [Member(endpoint, access) for endpoint in parse_endpoints(endpoints)]
        self._current = 0
        self._closed = False

    @classmethod
    async def connect(
        cls, endpoints: str | Sequence[str], timeout_s: float = 3.0, *, access: EtcdAccess = NO_ACCESS
    ) -> EtcdStore:
        """A store that has answered once. Raises `EtcdUnavailable` past `timeout_s`, and `ConfigError`."""
        return await cls.connect_when_up(endpoints, timeout_s, timeout_s=timeout_s, access=access)

    @classmethod
    async def connect_when_up(
        cls,
        endpoints: str | Sequence[str],
        wait_s: float,
        *,
        timeout_s: float = 3.0,
        access: EtcdAccess = NO_ACCESS,
    ) -> EtcdStore:
        """`connect` to an etcd that may still be starting: waits `wait_s`; `timeout_s` is for each call.

        Raises `EtcdRefused`, an `EtcdUnavailable`, at once where waiting does not help.
        """
        store = cls(endpoints, timeout_s, access=access)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        try:
            while True:
                try:
                    async with asyncio.timeout_at(deadline_s):
                        await store.revision()
                except TimeoutError:
                    raise EtcdUnavailable(
                        f"etcd did not answer within {wait_s:g} s at {', '.join(store.endpoints)}"
                    ) from None
                except EtcdRefused:
                    raise
                except EtcdUnavailable:
                    if loop.time() + CONNECT_RETRY_S >= deadline_s:
                        raise
                    await asyncio.sleep(CONNECT_RETRY_S)
                else:
                    return store
        except BaseException:
            await store.close()
            raise

    @property
    def endpoints(self) -> tuple[str, ...]:
        """As given, in the form `http://host:port`, or with `https`."""
        return tuple(member.endpoint.url for member in self._members)

    async def close(self) -> None:
        """End every watch and every connection. Closing twice is no error."""
        self._closed = True
        for member in self._members:
            await member.channel.close()

    # --- keys ------------------------------------------------------------------------------------

    async def get(self, key: str) -> KeyValue | None:
        """The key as it is now."""
        request = rpc.RangeRequest(key=key.encode())
        response = await self._ask(f"get {key}", lambda m: m.kv.Range, request)
        return key_value(response.kvs[0]) if response.kvs else None

    async def get_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        """All keys under the prefix in order, and the store's revision at that moment."""
        raw = prefix.encode()
        request = rpc.RangeRequest(key=raw or b"\0", range_end=prefix_end(raw))
        response = await self._ask(f"list {prefix}", lambda m: m.kv.Range, request)
        return [key_value(kv) for kv in response.kvs], int(response.header.revision)

    async def put(self, key: str, value: bytes, lease_id: int = 0) -> int:
        """Write; returns the revision. Raises `LeaseNotFound` if the lease is gone."""
        request = rpc.PutRequest(key=key.encode(), value=value, lease=lease_id)
        response = await self._ask(f"put {key}", lambda m: m.kv.Put, request)
        return int(response.header.revision)

    async def put_all(self, values: Mapping[str, bytes], lease_id: int = 0) -> int:
        """Write all of them in one transaction; returns the revision. Raises `LeaseNotFound` if the lease is gone."""
        puts = [rpc.PutRequest(key=key.encode(), value=value, lease=lease_id) for key, value in values.items()]
        request = rpc.TxnRequest(success=[rpc.RequestOp(request_put=put) for put in puts])
        response = await self._ask(f"put {', '.join(values)}", lambda m: m.kv.Txn, request)
        return int(response.header.revision)

    async def delete(self, key: str) -> bool:
        """Delete; whether the key was there."""
        request = rpc.DeleteRangeRequest(key=key.encode())
        response = await self._ask(f"delete {key}", lambda m: m.kv.DeleteRange, request)
        return int(response.deleted) > 0

    async def revision(self) -> int:
        """The store's revision, read linearizably."""
        request = rpc.RangeRequest(key=b"\0", count_only=True)
        response = await self._ask("read the revision", lambda m: m.kv.Range, request)
        return int(response.header.revision)

    async def remembers(self, key: str, mod_revision: int) -> bool:
        """Whether the key was written at that revision in this etcd's history; see `ports.KeyValueStore`."""
        request = rpc.RangeRequest(key=key.encode(), revision=mod_revision)
        try:
            response = await self._ask(f"read {key} at {mod_revision}", lambda m: m.kv.Range, request)
        except OutOfRange as error:
            # "required revision is a future revision", or "... has been compacted": a compacted history is ours.
            return "compacted" in str(error)
        return any(kv.mod_revision == mod_revision for kv in response.kvs)

    # --- leases ----------------------------------------------------------------------------------

    async def grant(self, ttl_s: int) -> int:
        """A new lease's id. etcd may grant longer than asked (its least is 1.5 election timeouts)."""
        request = rpc.LeaseGrantRequest(TTL=ttl_s)
        response = await self._ask("grant a lease", lambda m: m.lease.LeaseGrant, request)
        return int(response.ID)

    async def keepalive(self, lease_id: int) -> int:
        """Refresh once; the TTL in seconds. Raises `LeaseNotFound`: etcd then answers a TTL of 0, not an error."""
        response = await self._call(f"keep lease {lease_id:x} alive", lambda m: self._refresh(m, lease_id))
        if response.TTL <= 0:
            raise LeaseNotFound(f"etcd does not know lease {lease_id:x}: it was revoked, it expired, or etcd lost it")
        return int(response.TTL)

    async def _refresh(self, member: Member, lease_id: int) -> Any:
        call = member.lease.LeaseKeepAlive(
            iter([rpc.LeaseKeepAliveRequest(ID=lease_id)]), timeout=self.timeout_s, metadata=member.metadata
        )
        try:
            async for response in call:
                return response
        finally:
            call.cancel()
        raise EtcdUnavailable(f"etcd at {member.target} closed the stream while keeping lease {lease_id:x} alive")

    async def revoke(self, lease_id: int) -> None:
        """Revoke, which deletes its keys; a lease that is gone already is no error."""
        request = rpc.LeaseRevokeRequest(ID=lease_id)
        try:
            await self._ask(f"revoke lease {lease_id:x}", lambda m: m.lease.LeaseRevoke, request)
        except LeaseNotFound:
            log.debug("lease %x was gone already", lease_id)

    # --- watching --------------------------------------------------------------------------------

    async def watch_prefix(
        self, prefix: str, on_lost: Callable[[], None] | None = None
    ) -> AsyncGenerator[WatchEvent, None]:
        """See `ports.KeyValueStore.watch_prefix`. Ends only by closing it or the store."""
        lost = False
        known = KnownKeys()
        while not self._closed:
            try:
                kvs, revision = await self.get_prefix(prefix)
            except EtcdUnavailable as error:
                if self._closed:
                    return
                if not lost:
                    log.warning("watch of %s: %s; the last known state stays", prefix, error)
                    _notify(on_lost)
                lost = True
                await asyncio.sleep(WATCH_RETRY_S)
                continue
            lost = False
            if known.may_come_back(kvs):
                await asyncio.sleep(REFILL_POLL_S)
                continue
            known.listed(kvs)
            yield SnapshotEvent(tuple(kvs), revision)
            async with aclosing(follow(self._members[self._current], prefix, revision + 1, self.timeout_s)) as events:
                async for event in events:
                    known.changed(event)
                    yield event
            if not self._closed:
                lost = True
                _notify(on_lost)

    # --- plumbing --------------------------------------------------------------------------------

    async def _ask(self, what: str, method: Callable[[Member], Any], request: Any) -> Any:
        return await self._call(
            what, lambda member: method(member)(request, timeout=self.timeout_s, metadata=member.metadata)
        )

    async def _call(self, what: str, send: Callable[[Member], Awaitable[T]]) -> T:
        """Send to the current member and, while those are away, once to each other one."""
        if self._closed:
            raise EtcdUnavailable(f"cannot {what}: this connection to etcd was closed")
        problems: list[str] = []
        for _ in self._members:
            member = self._members[self._current]
            try:
                async with asyncio.timeout(self.timeout_s + 0.5):  # gRPC's own deadline comes first
                    return await self._authenticated(member, send)
            except (rpc.AioRpcError, UsageError, TimeoutError) as error:
                if not is_away(error):
                    raise translated(error, what) from error
                problems.append(f"{member.target}: {details_of(error)}")
                self._current = (self._current + 1) % len(self._members)
            except asyncio.CancelledError:
                # When `close` shuts the channel, gRPC cancels the tasks that wait on it.
                task = asyncio.current_task()
                if self._closed and (task is None or not task.cancelling()):
                    raise EtcdUnavailable(f"cannot {what}: this connection to etcd was closed") from None
                raise
        raise EtcdUnavailable(f"cannot {what}: etcd does not answer ({'; '.join(problems)}); is it running?")

    async def _authenticated(self, member: Member, send: Callable[[Member], Awaitable[T]]) -> T:
        if member.lacks_token:
            await member.authenticate(self.timeout_s)
        try:
            return await send(member)
        except rpc.AioRpcError as error:
            if not is_stale(error):
                raise
            await member.authenticate(self.timeout_s)
            return await send(member)


def _notify(callback: Callable[[], None] | None) -> None:
    if callback is not None:
        callback()
