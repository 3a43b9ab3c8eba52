"""A plugin that is a gRPC server: on a unix socket, or on a port."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc

from dynamo_local.infra.access import Tls
from dynamo_local.infra.grpc_tls import channel_credentials
from dynamo_local.planner.pipeline.answers import Unusable, shown
from dynamo_local.planner.pipeline.context import PipelineContext
from dynamo_local.planner.pipeline.registering import Endpoint
from dynamo_local.planner.pipeline.stages import Answer, Stage
from dynamo_local.planner.plugins import codec, wire
from dynamo_local.planner.plugins.calling import PluginFailed
from dynamo_local.planner.values.proposals import Proposal

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
        asked = codec.request(stage, context, proposals)
        if len(asked) > self._bytes_max:
            raise PluginFailed(f"the context has {len(asked)} bytes, max_message_size_bytes allows {self._bytes_max}")
        try:
            async with asyncio.timeout(timeout_s):
                if not self._bootstrapped:
                    await self._lifecycle("Bootstrap")
                    self._bootstrapped = True
                return codec.answer(stage, await self._call(codec.METHODS[stage][0], asked))
        except TimeoutError:
            raise PluginFailed(f"no answer within {timeout_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            self._bootstrapped = False  # what answers next time may be another process
            raise PluginFailed(_words(error)) from None
        except Unusable as error:
            raise PluginFailed(f"its answer cannot be used: {error}") from None

    async def reset(self, reason: str, timeout_s: float) -> None:
        """See `Plugin`."""
        if not self._bootstrapped:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._lifecycle("Reset", reason=reason)
        except (TimeoutError, PluginFailed, Unusable, grpc.aio.AioRpcError):
            pass  # it is let go of in any case

    async def close(self) -> None:
        """See `Plugin`."""
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


def _words(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {shown(error.details() or 'no details')}"
