"""etcd as a `ports.KeyValueStore`."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import grpc
from aetcd import rpc
from grpc.aio import EOF, UsageError

from dynamo_local.errors import ConfigError, EtcdUnavailable, LeaseNotFound
from dynamo_local.ports import DeleteEvent, KeyValue, PutEvent, SnapshotEvent, WatchEvent
from dynamo_local.transport.access import EtcdAccess

# The connection to one etcd member, and the typed errors of its answers.

# circus forks with a preexec_fn. With gRPC's fork handlers a fifth of the children died before exec. Both variables are
# read once, when gRPC is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


_CHANNEL_OPTIONS = (
    # gRPC's back-off grows to two minutes by default: a restarted etcd would be missed for as long.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Stores of one process must not share connections: closing or failing one would affect the others.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.enable_http_proxy", 0),
)


class Endpoint(NamedTuple):
    """Where one member is: `host:port`, and whether TLS is spoken to it."""

    target: str
    tls: bool = False

    @property
    def url(self) -> str:
        """`http://host:port`, or with `https`."""
        return f"{'https' if self.tls else 'http'}://{self.target}"


def parse_endpoints(endpoints: str | Sequence[str]) -> tuple[Endpoint, ...]:
    """Takes `http://127.0.0.1:2379`, `https://etcd.example`, `127.0.0.1:2379`, and lists with commas.

    Raises `ConfigError` for none, and for credentials: those are read from variables (`transport.access`).
    """
    listed = endpoints.split(",") if isinstance(endpoints, str) else list(endpoints)
    found = tuple(_parse_endpoint(item.strip()) for item in listed if item.strip())
    if not found:
        raise ConfigError("no etcd endpoint given: set ETCD_ENDPOINTS, as in http://127.0.0.1:2379")
    return found


def _parse_endpoint(text: str) -> Endpoint:
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        port = parts.port or 2379
    except ValueError:
        port = 0
    if parts.scheme not in ("http", "https") or not parts.hostname or not port or "@" in parts.netloc:
        raise ConfigError(
            f"etcd endpoint {parts.scheme}://{parts.netloc.rpartition('@')[2]} cannot be used: write it as "
            "http://127.0.0.1:2379 or https://127.0.0.1:2379; a user goes into ETCD_AUTH_USERNAME"
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return Endpoint(f"{host}:{port}", parts.scheme == "https")


class Member:
    """A connection to one endpoint. `metadata` goes with each call: the token, where there is one."""

    def __init__(self, endpoint: Endpoint, access: EtcdAccess) -> None:
        self.endpoint = endpoint
        self.channel = _channel(endpoint, access)
        self.kv = rpc.KVStub(self.channel)
        self.lease = rpc.LeaseStub(self.channel)
        self.watch = rpc.WatchStub(self.channel)
        self.metadata: tuple[tuple[str, str], ...] | None = None
        self._auth = rpc.AuthStub(self.channel)
        self._access = access

    @property
    def target(self) -> str:
        """`host:port`."""
        return self.endpoint.target

    @property
    def lacks_token(self) -> bool:
        """It has a password, and has not shown it yet."""
        return self._access.user is not None and self.metadata is None

    async def authenticate(self, timeout_s: float) -> None:
        """Take a new token for our password, if we have one. Raises `EtcdRefused` for a wrong password."""
        if self._access.user is None:
            return
        request = rpc.AuthenticateRequest(name=self._access.user, password=self._access.password)
        try:
            response = await self._auth.Authenticate(request, timeout=timeout_s)
        except rpc.AioRpcError as error:
            if "authentication is not enabled" in details_of(error):
                self.metadata = ()
                return
            if is_away(error):
                raise
            raise EtcdRefused(
                f"etcd at {self.target} refused user {self._access.user}: {error.details()}; check ETCD_AUTH_USERNAME "
                "and ETCD_AUTH_PASSWORD"
            ) from None
        self.metadata = (("token", response.token),)


def _channel(endpoint: Endpoint, access: EtcdAccess) -> Any:
    if not endpoint.tls:
        return rpc.insecure_channel(endpoint.target, options=_CHANNEL_OPTIONS)
    parts = (access.tls.ca, access.tls.key, access.tls.certificate)
    credentials = grpc.ssl_channel_credentials(*(None if part is None else part.encode() for part in parts))
    return grpc.aio.secure_channel(endpoint.target, credentials, options=_CHANNEL_OPTIONS)


class EtcdRefused(EtcdUnavailable):
    """etcd does not know us, or does not let us: asking again does not help."""


def is_stale(error: Exception) -> bool:
    """Our token is not known (any more): etcd forgets all when it is started again, and each after a while."""
    return isinstance(error, rpc.AioRpcError) and (
        error.code() is rpc.StatusCode.UNAUTHENTICATED
        or any(text in details_of(error) for text in ("user name is empty", "auth store is old"))
    )


class OutOfRange(EtcdUnavailable):
    """A revision that etcd does not have (any more)."""


def is_away(error: Exception) -> bool:
    """The member cannot be reached now; another one may answer."""
    if isinstance(error, rpc.AioRpcError):
        return error.code() in (
            rpc.StatusCode.UNAVAILABLE,
            rpc.StatusCode.DEADLINE_EXCEEDED,
            rpc.StatusCode.CANCELLED,
            rpc.StatusCode.INTERNAL,  # "stream removed", when the server dies in the middle of a call
        )
    return True


def translated(error: Exception, what: str) -> EtcdUnavailable | LeaseNotFound:
    """etcd's error as one of ours; `what` names the failed operation, such as "put a/key"."""
    details = details_of(error)
    if "lease not found" in details:
        return LeaseNotFound(f"cannot {what}: etcd does not know the lease (revoked, expired, or etcd lost it)")
    if isinstance(error, rpc.AioRpcError) and error.code() is rpc.StatusCode.OUT_OF_RANGE:
        return OutOfRange(f"cannot {what}: {details}")
    if is_stale(error) or "permission denied" in details:
        return EtcdRefused(
            f"cannot {what}: etcd refused it: {details}; check ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD"
        )
    return EtcdUnavailable(f"cannot {what}: etcd refused it: {details}")


