"""Do etcd and NATS answer, and can they be used: just enough of each protocol to know, without a client library."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import ssl
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from dynamo_local.errors import ConfigError, EtcdUnavailable, InfraUnavailable, NatsUnavailable
from dynamo_local.transport.access import EtcdAccess, NatsAccess

T = TypeVar("T")

_PROBE_INTERVAL_S = 0.015
_ATTEMPT_TIMEOUT_S = 1.0
_CLOSE_TIMEOUT_S = 0.2


async def probe_etcd(endpoints: str | Sequence[str], timeout_s: float, access: EtcdAccess | None = None) -> str:
    """Wait until one of the endpoints is healthy, and return it. A password is not tried.

    Raises `EtcdUnavailable` that names what was tried and the last answer, at once where its certificate or ours is
    refused; `ConfigError` for a form we cannot use.
    """
    listed = endpoints.split(",") if isinstance(endpoints, str) else list(endpoints)
    targets = [_address(item.strip(), "etcd", ("http", "https"), 2379) for item in listed if item.strip()]
    if not targets:
        raise ConfigError("no etcd endpoint given: set ETCD_ENDPOINTS, as in http://127.0.0.1:2379")
    tls = (access or EtcdAccess()).tls.context() if any(target.scheme == "https" for target in targets) else None

    async def healthy() -> str:
        problems = []
        for target in targets:
            try:
                await _etcd_health(target, tls if target.scheme == "https" else None)
            except (OSError, EOFError, _NotYet) as error:
                problems.append(f"{_show(target)}: {_reason(error)}")
            else:
                return _show(target)
        raise _NotYet("; ".join(problems))

    tried = ", ".join(_show(target) for target in targets)
    return await _poll(
        healthy, timeout_s, lambda last: EtcdUnavailable(f"etcd did not answer within {timeout_s:g} s at {tried}{last}")
    )


async def probe_nats(url: str, access: NatsAccess, timeout_s: float) -> None:
    """Wait until NATS accepts our connection and offers JetStream.

    Raises `NatsUnavailable`: past the deadline, or at once where waiting cannot help (credentials or a certificate
    refused, no JetStream, TLS demanded and not configured). `ConfigError` for a URL that we cannot use.
    """
    target = _address(url, "NATS", ("nats", "tls"), 4222)
    tls = access.context(target.scheme)
    await _poll(
        lambda: _nats_hello(target, access, tls),
        timeout_s,
        lambda last: NatsUnavailable(f"NATS did not answer within {timeout_s:g} s at {_show(target)}{last}"),
    )


class _NotYet(Exception):
    """The server answered, but is not ready."""


async def _poll(
    attempt: Callable[[], Coroutine[Any, Any, T]], timeout_s: float, failure: Callable[[str], InfraUnavailable]
) -> T:
    loop = asyncio.get_running_loop()
    deadline_s, last = loop.time() + timeout_s, ""
    while (left_s := deadline_s - loop.time()) > 0:
        try:
            async with asyncio.timeout(min(left_s, _ATTEMPT_TIMEOUT_S)):
                return await attempt()
        except TimeoutError:
            if left_s >= _ATTEMPT_TIMEOUT_S or not last:  # the last attempt may be too short for any answer
                last = " (it accepts connections, but is silent)"
        except (OSError, EOFError, _NotYet) as error:
            last = f" ({_reason(error)})"
        await asyncio.sleep(min(_PROBE_INTERVAL_S, max(0.0, deadline_s - loop.time())))
    raise failure(last + "; is it running, and is the address right?")


async def _etcd_health(target: SplitResult, tls: ssl.SSLContext | None) -> None:
    """GET /health: etcd answers 200 once it has a leader and a linearizable read went through."""
    try:
        reader, writer = await asyncio.open_connection(target.hostname, target.port or 2379, ssl=tls)
        try:
            writer.write(f"GET /health HTTP/1.0\r\nHost: {target.netloc}\r\n\r\n".encode("ascii"))
            answer = await reader.read(4096)
        finally:
            await _close(writer)
    except ssl.SSLError as error:
        raise EtcdUnavailable(
            _tls_failure("etcd", _show(target), error, "ETCD_AUTH_CA", "ETCD_AUTH_CLIENT_CERT")
        ) from None
    status = answer.split(b"\r\n", 1)[0].decode("latin-1")
    if b" 200" not in answer[:13]:
        closed = f"it closed the connection; where it speaks TLS, write its address as https://{target.netloc}"
        raise _NotYet(f"not healthy: {status or closed}")


def _tls_failure(what: str, where: str, error: ssl.SSLError, ca: str, certificate: str) -> str:
    """Why TLS did not come about, and what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of {what} at {where} is not trusted: {error.verify_message}; check {ca}"
    reason = (error.reason or "TLS failed").replace("_", " ").lower()
    if "alert" in reason or "certificate" in reason:
        return f"{what} at {where} refused our certificate ({reason}); check {certificate}, and whether it needs one"
    return f"{what} at {where} does not speak TLS as we do ({reason}); check the address, and {ca}"


