"""For who writes a plugin: serve a Python object as a gRPC plugin of this planner, or of Dynamo's.

    class Floor:
        plugin = PluginSpec("floor", Stage.PROPOSE, priority=5)

        def propose(self, context: PipelineContext) -> Override | None: ...

    asyncio.run(serve(Floor(), Floor.plugin, listen="unix:///tmp/floor.sock", gateway="unix:///…/plugins.sock"))

The same object can be used in the planner's own process. The wire format alone (`plugin.proto`) is enough, too, in any
language.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from typing import Any

import grpc

from dynamo_local.errors import DynamoError
from dynamo_local.planner.plugins import codec
from dynamo_local.planner.plugins import codec as wire
from dynamo_local.planner.stages import PluginSpec, Stage, Unusable, usable
from dynamo_local.transport.access import Tls, channel_credentials, server_credentials

log = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
CALL_S = 5.0
_REGISTRY = wire.methods("PluginRegistry")


class RegistrationRefused(DynamoError):
    """The planner does not take the plugin; the message has its reason."""

    code = "registration_refused"


async def serve(
    plugin: object,
    spec: PluginSpec,
    *,
    listen: str,
    gateway: str | None = None,
    token: str = "",
    ready: Callable[[str], None] = lambda endpoint: None,
    tls: Tls | None = None,
) -> None:
    """Serve the plugin until it is cancelled. `ready` is told the endpoint each time it can be called:
    it listens and, with a gateway, is registered.

    `listen`: `unix:///PATH` or `HOST:PORT` (port 0: any free one). With `gateway` (the same forms) it registers itself,
    sends heartbeats, and registers again where the planner has forgotten it; without, the planner's configuration names
    it. With `tls` a port speaks it (`Tls.of(os.environ, PLUGIN_TLS)`), and so it is spoken to a gateway at
    `grpcs://HOST:PORT`. Raises `RegistrationRefused`, and `DynamoError` where it cannot listen.
    """
    server, unix = grpc.aio.server(), listen.startswith("unix:")
    server.add_generic_rpc_handlers(_handlers(plugin, spec.stage))
    try:
        if tls is None or unix:
            port = server.add_insecure_port(_target(listen))
        else:
            port = server.add_secure_port(_target(listen), server_credentials(tls))
    except RuntimeError:
        port = 0
    if port == 0:
        raise DynamoError(f"the plugin cannot listen on {listen}: the port is taken, or the folder is not there")
    await server.start()
    scheme = "grpc" if tls is None else "grpcs"
    endpoint = f"unix://{_target(listen)[5:]}" if unix else f"{scheme}://{_target(listen).rpartition(':')[0]}:{port}"
    try:
        if gateway is None:
            ready(endpoint)
            await server.wait_for_termination()
        else:
            async with _to(gateway, tls) as channel:
                await _registered(channel, spec, endpoint, token, ready)
    finally:
        await server.stop(0.5)


def _target(address: str) -> str:
    """As gRPC writes it."""
    if address.startswith("unix:"):
        return "unix:/" + address[5:].lstrip("/")
    return address.removeprefix("grpc://").removeprefix("grpcs://")


# --- being asked ---------------------------------------------------------------------------------


def _handlers(plugin: object, stage: Stage) -> tuple[Any, ...]:
    method = getattr(plugin, stage)
    _, request, _ = codec.METHODS[stage]

    async def ask(raw: bytes, context: Any) -> bytes:
        requested = request.FromString(raw)
        given: tuple[Any, ...] = (codec.context_of_message(requested.context),)
        if stage is Stage.RECONCILE:
            given = (*given, codec.proposals_of_message(requested.proposals))
        try:
            return codec.response(stage, usable(stage, await _called(method, *given)))
        except Unusable as error:
            await context.abort(grpc.StatusCode.INTERNAL, f"the plugin's answer is wrong: {error}")
        except Exception as error:
            log.exception("the plugin failed")
            await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
        return b""

    def lifecycle(name: str) -> Any:
        _, _, response = wire.methods("PluginLifecycle")[name]
        hook = getattr(plugin, name.lower(), None)

        async def call(raw: bytes, context: Any) -> bytes:
            if name == "Reset" and callable(hook):
                await _called(hook, wire.message("ResetRequest").FromString(raw).reason)
            answer: bytes = response(ok=True).SerializeToString()
            return answer

        return grpc.unary_unary_rpc_method_handler(call)

    stages = {stage.title(): grpc.unary_unary_rpc_method_handler(ask)}
    return (
        grpc.method_handlers_generic_handler(f"{wire.PACKAGE}.{stage.title()}Plugin", stages),
        grpc.method_handlers_generic_handler(
            f"{wire.PACKAGE}.PluginLifecycle", {name: lifecycle(name) for name in ("Bootstrap", "Reset")}
        ),
    )


async def _called(method: Any, *given: Any) -> object:
    if inspect.iscoroutinefunction(method):
        answer: object = await method(*given)
        return answer
    return await asyncio.to_thread(method, *given)


# --- registering ---------------------------------------------------------------------------------


def _to(gateway: str, tls: Tls | None) -> grpc.aio.Channel:
    options = [("grpc.enable_http_proxy", 0)]
    if gateway.startswith("grpcs://"):
        return grpc.aio.secure_channel(_target(gateway), channel_credentials(tls or Tls()), options=options)
    return grpc.aio.insecure_channel(_target(gateway), options=options)


async def _registered(
    channel: grpc.aio.Channel, spec: PluginSpec, endpoint: str, token: str, ready: Callable[[str], None]
) -> None:
    """Registered for as long as this runs. A planner that is away for a while is waited for."""
    known = False
    try:
        while True:
            try:
                if known:
                    await _call(channel, "Heartbeat", plugin_id=spec.plugin_id, auth_token=token)
                else:
                    await _register(channel, spec, endpoint, token)
                    known = True
                    ready(endpoint)
            except grpc.aio.AioRpcError as error:
                known = known and error.code() is not grpc.StatusCode.PERMISSION_DENIED
                log.warning("the planner's gateway: %s", error.details())
            await asyncio.sleep(HEARTBEAT_S)
    finally:
        if known:
            await _leave(channel, spec, token)


async def _register(channel: Any, spec: PluginSpec, endpoint: str, token: str) -> None:
    """A plugin of that name that was killed is still known: who shows its token may take its place."""
    fields = _fields(spec, endpoint)
    answer = await _call(channel, "Register", auth_token=token, **fields)
    if answer.reject_reason.startswith("duplicate_plugin_id"):
        await _call(channel, "Unregister", plugin_id=spec.plugin_id, reason="it has started anew", auth_token=token)
        answer = await _call(channel, "Register", auth_token=token, **fields)
    if not answer.accepted:
        raise RegistrationRefused(f"the planner does not take {spec.plugin_id}: {answer.reject_reason}")


def _fields(spec: PluginSpec, endpoint: str) -> dict[str, Any]:
    return {
        "plugin_id": spec.plugin_id,
        "plugin_type": str(spec.stage),
        "priority": spec.priority,
        "endpoint": endpoint,
        "version": spec.version,
        "execution_interval_seconds": spec.interval_s,
        "hold_policy": int(spec.hold_policy),
        "needs": list(spec.needs),
        "protocol_version": spec.protocol_version,
        "requires_produced_fields": list(spec.requires),
        "observation_window_seconds": spec.window_s,
    }


async def _leave(channel: Any, spec: PluginSpec, token: str) -> None:
    try:
        await _call(channel, "Unregister", plugin_id=spec.plugin_id, reason="it ends", auth_token=token)
    except grpc.aio.AioRpcError:
        pass  # the planner is gone, or finds out by the missing heartbeats


async def _call(channel: Any, name: str, **fields: Any) -> Any:
    path, request, response = _REGISTRY[name]
    raw = await channel.unary_unary(path)(request(**fields).SerializeToString(), timeout=CALL_S)
    return response.FromString(raw)