def details_of(error: BaseException) -> str:
    """The error in a line."""
    if isinstance(error, rpc.AioRpcError):
        return f"{error.code().name} {error.details() or ''}".strip()
    return str(error) or type(error).__name__


def prefix_end(prefix: bytes) -> bytes:
    """The first key after all with the prefix: its last byte plus one. Empty means every key: `\\0` to `\\0`."""
    trimmed = prefix.rstrip(b"\xff")
    return trimmed[:-1] + bytes([trimmed[-1] + 1]) if trimmed else b"\0"


def key_value(kv: Any) -> KeyValue:
    """etcd's key as ours."""
    return KeyValue(kv.key.decode(errors="replace"), bytes(kv.value), int(kv.lease), int(kv.mod_revision))


# One watch. It distinguishes an etcd that lost its data from an etcd whose workers have left.

log = logging.getLogger(__name__)

REFILL_S = 2.0
"""When etcd comes back without any key that we knew, workers register again after their next keepalive. For this long
the last known state is kept, so that requests are served meanwhile."""
HEARTBEAT_S = 1.0
"""A silent watch is asked for its progress this often; after `HEARTBEATS_MISSED` without an answer it is dead."""
HEARTBEATS_MISSED = 2


class KnownKeys:
    """The keys that a watch has reported, to tell an etcd that lost its data from one whose workers have left."""

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._until_s: float | None = None

    def may_come_back(self, kvs: Sequence[KeyValue]) -> bool:
        """Whether, for less than `REFILL_S`, fewer keys are listed than we knew and none of those that we knew."""
        if len(kvs) >= len(self._keys) or any(kv.key in self._keys for kv in kvs):
            return False
        now_s = time.monotonic()
        if self._until_s is None:
            self._until_s = now_s + REFILL_S
        return now_s < self._until_s

    def listed(self, kvs: Sequence[KeyValue]) -> None:
        """These are all keys, as they were just reported."""
        self._keys, self._until_s = {kv.key for kv in kvs}, None

    def changed(self, event: WatchEvent) -> None:
        """This change was just reported."""
        if isinstance(event, PutEvent):
            self._keys.add(event.kv.key)
        elif isinstance(event, DeleteEvent):
            self._keys.discard(event.key)


async def follow(member: Member, prefix: str, revision: int, timeout_s: float) -> AsyncGenerator[WatchEvent, None]:
    """Changes from that revision on. Ends when the stream breaks, falls silent, or etcd has lost its data.

    `timeout_s` bounds each message to the member.
    """
    raw = prefix.encode()
    create = rpc.WatchCreateRequest(key=raw or b"\0", range_end=prefix_end(raw), start_revision=revision)
    call = member.watch.Watch(metadata=member.metadata)
    read: asyncio.Future[Any] | None = None
    silent = 0
    try:
        await _send(call, rpc.WatchRequest(create_request=create), timeout_s)
        read = asyncio.ensure_future(call.read())
        while True:
            done, _ = await asyncio.wait({read}, timeout=HEARTBEAT_S)
            if not done:
                if silent >= HEARTBEATS_MISSED:
                    log.warning("watch of %s: etcd has been silent for %g s", prefix, HEARTBEAT_S * (silent + 1))
                    return
                silent += 1
                await _send(call, rpc.WatchRequest(progress_request=rpc.WatchProgressRequest()), timeout_s)
                continue
            silent = 0
            response = None if read.cancelled() else read.result()  # cancelled: the channel was closed
            # A header older than our list: etcd came back without its data in between.
            if response in (None, EOF) or response.canceled or response.header.revision < revision - 1:
                return
            read = asyncio.ensure_future(call.read())
            for event in response.events:
                yield _watch_event(event)
    except (rpc.AioRpcError, asyncio.InvalidStateError, UsageError, TimeoutError) as error:
        log.info("watch of %s broke: %s", prefix, details_of(error))
    finally:
        call.cancel()
        if read is not None:
            read.cancel()
            await asyncio.gather(read, return_exceptions=True)


async def _send(call: Any, request: Any, timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        await call.write(request)


def _watch_event(event: Any) -> WatchEvent:
    if event.type == rpc.Event.DELETE:
        return DeleteEvent(event.kv.key.decode(errors="replace"))
    return PutEvent(key_value(event.kv))


# `ports.KeyValueStore` over etcd's gRPC API, with the stubs of aetcd.
#
# Only aetcd's protocol layer (`aetcd.rpc`) is used. Its `Client` has faults that we cannot accept. `add_callback`
# without a timeout waits for ever while etcd is away. `_terminate_stream` makes the reading task await itself when the
# stream breaks. One broken stream ends every watch of the process. A stream per watch is thirty lines.

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
