"""In which order the components of one process start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dynamo_local.errors import ConfigError
from dynamo_local.sdk.loader import LoadedGraph
from dynamo_local.sdk.service import DynamoService


def in_order(graph: LoadedGraph, names: Sequence[str]) -> tuple[DynamoService[Any], ...]:
    """Those services, each after the others that it calls. Raises `ConfigError` for a name that is none."""
    found: dict[str, DynamoService[Any]] = {}

    def add(name: str) -> None:
        if name in found or name in under_way:
            return
        under_way.add(name)
        if name not in graph.services:
            raise ConfigError(f"{graph.target} has no service {name!r}; it has: {', '.join(graph.services)}")
        for other in graph.bindings(name).values():
            if other is not None and other.name in names:
                add(other.name)
        found[name] = graph.services[name]

    under_way: set[str] = set()
    for name in names:
        add(name)
    return tuple(found.values())
