"""What computes tokens, behind the `Engine` Protocol of `dynamo_local.ports`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dynamo_local.errors import ConfigError

if TYPE_CHECKING:
    from dynamo_local.clock import Clock
    from dynamo_local.ports import Engine, KvEventPublisher

ENGINES = ("sim",)


def make_engine(
    kind: str,
    options: Mapping[str, Any] | None = None,
    *,
    clock: Clock | None = None,
    kv_events: KvEventPublisher | None = None,
) -> Engine:
    """The engine of that kind, not yet started. Its package is imported here, so that others cost nothing.

    `options` are the engine's own (`SimOptions` for `sim`), keys with hyphens or underscores. `kv_events` is told what
    the engine's KV cache holds; None: nobody wants to know.
    Raises `ConfigError` for an unknown kind, an unknown option or a value that cannot be used.
    """
    if kind == "sim":
        from dynamo_local.engines.sim import SimEngine, SimOptions

        return SimEngine(SimOptions.from_mapping(options or {}), clock=clock, kv_events=kv_events)
    raise ConfigError(f"there is no engine {kind!r}; the engines are: {', '.join(ENGINES)}")
