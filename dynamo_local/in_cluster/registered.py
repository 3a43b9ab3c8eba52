"""What the graph's workers tell of themselves, where Dynamo discovers them by Kubernetes: their engines' limits, and
where they publish their passes over ZeroMQ.

Each has an object `DynamoWorkerMetadata`, whose `spec.data` holds its endpoints, its model cards and its event
channels. The operator may put a hash behind a worker's namespace within Dynamo, so that those of a rolling update are
told apart. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from dynamo_local.commands.dynamo_1x.cards import limits_of
from dynamo_local.planner.values.passes import Capabilities
from dynamo_local.runtime.passes import event_plane

WORKER_HASH = r"(-[0-9a-f]{8})?"
"""Of the workers' part of the graph's specification, behind its namespace."""
ADDRESS = re.compile(r"tcp://[][\w.:-]{1,255}:\d{1,5}", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Channel:
    """A socket on which a worker of this component publishes its passes: `tcp://…`, as it told its address."""

    component: str
    address: str


@dataclass(frozen=True, slots=True)
class Registered:
    """`namespaces` in which workers of the graph are; the limits of their engines, by Dynamo's name of the component.
    Workers of one component have the same; during a rolling update those of the newest hash seen last count.
    `channels` are those of workers whose event plane is ZeroMQ."""

    namespaces: frozenset[str] = frozenset()
    limits: Mapping[str, Capabilities] = field(default_factory=dict)
    channels: frozenset[Channel] = frozenset()


def registered(objects: Iterable[Any], namespace: str) -> Registered:
    """Of these objects, those that belong to the graph with that namespace. What cannot be read is left out."""
    ours = re.compile(re.escape(namespace) + WORKER_HASH)
    namespaces, limits, channels = set[str](), dict[str, Capabilities](), set[Channel]()
    for entry in _entries(objects):
        scope = _scope(entry)
        where, component = scope.get("namespace"), scope.get("component")
        if not isinstance(where, str) or not isinstance(component, str) or ours.fullmatch(where) is None:
            continue
        namespaces.add(where)
        if (address := _address(entry)) is not None:
            channels.add(Channel(component, address))
        told = limits_of(json.dumps(entry).encode()) if "card_json" in entry else {}
        if told and component not in limits:
            limits[component] = Capabilities(
                max_num_batched_tokens=told["max_num_batched_tokens"],
                max_num_seqs=told["max_num_seqs"],
                max_kv_tokens=told["max_kv_tokens"],
                context_length=told["context_length"],
                dp_size=told["dp_size"] or 1,
            )
    return Registered(frozenset(namespaces), limits, frozenset(channels))


def _entries(objects: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    """Cards, endpoints and event channels of all objects."""
    for one in objects:
        data = _dict(_dict(_dict(one).get("spec")).get("data"))
        for kind in ("model_cards", "endpoints", "event_channels"):
            yield from map(_dict, _dict(data.get(kind)).values())


def _scope(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where namespace and component stand: in the entry itself; after Dynamo 1.2 those of a channel in its `scope`, or
    in the endpoint there."""
    scope = _dict(entry.get("scope"))
    return _dict(scope.get("endpoint")) or scope or entry


def _address(entry: Mapping[str, Any]) -> str | None:
    """Of a channel of passes over ZeroMQ that other pods can reach; None for whatever else it is."""
    transport = _dict(entry.get("transport"))
    address = _dict(transport.get("config")).get("endpoint")
    if entry.get("topic") != event_plane.TOPIC or transport.get("kind") != "Zmq" or not isinstance(address, str):
        return None
    return address if ADDRESS.fullmatch(address) else None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
