"""The gRPC server at which plugins register themselves: `dynamo.planner.plugin.v1.PluginRegistry`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc

from dynamo_local.errors import ConfigError
from dynamo_local.planner.plugins import codec
from dynamo_local.planner.plugins import codec as wire
from dynamo_local.planner.plugins.registration import Endpoint, malformed
from dynamo_local.planner.plugins.registry import PluginFailed, Registry, Tokens
from dynamo_local.planner.stages import Answer, PipelineContext, Stage, Unusable, shown
from dynamo_local.planner.values import Proposal
from dynamo_local.transport.access import Tls, channel_credentials, server_credentials

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

    async def _register(self, requested: Any, context: Any) -> dict[str, Any]:
        said = codec.registering(requested)
        if (fault := malformed(said)) is not None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"register: {fault}")
        reason = self._registry.register(said, self._tokens.subject_of(requested.auth_token), origin="gateway")
        if reason is not None:
            return {"accepted": False, "reject_reason": reason}
        return {"accepted": True, "negotiated_protocol_version": said.protocol_version}

    async def _heartbeat(self, requested: Any, context: Any) -> dict[str, Any]:
        await self._allowed("heartbeat", requested, context)
        self._registry.heartbeat(requested.plugin_id)
        return {"ok": True}

    async def _unregister(self, requested: Any, context: Any) -> dict[str, Any]:
        await self._allowed("unregister", requested, context)
        self._registry.remove(requested.plugin_id, shown(requested.reason) or "unregistered")
        return {"ok": True}

    async def _list(self, requested: Any, context: Any) -> dict[str, Any]:
        await context.abort(
            grpc.StatusCode.PERMISSION_DENIED,
            "list_plugins: `dynamo planner plugins` lists them, on the planner's host",
        )
        return {}

    async def _allowed(self, what: str, requested: Any, context: Any) -> None:
        """Only who registered a plugin speaks for it. An unknown one is refused in the same words."""
        subject = self._tokens.subject_of(requested.auth_token)
        if subject is None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{what}: auth_failed")
        if self._registry.subject_of(requested.plugin_id) != subject:
            await context.abort(
                grpc.StatusCode.PERMISSION_DENIED, f"{what}: you have registered no such plugin; register it (again)"
            )


def _url(target: str, port: int, tls: Tls | None) -> str:
    return f"{'grpc' if tls is None else 'grpcs'}://{target.rpartition(':')[0]}:{port}"


def _handler(name: str, handle: Handler) -> Any:
    _, request, response = wire.methods(SERVICE)[name]

    async def call(raw: bytes, context: Any) -> bytes:
        try:
            requested = codec.parsed(request, raw)
        except Unusable:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{name.lower()}: these bytes are no {name}Request")
        answer: bytes = response(**await handle(requested, context)).SerializeToString()
        return answer

    return grpc.unary_unary_rpc_method_handler(call)


def _fit(socket: Path) -> Path:
    if len(os.fsencode(str(socket))) > SOCKET_BYTES_MAX:
        raise ConfigError(
            f"the gateway's socket {socket} has a path of more than {SOCKET_BYTES_MAX} bytes, which the kernel does "
            "not take; name a shorter one in `scheduling.gateway.listen`"
        )
    return socket


# --- grpc_plugin
# A plugin that is a gRPC server: on a unix socket, or on a port.

ANSWER_BYTES_MAX = 256 * 1024
"""An answer is some numbers. Reading more than this would hold the arbiter's loop for milliseconds."""
RECONNECT_MS = 5000
"""A plugin that comes back is found at the next probe of its circuit: gRPC's own pause between attempts grows to two
minutes."""
ATTEMPT_MS = 1000
"""How long one attempt to connect may take, and the next one waits at least: gRPC's own bound is 20 s."""

SYSTEM_S = Tls()
"""The authorities of the system are trusted, and no certificate is shown."""

_LIFECYCLE = wire.methods("PluginLifecycle")


class GrpcPlugin:
    """A connection to it, which gRPC makes when it is first used and again when it is lost."""

    def __init__(
        self, endpoint: Endpoint, *, message_bytes_max: int, keepalive_time_ms: int, tls: Tls = SYSTEM_S
    ) -> None:
        self.transport = endpoint.transport
        self.where = endpoint.target if endpoint.transport == "unix" else f"{endpoint.transport}://{endpoint.target}"
        self._bytes_max = message_bytes_max
        self._bootstrapped = False
        options = [
            ("grpc.max_send_message_length", message_bytes_max),
            ("grpc.max_receive_message_length", min(message_bytes_max, ANSWER_BYTES_MAX)),
            ("grpc.keepalive_time_ms", keepalive_time_ms),
            ("grpc.min_reconnect_backoff_ms", ATTEMPT_MS),
            ("grpc.max_reconnect_backoff_ms", RECONNECT_MS),
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if endpoint.transport == "grpcs":
            self._channel = grpc.aio.secure_channel(endpoint.target, channel_credentials(tls), options=options)
        else:
            self._channel = grpc.aio.insecure_channel(endpoint.target, options=options)

    async def ask(
        self, stage: Stage, context: PipelineContext, proposals: Sequence[Proposal], timeout_s: float
    ) -> Answer:
        """See `Plugin`. Before its first stage, and again after a failure, the plugin is told to get ready."""
        requested = codec.request(stage, context, proposals)
        if len(requested) > self._bytes_max:
            raise PluginFailed(
                f"the context has {len(requested)} bytes, max_message_size_bytes allows {self._bytes_max}"
            )
        try:
            async with asyncio.timeout(timeout_s):
                if not self._bootstrapped:
                    await self._lifecycle("Bootstrap")
                    self._bootstrapped = True
                return codec.answer(stage, await self._call(codec.METHODS[stage][0], requested))
        except TimeoutError:
            raise PluginFailed(f"no answer within {timeout_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            self._bootstrapped = False  # what answers next time may be another process
            raise PluginFailed(_describe(error)) from None
        except Unusable as error:
            raise PluginFailed(f"its answer cannot be used: {error}") from None

    async def reset(self, reason: str, timeout_s: float) -> None:
        if not self._bootstrapped:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._lifecycle("Reset", reason=reason)
        except (TimeoutError, PluginFailed, Unusable, grpc.aio.AioRpcError):
            pass  # it is let go of in any case

    async def close(self) -> None:
        await self._channel.close()

    async def _lifecycle(self, method: str, **fields: str) -> None:
        path, request, response = _LIFECYCLE[method]
        try:
            raw = await self._call(path, request(**fields).SerializeToString())
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return
            raise
        answer = codec.parsed(response, raw)
        if not answer.ok:
            raise PluginFailed(f"{method} is refused: {shown(answer.message) or 'it does not say why'}")

    async def _call(self, path: str, request: bytes) -> bytes:
        answer: bytes = await self._channel.unary_unary(path)(request)
        return answer


def _describe(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {shown(error.details() or 'no details')}"
