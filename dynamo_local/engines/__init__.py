"""The engines, which compute tokens. Each implements the Protocol `Engine` of `dynamo_local.ports`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dynamo_local.errors import ConfigError

if TYPE_CHECKING:
    from dynamo_local.clock import Clock
    from dynamo_local.engines.vllm.options import VllmOptions
    from dynamo_local.ports import Engine, KvEventPublisher, PassSink

ENGINES = ("sim", "vllm")


def make_engine(
    kind: str,
    options: Mapping[str, Any] | VllmOptions | None = None,
    *,
    clock: Clock | None = None,
    kv_events: KvEventPublisher | None = None,
    passes: PassSink | None = None,
) -> Engine:
    """The engine of that kind, not yet started. Its package is imported here, so that others cost nothing.

    `options` are the engine's own: `VllmOptions` for `vllm`, those of `SimOptions` for `sim`, keys with hyphens or
    underscores. `kv_events` receives the events of the engine's KV cache, `passes` what its
    scheduler does; None: nobody needs them.
    Raises `ConfigError` for an unknown kind, an unknown option or a value that cannot be used.
    """
    if kind == "vllm":
        from dynamo_local.engines.vllm.engine import VllmEngine
        from dynamo_local.engines.vllm.options import VllmOptions

        if not isinstance(options, VllmOptions):
            raise ConfigError("the vllm engine needs VllmOptions: it has no default model")
        return VllmEngine(options, kv_events=kv_events, passes=passes)
    if kind == "sim":
        from dynamo_local.engines.sim.engine import SimEngine
        from dynamo_local.engines.sim.options import SimOptions

        assert options is None or isinstance(options, Mapping)
        return SimEngine(SimOptions.from_mapping(options or {}), clock=clock, kv_events=kv_events, passes=passes)
    raise ConfigError(f"there is no engine {kind!r}; the engines are: {', '.join(ENGINES)}")
