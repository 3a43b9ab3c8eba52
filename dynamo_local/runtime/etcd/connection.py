"""One etcd member: where it is, the connection to it, and what its errors mean."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

# circus forks with a preexec_fn; with gRPC's fork handlers a fifth of the children died before exec (circus-facts).
# Both variables are read once, when gRPC is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import grpc
from aetcd import rpc

from dynamo_local.errors import ConfigError, EtcdUnavailable, LeaseNotFound
from dynamo_local.infra.access import EtcdAccess
from dynamo_local.ports import KeyValue

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

    Raises `ConfigError` for none, and for credentials: those are read from variables (`infra.access`).
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
