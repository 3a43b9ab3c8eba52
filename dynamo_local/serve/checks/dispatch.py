"""Whether what `slo` decides by is there, and the same for all: said before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dynamo_local.config import Config
from dynamo_local.core.types import GraphSpec, Missing
from dynamo_local.errors import ConfigError
from dynamo_local.sdk.loader import LoadedGraph
from dynamo_local.sdk.settings import validate_section


def check_dispatch(graph: LoadedGraph, spec: GraphSpec, config: Config) -> tuple[str, ...]:
    """A note for each service that is to decide by targets and has none, or falls back to the seed's rule; and one if
    services decide by different engines.

    Raises `ConfigError` for a profile that is given and cannot be read.
    """
    notes, times = [], {}
    for name, settings in _sections(graph, spec, config):
        try:
            lacks = settings.what_slo_lacks()
        except ConfigError as error:
            raise ConfigError(f"{config.source}: {name}: {error}") from None
        if lacks is not None:
            notes.append(f"{name}: {lacks}; give profile-results-dir (docs/routing.md)")
        if not settings.wants_slo:
            continue
        if not settings.targets.given:
            notes.append(
                f"{name}: slo has no target to keep and only shortens waits; give ttft or itl (docs/routing.md)"
            )
        if not isinstance(found := settings.times(), Missing):
            times[name] = str(found)
    if len(set(times.values())) > 1:
        notes.append(_different(times))
    return tuple(notes)


def _sections(graph: LoadedGraph, spec: GraphSpec, config: Config) -> Iterator[tuple[str, Any]]:
    """Services that can decide by targets, and their settings."""
    for service in spec.components:
        model = graph.services[service.name].config_model
        if model is not None and hasattr(model, "what_slo_lacks"):
            yield service.name, validate_section(model, f"{config.source}: {service.name}", service.config)


def _different(times: Mapping[str, str]) -> str:
    said = ", ".join(f"{name} by {each}" for name, each in times.items())
    return (
        f"slo decides by different engines ({said}): give all the workers' sim or profile-results-dir, for example in "
        "common-configs (docs/routing.md)"
    )
