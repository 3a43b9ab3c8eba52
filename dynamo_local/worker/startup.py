"""The start of a worker before its component: connections, and clients of its dependencies."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from dynamo_local.sdk.loader import LoadedGraph
from dynamo_local.sdk.service import DynamoService
from dynamo_local.transport.etcd import EtcdStore
from dynamo_local.transport.lease import LeaseKeeper
from dynamo_local.transport.nats import close_quietly, connect_nats
from dynamo_local.transport.requests.client import DependencyClient
from dynamo_local.transport.requests.plane import RequestPlane
from dynamo_local.worker.context import Connections, Context, Identity

CONNECT_TIMEOUT_S = 60.0


async def connect(
    identity: Identity,
    stack: contextlib.AsyncExitStack,
    on_nats: Callable[[Any], Awaitable[None]],
    *,
    on_nats_closed: Callable[[], Awaitable[None]],
    waiting_for: Callable[[str], None],
) -> Connections:
    """NATS first, with which `on_nats` is awaited: from then on the control endpoint answers. Then etcd.

    `stack` closes each in the reverse order. `waiting_for` is called with what this waits for, in words. Raises
    `NatsUnavailable`, `EtcdUnavailable`.
    """
    push = stack.push_async_callback
    waiting_for("NATS")
    nats = await connect_nats(
        identity.nats_server,
        identity.nats_access,
        name=identity.watcher_name,
        timeout_s=CONNECT_TIMEOUT_S,
        on_closed=on_nats_closed,
    )
    push(close_quietly, nats)
    await on_nats(nats)
    waiting_for(f"etcd at {identity.etcd_endpoints}")
    kv = await EtcdStore.connect_when_up(identity.etcd_endpoints, CONNECT_TIMEOUT_S, access=identity.etcd_access)
    push(kv.close)
    plane = RequestPlane(nats)
    push(plane.close)
    await plane.start()
    return Connections(kv, nats, plane)


def dependency_clients(
    graph: LoadedGraph, service: DynamoService[Any], identity: Identity, connections: Connections
) -> dict[str, DependencyClient | None]:
    """Clients for the component's `depends(...)`, by attribute; None for an optional one that does not run."""

    def client_of(other: DynamoService[Any]) -> DependencyClient:
        methods = {declared.method: name for name, declared in other.endpoints.items()}
        return DependencyClient(connections.plane, connections.kv, identity.namespace, other.name, methods)

    bindings = graph.bindings(service.name)
    return {attribute: None if other is None else client_of(other) for attribute, other in bindings.items()}


def required(service: DynamoService[Any], clients: Mapping[str, DependencyClient | None]) -> list[DependencyClient]:
    """Those without which the component cannot serve."""
    depends = service.depends
    return [client for name, client in clients.items() if client is not None and not depends[name].optional]


def dynamo_context_of(context: Context, service: DynamoService[Any], lease: LeaseKeeper) -> dict[str, Any]:
    """The entries that Dynamo's graphs expect in `dynamo_context`."""
    return {
        "runtime": context,
        "component": context.component,
        "namespace": context.namespace,
        "service_name": service.name,
        "endpoints": list(service.endpoints),
        "lease": lease,
    }
