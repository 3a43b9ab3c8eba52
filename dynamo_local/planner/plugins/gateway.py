"""The gRPC server at which plugins register themselves: `dynamo.planner.plugin.v1.PluginRegistry`."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

from dynamo_local.errors import ConfigError
from dynamo_local.infra.access import Tls
from dynamo_local.infra.grpc_tls import server_credentials
from dynamo_local.planner.pipeline.answers import Unusable, shown
from dynamo_local.planner.pipeline.registering import malformed
from dynamo_local.planner.plugins import codec, wire
from dynamo_local.planner.plugins.registry import Registry
from dynamo_local.planner.plugins.tokens import Tokens

REQUEST_BYTES_MAX = 64 * 1024
CALLS_MAX = 32
SOCKET_BYTES_MAX = 107
SERVICE = "PluginRegistry"

Handler = Callable[[Any, Any], Awaitable[Any]]


class Gateway:
    """Listens from `start` to `stop`. `where` is what a plugin is told to register at."""

    def __init__(self, registry: Registry, tokens: Tokens) -> None:
        self._registry = registry
        self._tokens = tokens
        self._server: grpc.aio.Server | None = None
        self.where: str | None = None

    async def start(self, *, socket: Path | None = None, tcp: str | None = None, tls: Tls | None = None) -> None:
        """On a unix socket, or on HOST:PORT, there with TLS where it is given. Raises `ConfigError` where it cannot."""
        credentials = None if tls is None else server_credentials(tls)
        server = grpc.aio.server(
            maximum_concurrent_rpcs=CALLS_MAX,
            options=[("grpc.max_receive_message_length", REQUEST_BYTES_MAX), ("grpc.so_reuseport", 0)],
        )
        handlers: dict[str, Handler] = {
            "Register": self._register,
            "Heartbeat": self._heartbeat,
            "Unregister": self._unregister,
            "ListPlugins": self._list,
        }
        methods = {name: _handler(name, handle) for name, handle in handlers.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(f"{wire.PACKAGE}.{SERVICE}", methods),))
        target = f"unix:{_fit(socket)}" if socket is not None else str(tcp)
        try:
            if credentials is None:
                port = server.add_insecure_port(target)
            else:
                port = server.add_secure_port(target, credentials)
        except RuntimeError:
            port = 0
        if port == 0:
            await server.stop(None)
            raise ConfigError(
                f"the planner's gateway for plugins cannot listen on {target}: the port is taken, or the folder is not "
                "there or not ours; `scheduling.gateway.listen` names another place"
            )
        await server.start()
        if socket is not None:
            os.chmod(socket, 0o600)
        self._server = server
        self.where = f"unix://{socket}" if socket is not None else _url(target, port, tls)

    async def stop(self) -> None:
        """Ends the server; calls under way have half a second."""
        server, self._server, self.where = self._server, None, None
        if server is not None:
            await server.stop(0.5)

    # --- the calls ---------------------------------------------------------------------------------

    async def _register(self, asked: Any, context: Any) -> dict[str, Any]:
        said = codec.registering(asked)
        if (fault := malformed(said)) is not None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"register: {fault}")
        reason = self._registry.register(said, self._tokens.subject_of(asked.auth_token), origin="gateway")
        if reason is not None:
            return {"accepted": False, "reject_reason": reason}
        return {"accepted": True, "negotiated_protocol_version": said.protocol_version}

    async def _heartbeat(self, asked: Any, context: Any) -> dict[str, Any]:
        await self._allowed("heartbeat", asked, context)
        self._registry.heartbeat(asked.plugin_id)
        return {"ok": True}

    async def _unregister(self, asked: Any, context: Any) -> dict[str, Any]:
        await self._allowed("unregister", asked, context)
        self._registry.remove(asked.plugin_id, shown(asked.reason) or "unregistered")
        return {"ok": True}

    async def _list(self, asked: Any, context: Any) -> dict[str, Any]:
        await context.abort(
            grpc.StatusCode.PERMISSION_DENIED,
            "list_plugins: `dynamo planner plugins` lists them, on the planner's host",
        )
        return {}

    async def _allowed(self, what: str, asked: Any, context: Any) -> None:
        """Only who registered a plugin speaks for it. An unknown one is refused in the same words."""
        subject = self._tokens.subject_of(asked.auth_token)
        if subject is None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{what}: auth_failed")
        if self._registry.subject_of(asked.plugin_id) != subject:
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED, f"{what}: you have registered no such plugin; register it (again)"
            )


def _url(target: str, port: int, tls: Tls | None) -> str:
    return f"{'grpc' if tls is None else 'grpcs'}://{target.rpartition(':')[0]}:{port}"


def _handler(name: str, handle: Handler) -> Any:
    _, request, response = wire.methods(SERVICE)[name]

    async def call(raw: bytes, context: Any) -> bytes:
        try:
            asked = codec.parsed(request, raw)
        except Unusable:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{name.lower()}: these bytes are no {name}Request")
        answer: bytes = response(**await handle(asked, context)).SerializeToString()
        return answer

    return grpc.unary_unary_rpc_method_handler(call)


def _fit(socket: Path) -> Path:
    if len(os.fsencode(str(socket))) > SOCKET_BYTES_MAX:
        raise ConfigError(
            f"the gateway's socket {socket} has a path of more than {SOCKET_BYTES_MAX} bytes, which the kernel does "
            "not take; name a shorter one in `scheduling.gateway.listen`"
        )
    return socket
