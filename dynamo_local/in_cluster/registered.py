"""What the graph's workers tell of themselves, where Dynamo discovers them by Kubernetes: their engines' limits.

Each has an object `DynamoWorkerMetadata`, whose `spec.data` holds its endpoints and its model cards. The operator may
put a hash behind a worker's namespace within Dynamo, so that those of a rolling update are told apart. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dynamo_local.commands.dynamo_1x.cards import limits_of
from dynamo_local.planner.values.passes import Capabilities

WORKER_HASH = r"(-[0-9a-f]{8})?"
"""Of the workers' part of the graph's specification, behind its namespace."""


@dataclass(frozen=True, slots=True)
class Registered:
    """`namespaces` in which workers of the graph are; the limits of their engines, by Dynamo's name of the component.
    Workers of one component have the same; during a rolling update those of the newest hash seen last count."""

    namespaces: frozenset[str] = frozenset()
    limits: Mapping[str, Capabilities] = field(default_factory=dict)


def registered(objects: Iterable[Any], namespace: str) -> Registered:
    """Of these objects, those that belong to the graph with that namespace. What cannot be read is left out."""
    ours = re.compile(re.escape(namespace) + WORKER_HASH)
    namespaces, limits = set[str](), dict[str, Capabilities]()
    for entry in _entries(objects):
        where, component = entry.get("namespace"), entry.get("component")
        if not isinstance(where, str) or not isinstance(component, str) or ours.fullmatch(where) is None:
            continue
        namespaces.add(where)
        told = limits_of(json.dumps(entry).encode()) if "card_json" in entry else {}
        if told and component not in limits:
            limits[component] = Capabilities(
                max_num_batched_tokens=told["max_num_batched_tokens"],
                max_num_seqs=told["max_num_seqs"],
                max_kv_tokens=told["max_kv_tokens"],
                context_length=told["context_length"],
                dp_size=told["dp_size"] or 1,
            )
    return Registered(frozenset(namespaces), limits)


def _entries(objects: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    """Cards and endpoints of all objects."""
    for one in objects:
        data = _dict(_dict(_dict(one).get("spec")).get("data"))
        for kind in ("model_cards", "endpoints"):
            yield from map(_dict, _dict(data.get(kind)).values())


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
