"""Access to a Frontend: its API keys, the web pages that may call it, and whether the way to it is encrypted.

The settings decide. `check` reports at the start of the graph what is wrong with them. The middleware enforces them
before a byte of a request's body is read.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import ssl
from collections.abc import Collection, Mapping, MutableMapping
from pathlib import Path

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from dynamo_local.components.openai import errors as api_errors
from dynamo_local.components.openai.http_io import Reply
from dynamo_local.components.openai.server import Tls, bind_socket
from dynamo_local.components.openai.settings import FrontendConfig
from dynamo_local.core.secrets import bearer, parse_source, variable_of
from dynamo_local.errors import ConfigError
from dynamo_local.system import request_log
from dynamo_local.system.key_files import ApiKeys

logger = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/live"})
"""Load balancers and scripts ask these, and have no key."""
CORS_MAX_AGE_S = 600


def load_keys(settings: FrontendConfig, environ: Mapping[str, str], section: str = "Frontend") -> ApiKeys | None:
    """None where the settings ask for none. Raises `ConfigError`."""
    if settings.api_key is None:
        return None
    return ApiKeys.load(parse_source(settings.api_key), environ, option=f"{section}.api-key")


def take_keys(settings: FrontendConfig, environ: MutableMapping[str, str]) -> ApiKeys | None:
    """`load_keys` in the Frontend itself; afterwards its environment, which children would inherit, has none."""
    keys = load_keys(settings, environ)
    if (name := variable_of(settings.api_key)) is not None:
        environ.pop(name, None)
    return keys


def tls_of(settings: FrontendConfig) -> Tls | None:
    """None: plain HTTP."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return Tls(settings.tls_cert, settings.tls_key)


def check_tls(tls: Tls, section: str = "Frontend") -> None:
    """Raises `ConfigError` where certificate and key cannot be used."""
    for option, path in (("tls-cert", tls.cert), ("tls-key", tls.key)):
        try:
            Path(path).open("rb").close()
        except OSError as error:
            raise ConfigError(f"{section}.{option}: {path} cannot be read: {error.strerror}") from None
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(tls.cert, tls.key, password=lambda: "")
    except (ssl.SSLError, OSError, ValueError) as error:
        why = getattr(error, "reason", None) or str(error)
        raise ConfigError(
            f"{section}: tls-cert {tls.cert} and tls-key {tls.key} cannot be used ({why}): they must be PEM, belong "
            "together, and the key must have no passphrase"
        ) from None


def check(settings: FrontendConfig, environ: Mapping[str, str], section: str) -> None:
    """All that can be known of the settings before the Frontend runs. Raises `ConfigError`."""
    load_keys(settings, environ, section)
    if (tls := tls_of(settings)) is not None:
        check_tls(tls, section)
    if settings.record_trace is not None and not (folder := Path(settings.record_trace).parent).is_dir():
        raise ConfigError(f"{section}.record-trace: there is no folder {folder}; make it, or name a file in another")


def listening_socket(settings: FrontendConfig) -> socket.socket:
    """The Frontend's, bound. Raises `ConfigError`; what is open to others is said in the log."""
    sock = bind_socket(settings.host, settings.port)
    check_reach(sock, settings)
    return sock


def check_reach(sock: socket.socket, settings: FrontendConfig) -> None:
    """Raises `ConfigError`, and closes the bound socket, if others than this host can reach it and nobody allowed
    that."""
    address = sock.getsockname()[0]
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return
    if settings.api_key is None and not settings.insecure:  # a name that the settings took for loopback
        sock.close()
        raise ConfigError(f"Frontend: host {settings.host!r} is {address}: {settings.WITHOUT_KEYS}")
    if settings.api_key is None:
        logger.warning("Frontend: it listens on %s, beyond this machine, and asks for no credentials", address)
    elif settings.tls_cert is None:
        logger.warning("Frontend: it listens on %s without TLS: keys and prompts travel in the clear", address)


def middleware(settings: FrontendConfig, keys: ApiKeys | None) -> list[Middleware]:
    """The middleware before the routes. A browser's preflight has no key, so CORS comes first."""
    found = []
    if settings.cors_origins:
        found.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.cors_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["Authorization", "Content-Type", request_log.HEADER],
                expose_headers=[request_log.HEADER, "Retry-After"],
                max_age=CORS_MAX_AGE_S,
            )
        )
    if keys is not None:
        found.append(Middleware(ApiKeyMiddleware, keys=keys, open_paths=OPEN_PATHS))
    return found


class ApiKeyMiddleware:
    """401 for whoever shows no key that is known; `open_paths` need none. The key goes no further than this."""

    def __init__(self, app: ASGIApp, keys: ApiKeys, open_paths: Collection[str] = ()) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        key = bearer(scope["headers"])
        if key is None or not self._keys.accepts(key):
            error = api_errors.unauthorized(shown=key is not None)
            logger.info("refused: %s", error.message)
            await Reply(send).fail(error, scope["path"])
            return
        headers = [(name, value) for name, value in scope["headers"] if name.lower() != b"authorization"]
        await self._app({**scope, "headers": headers}, receive, send)
