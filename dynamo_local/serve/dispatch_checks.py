"""Whether what `slo` decides by is there: said before anything starts."""

from __future__ import annotations

from typing import Any

from dynamo_local.config import Config
from dynamo_local.core.types import GraphSpec
from dynamo_local.errors import ConfigError
from dynamo_local.sdk.loader import LoadedGraph
from dynamo_local.sdk.settings import validate_section


def check_dispatch(graph: LoadedGraph, spec: GraphSpec, config: Config) -> tuple[str, ...]:
    """A note for each service that is to decide by targets and falls back to the seed's rule.

    Raises `ConfigError` for a profile that is given and cannot be read.
    """
    notes = []
    for service in spec.services:
        model = graph.services[service.name].config_model
        if model is None or not hasattr(model, "what_slo_lacks"):
            continue
        where = f"{config.source}: {service.name}"
        settings: Any = validate_section(model, where, service.config)
        try:
            lacks = settings.what_slo_lacks()
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        if lacks is not None:
            notes.append(f"{service.name}: {lacks}; give profile-results-dir (docs/routing.md)")
    return tuple(notes)
