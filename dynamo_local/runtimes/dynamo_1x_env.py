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
    # Nothing of it listens beyond this host: the defaults are 0.0.0.0, or the address of a network card.
    "DYN_SYSTEM_HOST": LOOPBACK,
    "DYN_TCP_RPC_HOST": LOOPBACK,
    "DYN_TCP_RESPONSE_STREAM_HOST": LOOPBACK,
    "DYN_EVENT_PLANE_HOST": LOOPBACK,
    "DYN_HTTP_HOST": LOOPBACK,
    "DYN_EVENT_PLANE": "nats",  # the other one, ZMQ, binds 0.0.0.0 whatever the host variables say
    "DYN_REQUEST_PLANE": "tcp",  # the port in an instance's transport is how we know whose it is
    # Without it a mocker's /health stays 503.
    "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS": '["generate"]',
    # We send SIGTERM when nothing is in flight any more: nothing to wait for then.
    "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
    # A frontend that leaves finishes its streams; how long that may take is the drain deadline's to say.
    "DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": "86400",
}
"""A service's `envs` win over these."""

OWNED = frozenset(PORT_VARIABLES.values())
"""Set by us whatever else says: in `envs` they would have no effect, so they are refused there."""


def port_names(section: Mapping[str, Any]) -> tuple[str, ...]:
    """The ports that it needs beside those in its command."""
    return (SYSTEM_PORT, RPC_PORT, *((HTTP_PORT,) if section.get("role") == "frontend" else ()))


def signs(section: Mapping[str, Any]) -> tuple[str, ...]:
    """The port that is listened on a moment before it can be routed to."""
    return (HTTP_PORT if section.get("role") == "frontend" else RPC_PORT,)


def environment(ports: Mapping[str, int], environ: Mapping[str, str]) -> dict[str, str]:
    """What is added to the worker's own environment. Raises `OSError` where NATS's token cannot be read."""
    added = {name: value for name, value in DEFAULTS.items() if name not in environ}
    added.update({variable: str(ports[name]) for name, variable in PORT_VARIABLES.items() if name in ports})
    token = environ.get("DYN_NATS_TOKEN_FILE")
    if token:
        with open(token, encoding="utf-8") as file:  # pathlib takes longer to import than all of this to run
            added["NATS_AUTH_TOKEN"] = file.read().strip()
    return added