async def _nats_hello(target: SplitResult, access: NatsAccess, tls: ssl.SSLContext | None) -> None:
    """INFO, CONNECT, PING, PONG: https://docs.nats.io/reference/reference-protocols/nats-protocol"""
    reader, writer = await asyncio.open_connection(target.hostname, target.port or 4222)
    where = _show(target)
    try:
        await _nats_conversation(target, access, tls, reader, writer)
    except ssl.SSLError as error:
        names = ("NATS_TLS_CA_CERT_PATH", "NATS_TLS_CLIENT_CERT_PATH")
        raise NatsUnavailable(_tls_failure("NATS", where, error, *names)) from None
    finally:
        await _close(writer)


async def _nats_conversation(
    target: SplitResult,
    access: NatsAccess,
    tls: ssl.SSLContext | None,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
) -> None:
    where = _show(target)
    line = await reader.readline()
    if not line.startswith(b"INFO "):
        raise _NotYet("what answers there does not speak NATS" if line else "it closed the connection")
    info = json.loads(line[5:])
    if tls is not None:
        await writer.start_tls(tls, server_hostname=target.hostname)
    elif info.get("tls_required"):
        raise NatsUnavailable(
            f"NATS at {where} demands TLS: write its address as tls://{target.hostname}:{target.port}, and name who "
            "signed its certificate in NATS_TLS_CA_CERT_PATH"
        )
    if not info.get("jetstream"):
        raise NatsUnavailable(f"NATS at {where} runs without JetStream: start it with `nats-server -js`")
    writer.write(f"CONNECT {json.dumps(_credentials(target, access))}\r\nPING\r\n".encode())
    answer = await reader.readline()
    while answer.startswith((b"INFO", b"PING")):
        answer = await reader.readline()
    if answer.startswith(b"-ERR") and b"uthoriz" in answer:
        raise NatsUnavailable(
            f"NATS at {where} refused our credentials: check DYN_NATS_TOKEN_FILE, NATS_AUTH_* or the URL's user"
        )
    if not answer.startswith(b"PONG"):
        raise _NotYet(f"it said {answer.decode('latin-1').strip()!r}")


def _credentials(target: SplitResult, access: NatsAccess) -> dict[str, Any]:
    hello: dict[str, Any] = {"verbose": False, "pedantic": False, "lang": "python", "version": "0", "name": "probe"}
    if access.token is not None:
        hello["auth_token"] = access.token
    elif access.user is not None:
        hello |= {"user": access.user, "pass": access.password}
    elif target.password is not None:
        hello |= {"user": target.username, "pass": target.password}
    elif target.username is not None:
        hello["auth_token"] = target.username
    return hello


def _address(url: str, what: str, schemes: tuple[str, ...], default_port: int) -> SplitResult:
    parts = urlsplit(url if "://" in url else f"{schemes[0]}://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in schemes or not parts.hostname or port == -1:
        raise ConfigError(
            f"{what} address {parts.scheme}://{parts.hostname or ''} cannot be used: "
            f"write it as {schemes[0]}://127.0.0.1:{default_port}"
        )
    return parts if port else parts._replace(netloc=f"{parts.netloc}:{default_port}")


def _show(target: SplitResult) -> str:
    """The address without user, password or token."""
    host = f"[{target.hostname}]" if ":" in (target.hostname or "") else target.hostname
    return f"{target.scheme}://{host}:{target.port}"


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)  # asyncio's own text repeats the address and drops the reason
    return str(error) or type(error).__name__


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    try:
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):  # it never ends after a handshake of TLS that has failed
            await writer.wait_closed()
    except OSError:  # the peer may have reset the connection that we are done with; TimeoutError is one, too
        with contextlib.suppress(AttributeError):  # CPython 3.11.2: TLS that is closed already
            writer.transport.abort()
