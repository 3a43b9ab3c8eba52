"""All that plugins need, from a planner's start to its end: registry, connections, gateway, and the pipeline.

gRPC is imported when a plugin or the gateway needs it, in a thread: a planner without them costs nothing.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dynamo_local.clock import Clock
from dynamo_local.config.planner import (
    ExternalPluginConfig,
    InProcessPluginConfig,
    PluginRegistrationConfig,
    SchedulingConfig,
)
from dynamo_local.core.notes import Tell
from dynamo_local.errors import ConfigError, DynamoError, how_to_install
from dynamo_local.planner.plugins import registry as listed
from dynamo_local.planner.plugins.pipeline import PluginPipeline
from dynamo_local.planner.plugins.registration import Endpoint, Registering, Rules, malformed, spec_of
from dynamo_local.planner.plugins.registry import (
    UNAUTHENTICATED,
    Patience,
    Plugin,
    PluginFailed,
    PluginRow,
    Registry,
    Tokens,
    in_process,
)
from dynamo_local.planner.stages import Answer, PipelineContext, PluginSpec, Stage, Unusable, shown, usable
from dynamo_local.planner.values import Proposal
from dynamo_local.system.executors import DaemonExecutor, ended
from dynamo_local.transport.access import PLUGIN_TLS, Tls

if TYPE_CHECKING:
    from dynamo_local.planner.plugins.grpc import Gateway


T = TypeVar("T")

log = logging.getLogger(__name__)

SOCKET = "plugins.sock"
LOADING_S = 30.0
"""For reading secrets, and for the imports of plugins in this process."""
CONFIGURATION = ""
"""The subject of a plugin that the configuration names without a token: nobody at the gateway speaks for it."""
AGAIN_S = 1.0

_LOADER = DaemonExecutor("planner plugins", threads=1)


GROUP = "dynamo_local.planner_plugins"


class InProcessPlugin:
    """An object with a method of its stage's name: `predict(context)`, `propose(context)`,
    `reconcile(context, proposals)` or `constrain(context)`. The method may be a coroutine."""

    transport = "in_process"

    def __init__(self, plugin_id: str, instance: object, stage: Stage) -> None:
        self.where = f"{type(instance).__module__}.{type(instance).__qualname__}"
        self._method = getattr(instance, stage, None)
        if not callable(self._method):
            raise ConfigError(f"the planner's plugin {plugin_id}: {self.where} has no method {stage}")
        self._reset = getattr(instance, "reset", None)
        self._thread = DaemonExecutor(f"planner plugin {plugin_id}", threads=1)

    async def ask(
        self, stage: Stage, context: PipelineContext, proposals: Sequence[Proposal], timeout_s: float
    ) -> Answer:
        """See `Plugin`. While its last call has not returned it is not called again."""
        arguments: tuple[Any, ...] = (context, tuple(proposals)) if stage is Stage.RECONCILE else (context,)
        answered = await self._run(self._method, arguments, timeout_s)
        try:
            return usable(stage, answered)
        except Unusable as error:
            raise PluginFailed(f"its answer cannot be used: {error}") from None

    async def reset(self, reason: str, timeout_s: float) -> None:
        """See `Plugin`: its method `reset(reason)`, where it has one."""
        if callable(self._reset):
            try:
                await self._run(self._reset, (reason,), timeout_s)
            except PluginFailed:
                pass  # it is let go of in any case

    async def close(self) -> None: ...

    async def _run(self, method: Any, arguments: tuple[Any, ...], timeout_s: float) -> object:
        def call() -> object:
            answer = method(*arguments)
            return asyncio.run(_awaited(answer)) if inspect.isawaitable(answer) else answer

        try:
            return await self._thread.run(call, timeout_s, what="it")
        except DynamoError as error:
            raise PluginFailed(str(error)) from None
        except Exception as error:  # whatever somebody else's code raises
            raise PluginFailed(f"{type(error).__name__}: {shown(error)}") from None


async def _awaited(answer: Any) -> object:
    return await answer


@dataclass(frozen=True, slots=True)
class Found:
    """A plugin of this process: what it registers as, and the object; or why it could not be made."""

    name: str
    said: Registering | None = None
    instance: object = None
    fault: str | None = None
    origin: str = "configured"


def installed() -> Iterator[Found]:
    """Those of installed packages: entry points of `GROUP`, each a class with a `PluginSpec` as `plugin`. Blocks."""
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            made = entry.load()
            spec = made.plugin
            if not isinstance(spec, PluginSpec):
                raise TypeError(f"its attribute `plugin` is a {type(spec).__name__}, and must be a PluginSpec")
            yield Found(entry.name, _said(spec), made(), origin="installed")
        except Exception as error:  # whatever somebody else's code raises
            yield Found(entry.name, fault=f"{type(error).__name__}: {shown(error)}")


def configured(configs: Sequence[InProcessPluginConfig]) -> Iterator[Found]:
    """Those of `plugin_registration.in_process_plugins`. Blocks."""
    for config in configs:
        try:
            made = getattr(importlib.import_module(config.module), config.class_name)
            yield Found(config.plugin_id, in_process(config), made(**config.kwargs))
        except Exception as error:  # whatever somebody else's code raises
            yield Found(config.plugin_id, fault=f"{type(error).__name__}: {shown(error)}")


def _said(spec: PluginSpec) -> Registering:
    return Registering(
        plugin_id=spec.plugin_id,
        plugin_type=spec.stage,
        priority=spec.priority,
        version=spec.version,
        execution_interval_seconds=spec.interval_s,
        hold_policy=spec.hold_policy,
        needs=spec.needs,
        protocol_version=spec.protocol_version,
        requires_produced_fields=spec.requires,
        observation_window_seconds=spec.window_s,
    )


class PluginService:
    """The plugins of one planner. `runtime` is the folder for the gateway's socket."""

    def __init__(
        self,
        scheduling: SchedulingConfig,
        registration: PluginRegistrationConfig,
        *,
        clock: Clock,
        environ: Mapping[str, str],
        runtime: Path,
        tell: Tell,
    ) -> None:
        self._scheduling = scheduling
        self._registration = registration
        self._environ = environ
        self._runtime = runtime
        self._tell = tell
        self._gateway: Gateway | None = None
        self._tls = Tls()
        self._following: asyncio.Task[None] | None = None
        self.registry = Registry(
            clock,
            self._connect,
            tell,
            rules=Rules(
                registration.protocol_version_min,
                registration.protocol_version_max,
                scheduling.scale_interval_seconds or 0.0,
                registration.transport.allow_insecure_grpc,
            ),
            patience=Patience(registration.heartbeat_timeout_seconds, registration.heartbeat_missed_threshold),
            grid_s=clock.now_s(),
        )
        self.pipeline = PluginPipeline(
            self.registry,
            clock,
            request_timeout_s=registration.transport.request_timeout_seconds,
            tick_max_s=scheduling.tick_max_duration_seconds,
        )

    async def start(self) -> None:
        """Plugins of this process first, then those that the configuration names, then the gateway opens.

        A plugin that does not come in is told, and stops nobody. Raises `ConfigError` where a secret cannot be read,
        the gateway cannot listen, or the extra is missing.
        """
        external, gateway = self._scheduling.external_plugins, self._scheduling.gateway
        if external or gateway.enabled:
            await self._in_thread(_import_grpc)
            self._tls = await self._in_thread(lambda: Tls.of(self._environ, PLUGIN_TLS))
        tokens = await self._in_thread(lambda: Tokens.load(self._registration.auth, self._environ))
        for found in await self._in_thread(lambda: list(self._of_this_process())):
            self._take(found)
        for config in external:
            self._list(config)
        if gateway.enabled:
            await self._open_gateway(tokens)
        self._following = asyncio.ensure_future(_follow(tokens))

    async def stop(self) -> None:
        """All plugins leave, and the gateway closes."""
        await ended(self._following)
        self._following = None
        if self._gateway is not None:
            await self._gateway.stop()
            self._gateway = None
        await self.registry.close()

    def rows(self) -> tuple[PluginRow, ...]:
        """The plugins, as they are shown."""
        return self.registry.rows()

    def status(self) -> dict[str, Any]:
        """For `dynamo planner plugins --json`. Never waits."""
        last = self.pipeline.last
        return {
            "plugins": [row.as_json() for row in self.rows()],
            "not_taken": dict(self.registry.faults),
            "gateway": None if self._gateway is None else self._gateway.where,
            "last_tick": None if last is None else {"action": str(last.action), "why": last.why},
        }

    # --- inside ----------------------------------------------------------------------------------

    def _of_this_process(self) -> itertools.chain[Found]:
        listed_here = self._registration.in_process_plugins
        return itertools.chain(installed(), configured(listed_here))

    def _take(self, found: Found) -> None:
        """A plugin of this process."""
        if found.said is None:
            self._not_taken(found.name, found.fault or "")
            return
        said = found.said
        if (fault := malformed(said)) is not None:
            self._not_taken(said.plugin_id, fault)
        elif self.registry.subject_of(said.plugin_id) is not None:
            self._not_taken(said.plugin_id, "duplicate_plugin_id")
        else:
            try:
                spec = spec_of(said)
                plugin = InProcessPlugin(said.plugin_id, found.instance, spec.stage)
            except ConfigError as error:
                self._not_taken(said.plugin_id, str(error))
            else:
                self.registry.add(spec, plugin, CONFIGURATION, origin=found.origin)

    def _list(self, config: ExternalPluginConfig) -> None:
        """A plugin that the configuration names, which is trusted.

        One with a token may speak for itself at the gateway, in the name for which that secret stands.
        """
        said, auth = listed.external(config), self._registration.auth
        subject: str | None = CONFIGURATION
        if config.auth_token is not None:
            subject = auth.static_secrets.get(config.auth_token) if auth.trusted_sources else UNAUTHENTICATED
        reason = malformed(said) or self.registry.register(said, subject, origin="configured")
        if reason is not None:
            self._not_taken(said.plugin_id, reason)

    def _not_taken(self, plugin_id: str, reason: str) -> None:
        self.registry.faults[plugin_id] = reason
        self._tell(f"the planner's plugin {plugin_id} is not taken: {reason}")

    def _connect(self, endpoint: Endpoint) -> Plugin:
        from dynamo_local.planner.plugins.grpc import GrpcPlugin

        transport = self._registration.transport
        return GrpcPlugin(
            endpoint,
            message_bytes_max=transport.max_message_size_bytes,
            keepalive_time_ms=transport.keepalive_time_ms,
            tls=self._tls,
        )

    async def _open_gateway(self, tokens: Tokens) -> None:
        from dynamo_local.planner.plugins.grpc import Gateway

        config = self._scheduling.gateway
        gateway = Gateway(self.registry, tokens)
        if config.tcp is not None:
            await gateway.start(tcp=config.tcp, tls=self._tls if config.tls else None)
        else:
            await gateway.start(socket=Path(config.socket) if config.socket else self._runtime / SOCKET)
        self._gateway = gateway
        log.info("planner: plugins register at %s", gateway.where)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await _LOADER.run(work, LOADING_S, what="loading the planner's plugins")


def _import_grpc() -> None:
    try:
        import dynamo_local.planner.plugins.grpc  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"plugins that are gRPC servers need grpcio and protobuf ({error}): {how_to_install('plugins')}"
        ) from None


async def _follow(tokens: Tokens) -> None:
    while True:
        try:
            await tokens.follow()
            return
        except Exception:  # a bug: rotated secrets must be seen all the same
            log.exception("the planner's secrets for plugins could not be followed; another try follows")
            await asyncio.sleep(AGAIN_S)
