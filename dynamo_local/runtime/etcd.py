"""`ports.KeyValueStore` over etcd's gRPC API, with the stubs of aetcd.

Only aetcd's protocol layer (`aetcd.rpc`) is used. Its `Client` hangs or loses track where we must not: `add_callback`
without a timeout waits for ever while etcd is away, `_terminate_stream` makes the reading task await itself when the
stream breaks, and one broken stream ends every watch of the process. A stream per watch is thirty lines.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar
from urllib.parse import urlsplit

# circus forks with a preexec_fn; with gRPC's fork handlers a fifth of the children died before exec (circus-facts).
# Both variables are read once, when gRPC is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from aetcd import rpc
from grpc.aio import EOF, UsageError

from dynamo_local.errors import ConfigError, EtcdUnavailable, LeaseNotFound
from dynamo_local.ports import DeleteEvent, KeyValue, PutEvent, SnapshotEvent, WatchEvent

log = logging.getLogger(__name__)
T = TypeVar("T")

CONNECT_RETRY_S = 0.05
WATCH_RETRY_S = 0.1
REFILL_S = 2.0
"""How long an etcd that came back without any key we knew is given until those who lost theirs register again (they
notice by their next keepalive): their requests are served meanwhile, the last known state is better than none."""
REFILL_POLL_S = 0.05
"""Between attempts to list again while etcd is away. gRPC's own back-off below bounds the recovery."""
HEARTBEAT_S = 1.0
"""A silent watch is asked for its progress this often; it is dead after `HEARTBEATS_MISSED` without any answer."""
HEARTBEATS_MISSED = 2

_CHANNEL_OPTIONS = (
    # gRPC's back-off grows to two minutes by default: a restarted etcd would be missed for as long.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Stores of one process must not share connections, or closing and failing of one shows in the others.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.enable_http_proxy", 0),
)


def parse_endpoints(endpoints: str | Sequence[str]) -> tuple[str, ...]:
    """`host:port` of each endpoint. Takes `http://127.0.0.1:2379`, `127.0.0.1:2379`, and lists with commas.

    Raises `ConfigError` for none, for https and for credentials, which are not spoken here.
    """
    listed = endpoints.split(",") if isinstance(endpoints, str) else list(endpoints)
    targets = tuple(_parse_endpoint(item.strip()) for item in listed if item.strip())
    if not targets:
        raise ConfigError("no etcd endpoint given: set ETCD_ENDPOINTS, as in http://127.0.0.1:2379")
    return targets


