"""The environment in which Dynamo 1.x's own processes run as we need them. Light; why each: docs/dynamo-1x.md."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

SYSTEM_PORT, RPC_PORT, HTTP_PORT = "system", "rpc", "http"
PORT_VARIABLES = {SYSTEM_PORT: "DYN_SYSTEM_PORT", RPC_PORT: "DYN_TCP_RPC_PORT", HTTP_PORT: "DYN_HTTP_PORT"}
LOOPBACK = "127.0.0.1"

DEFAULTS = {
    # Listen on loopback only: the defaults are 0.0.0.0, or the address of a network card.
    "DYN_SYSTEM_HOST": LOOPBACK,
    "DYN_TCP_RPC_HOST": LOOPBACK,
    "DYN_TCP_RESPONSE_STREAM_HOST": LOOPBACK,
    "DYN_EVENT_PLANE_HOST": LOOPBACK,
    "DYN_HTTP_HOST": LOOPBACK,
    "DYN_EVENT_PLANE": "nats",  # the other one, ZMQ, binds 0.0.0.0 whatever the host variables say
    "DYN_REQUEST_PLANE": "tcp",  # by the port in its transport we know whose an instance is
    # Without this a mocker's /health stays 503.
    "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS": '["generate"]',
    # We send SIGTERM when nothing is in flight any more: nothing to wait for then.
    "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
    # A leaving frontend finishes its streams; the drain deadline bounds that.
    "DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "86400",
}
"""A service's `envs` win over these."""

OWNED = frozenset(PORT_VARIABLES.values())
"""Always set by us. In `envs` they would have no effect, so they are refused there."""


PEM_VARIABLES = ("ETCD_AUTH_CA", "ETCD_AUTH_CLIENT_CERT", "ETCD_AUTH_CLIENT_KEY")
"""To us the path of a file will do; Dynamo takes what stands there for PEM itself, whatever its documentation says."""


def port_names(section: Mapping[str, Any]) -> tuple[str, ...]:
    """The ports that a section needs beside those in its command."""
    return (SYSTEM_PORT, RPC_PORT, *((HTTP_PORT,) if section.get("role") == "frontend" else ()))


def signs(section: Mapping[str, Any]) -> tuple[str, ...]:
    """The port on which it listens shortly before it can be routed to."""
    return (HTTP_PORT if section.get("role") == "frontend" else RPC_PORT,)


def environment(ports: Mapping[str, int], environ: Mapping[str, str]) -> dict[str, str]:
    """The addition to the worker's own environment. Raises `OSError` if NATS's token or a certificate cannot be
    read."""
    added = {name: value for name, value in DEFAULTS.items() if name not in environ}
    added.update({variable: str(ports[name]) for name, variable in PORT_VARIABLES.items() if name in ports})
    token = environ.get("DYN_NATS_TOKEN_FILE")
    if token:
        added["NATS_AUTH_TOKEN"] = _text(token).strip()
    for name in PEM_VARIABLES:
        value = environ.get(name, "")
        if value and "-----BEGIN " not in value:
            added[name] = _text(value)
    return added


def _text(path: str) -> str:
    with open(path, encoding="utf-8") as file:  # pathlib takes longer to import than all of this to run
        return file.read()
