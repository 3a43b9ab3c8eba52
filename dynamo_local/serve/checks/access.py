"""Who may use the Frontends and the arbiter's metrics, asked before anything starts: keys and certificates are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from dynamo_local.components.openai.settings import FrontendConfig
from dynamo_local.config import Config
from dynamo_local.config.loading import HOST
from dynamo_local.config.merge import deep_merge
from dynamo_local.core.api_keys import parse_source
from dynamo_local.core.types import GraphSpec
from dynamo_local.errors import ConfigError
from dynamo_local.sdk.loader import LoadedGraph
from dynamo_local.sdk.settings import validate_section
from dynamo_local.system.key_files import ApiKeys


def insecure(graph: LoadedGraph, config: Config) -> Config:
    """`--insecure`: as if each Frontend's section said so."""
    overrides = {name: {"insecure": True} for name in graph.services if _options_of(graph, name) is not None}
    return replace(config, sections=deep_merge(config.sections, overrides))


def check_access(
    graph: LoadedGraph, spec: GraphSpec, config: Config, environ: Mapping[str, str], *, only_plan: bool = False
) -> tuple[str, ...]:
    """Raises `ConfigError` for keys and certificates that cannot be used; with `only_plan` (`--dry-run`) notes
    instead: the plan's host may have them."""
    notes = []
    for problem in _problems(graph, spec, config, environ):
        if not only_plan:
            raise problem
        notes.append(str(problem))
    return tuple(notes)


def _problems(graph: LoadedGraph, spec: GraphSpec, config: Config, environ: Mapping[str, str]) -> Iterator[ConfigError]:
    for service in spec.components:
        model = _options_of(graph, service.name)
        if model is None:
            continue
        from dynamo_local.components.openai import access  # Starlette, which a graph without a Frontend never needs

        try:
            settings = validate_section(model, service.name, service.config)
            access.check(settings, {**environ, **service.envs}, service.name)
        except ConfigError as error:
            yield error
    if config.host.metrics_api_key is not None:
        try:
            ApiKeys.load(parse_source(config.host.metrics_api_key), environ, option=f"{HOST}.metrics-api-key")
        except ConfigError as error:
            yield error


def _options_of(graph: LoadedGraph, name: str) -> type[FrontendConfig] | None:
    """The options of a service that is a Frontend of ours, or one of the user's on its options."""
    model: Any = graph.services[name].config_model
    return model if isinstance(model, type) and issubclass(model, FrontendConfig) else None