def _parse_endpoint(text: str) -> str:
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        port = parts.port or 2379
    except ValueError:
        port = 0
    if parts.scheme != "http" or not parts.hostname or not port or "@" in parts.netloc:
        raise ConfigError(
            f"etcd endpoint {parts.scheme}://{parts.netloc.rpartition('@')[2]} cannot be used: "
            "write it as http://127.0.0.1:2379 (no TLS, no credentials)"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{host}:{port}"


class _Member:
    """A connection to one endpoint."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.channel = rpc.insecure_channel(target, options=_CHANNEL_OPTIONS)
        self.kv = rpc.KVStub(self.channel)
        self.lease = rpc.LeaseStub(self.channel)
        self.watch = rpc.WatchStub(self.channel)


class _Known:
    """The keys that a watch has told of, to tell an etcd that lost its data from one whose workers have left."""

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._until_s: float | None = None

    def may_come_back(self, kvs: Sequence[KeyValue]) -> bool:
        """Nothing of what we knew is listed, less than that is, and it has not been so for `REFILL_S`."""
        if len(kvs) >= len(self._keys) or any(kv.key in self._keys for kv in kvs):
            return False
        now_s = time.monotonic()
        if self._until_s is None:
            self._until_s = now_s + REFILL_S
        return now_s < self._until_s

    def listed(self, kvs: Sequence[KeyValue]) -> None:
        """This is told of as the whole."""
        self._keys, self._until_s = {kv.key for kv in kvs}, None

    def changed(self, event: WatchEvent) -> None:
        """This is told of as a change."""
        if isinstance(event, PutEvent):
            self._keys.add(event.kv.key)
        elif isinstance(event, DeleteEvent):
            self._keys.discard(event.key)


class EtcdStore:
    """etcd as a `KeyValueStore`. Safe to use from many tasks of one event loop.

    A call goes to the endpoint that answered last and, where that one is away, to each of the others once. It
    fails after `timeout_s`, or at once where every endpoint refuses the connection: callers retry if they can wait.
    """

    def __init__(self, endpoints: str | Sequence[str], timeout_s: float = 3.0) -> None:
        """Connects on first use; see `connect`. Needs a running event loop."""
        self.timeout_s = timeout_s
        self._members = [_Member(target) for target in parse_endpoints(endpoints)]
        self._current = 0
        self._closed = False

    @classmethod
    async def connect(cls, endpoints: str | Sequence[str], timeout_s: float = 3.0) -> EtcdStore:
        """A store that has answered once. Raises `EtcdUnavailable` past `timeout_s`, and `ConfigError`."""
        return await cls.connect_when_up(endpoints, timeout_s, timeout_s=timeout_s)

    @classmethod
    async def connect_when_up(
        cls, endpoints: str | Sequence[str], wait_s: float, *, timeout_s: float = 3.0
    ) -> EtcdStore:
        """`connect` to an etcd that may still be starting: waits `wait_s`; `timeout_s` is for each call."""
        store = cls(endpoints, timeout_s)
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
        """As given, in the form `http://host:port`."""
        return tuple(f"http://{member.target}" for member in self._members)

    async def close(self) -> None:
        """End every watch and every connection. Closing twice is no error."""
        self._closed = True
        for member in self._members:
            await member.channel.close()

    # --- keys ------------------------------------------------------------------------------------

    async def get(self, key: str) -> KeyValue | None:
        """The key as it is now."""
        request = rpc.RangeRequest(key=key.encode())
        response = await self._call(f"get {key}", lambda m: m.kv.Range(request, timeout=self.timeout_s))
        return _key_value(response.kvs[0]) if response.kvs else None

    async def get_prefix(self, prefix: str) -> tuple[list[KeyValue], int]:
        """All keys under the prefix in order, and the store's revision at that moment."""
        raw = prefix.encode()
        request = rpc.RangeRequest(key=raw or b"\0", range_end=_prefix_end(raw))
        response = await self._call(f"list {prefix}", lambda m: m.kv.Range(request, timeout=self.timeout_s))
        return [_key_value(kv) for kv in response.kvs], int(response.header.revision)

    async def put(self, key: str, value: bytes, lease_id: int = 0) -> int:
        """Write; returns the revision. Raises `LeaseNotFound` if the lease is gone."""
        request = rpc.PutRequest(key=key.encode(), value=value, lease=lease_id)
        response = await self._call(f"put {key}", lambda m: m.kv.Put(request, timeout=self.timeout_s))
        return int(response.header.revision)

    async def put_if_absent(self, key: str, value: bytes, lease_id: int = 0) -> bool:
        """Write unless the key exists; whether it was written. Raises `LeaseNotFound` if the lease is gone."""
        raw = key.encode()
        absent = rpc.Compare(key=raw, target=rpc.Compare.VERSION, result=rpc.Compare.EQUAL, version=0)
        put = rpc.RequestOp(request_put=rpc.PutRequest(key=raw, value=value, lease=lease_id))
        request = rpc.TxnRequest(compare=[absent], success=[put])
        response = await self._call(f"create {key}", lambda m: m.kv.Txn(request, timeout=self.timeout_s))
        return bool(response.succeeded)

    async def delete(self, key: str) -> bool:
        """Delete; whether the key was there."""
        request = rpc.DeleteRangeRequest(key=key.encode())
        response = await self._call(f"delete {key}", lambda m: m.kv.DeleteRange(request, timeout=self.timeout_s))
        return int(response.deleted) > 0

    async def revision(self) -> int:
        """The store's revision, as a majority sees it."""
        request = rpc.RangeRequest(key=b"\0", count_only=True)
        response = await self._call("read the revision", lambda m: m.kv.Range(request, timeout=self.timeout_s))
        return int(response.header.revision)

    async def remembers(self, key: str, mod_revision: int) -> bool:
        """Whether the key was written at that revision in this etcd's history; see `ports.KeyValueStore`."""
        request = rpc.RangeRequest(key=key.encode(), revision=mod_revision)
        try:
            response = await self._call(
                f"read {key} at {mod_revision}", lambda m: m.kv.Range(request, timeout=self.timeout_s)
            )
        except _OutOfRange as error:
            # "required revision is a future revision", or "... has been compacted": a history that long is ours.
            return "compacted" in str(error)
        return any(kv.mod_revision == mod_revision for kv in response.kvs)

    # --- leases ----------------------------------------------------------------------------------

    async def grant(self, ttl_s: int) -> int:
        """A new lease's id. etcd may grant longer than asked (its least is 1.5 election timeouts)."""
        request = rpc.LeaseGrantRequest(TTL=ttl_s)
        response = await self._call("grant a lease", lambda m: m.lease.LeaseGrant(request, timeout=self.timeout_s))
        return int(response.ID)

    async def keepalive(self, lease_id: int) -> int:
        """Refresh once; the TTL in seconds. Raises `LeaseNotFound`: etcd then answers a TTL of 0, not an error."""
        response = await self._call(f"keep lease {lease_id:x} alive", lambda m: self._refresh(m, lease_id))
        if response.TTL <= 0:
            raise LeaseNotFound(f"etcd does not know lease {lease_id:x}: it was revoked, it expired, or etcd lost it")
        return int(response.TTL)

    async def _refresh(self, member: _Member, lease_id: int) -> Any:
        call = member.lease.LeaseKeepAlive(iter([rpc.LeaseKeepAliveRequest(ID=lease_id)]), timeout=self.timeout_s)
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
            await self._call(
                f"revoke lease {lease_id:x}", lambda m: m.lease.LeaseRevoke(request, timeout=self.timeout_s)
            )
        except LeaseNotFound:
            log.debug("lease %x was gone already", lease_id)

    # --- watching --------------------------------------------------------------------------------

    async def watch_prefix(
        self, prefix: str, on_lost: Callable[[], None] | None = None
    ) -> AsyncGenerator[WatchEvent, None]:
        """See `ports.KeyValueStore.watch_prefix`. Ends only by closing it or the store."""
        lost = False
        known = _Known()
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
            async with aclosing(self._follow(prefix, revision + 1)) as events:
                async for event in events:
                    known.changed(event)
                    yield event
            if not self._closed:
                lost = True
                _notify(on_lost)

    async def _follow(self, prefix: str, revision: int) -> AsyncGenerator[WatchEvent, None]:
        """Changes from that revision on. Ends when the stream breaks, falls silent, or the history is not ours."""
        raw = prefix.encode()
        create = rpc.WatchCreateRequest(key=raw or b"\0", range_end=_prefix_end(raw), start_revision=revision)
        call = self._members[self._current].watch.Watch()
        read: asyncio.Future[Any] | None = None
        silent = 0
        try:
            await self._send(call, rpc.WatchRequest(create_request=create))
            read = asyncio.ensure_future(call.read())
            while True:
                done, _ = await asyncio.wait({read}, timeout=HEARTBEAT_S)
                if not done:
                    if silent >= HEARTBEATS_MISSED:
                        log.warning("watch of %s: etcd has been silent for %g s", prefix, HEARTBEAT_S * (silent + 1))
                        return
                    silent += 1
                    await self._send(call, rpc.WatchRequest(progress_request=rpc.WatchProgressRequest()))
                    continue
                silent = 0
                response = None if read.cancelled() else read.result()  # cancelled: the channel was closed
                # A header older than what we had listed: etcd came back without its data in between.
                if response in (None, EOF) or response.canceled or response.header.revision < revision - 1:
                    return
                read = asyncio.ensure_future(call.read())
                for event in response.events:
                    yield _watch_event(event)
        except (rpc.AioRpcError, asyncio.InvalidStateError, UsageError, TimeoutError) as error:
            log.info("watch of %s broke: %s", prefix, _details(error))
        finally:
            call.cancel()
            if read is not None:
                read.cancel()
                await asyncio.gather(read, return_exceptions=True)

    async def _send(self, call: Any, request: Any) -> None:
        async with asyncio.timeout(self.timeout_s):
            await call.write(request)

    # --- plumbing --------------------------------------------------------------------------------

    async def _call(self, what: str, send: Callable[[_Member], Awaitable[T]]) -> T:
        """Send to the current member and, while those are away, once to each other one."""
        if self._closed:
            raise EtcdUnavailable(f"cannot {what}: this connection to etcd was closed")
        problems: list[str] = []
        for _ in self._members:
            member = self._members[self._current]
            try:
                async with asyncio.timeout(self.timeout_s + 0.5):  # gRPC's own deadline comes first
                    return await send(member)
            except (rpc.AioRpcError, UsageError, TimeoutError) as error:
                if not _is_away(error):
                    raise _translate(error, what) from error
                problems.append(f"{member.target}: {_details(error)}")
                self._current = (self._current + 1) % len(self._members)
            except asyncio.CancelledError:
                # gRPC reports a channel that `close` shut as a cancellation of whoever waits.
                task = asyncio.current_task()
                if self._closed and (task is None or not task.cancelling()):
                    raise EtcdUnavailable(f"cannot {what}: this connection to etcd was closed") from None
                raise
        raise EtcdUnavailable(f"cannot {what}: etcd does not answer ({'; '.join(problems)}); is it running?")


class _OutOfRange(EtcdUnavailable):
    """A revision that etcd does not have (any more)."""


def _is_away(error: Exception) -> bool:
    if isinstance(error, rpc.AioRpcError):
        return error.code() in (
            rpc.StatusCode.UNAVAILABLE,
            rpc.StatusCode.DEADLINE_EXCEEDED,
            rpc.StatusCode.CANCELLED,
            rpc.StatusCode.INTERNAL,  # "stream removed", when the server dies in the middle of a call
        )
    return True


def _translate(error: Exception, what: str) -> EtcdUnavailable | LeaseNotFound:
    details = _details(error)
    if "lease not found" in details:
        return LeaseNotFound(f"cannot {what}: etcd does not know the lease (revoked, expired, or etcd lost it)")
    if isinstance(error, rpc.AioRpcError) and error.code() is rpc.StatusCode.OUT_OF_RANGE:
        return _OutOfRange(f"cannot {what}: {details}")
    return EtcdUnavailable(f"cannot {what}: etcd refused it: {details}")


def _details(error: BaseException) -> str:
    if isinstance(error, rpc.AioRpcError):
        return f"{error.code().name} {error.details() or ''}".strip()
    return str(error) or type(error).__name__


def _notify(callback: Callable[[], None] | None) -> None:
    if callback is not None:
        callback()


def _prefix_end(prefix: bytes) -> bytes:
    """The first key after all with the prefix: its last byte plus one. Empty means every key: `\\0` to `\\0`."""
    trimmed = prefix.rstrip(b"\xff")
    return trimmed[:-1] + bytes([trimmed[-1] + 1]) if trimmed else b"\0"


def _key_value(kv: Any) -> KeyValue:
    return KeyValue(kv.key.decode(errors="replace"), bytes(kv.value), int(kv.lease), int(kv.mod_revision))


def _watch_event(event: Any) -> WatchEvent:
    if event.type == rpc.Event.DELETE:
        return DeleteEvent(event.kv.key.decode(errors="replace"))
    return PutEvent(_key_value(event.kv))
