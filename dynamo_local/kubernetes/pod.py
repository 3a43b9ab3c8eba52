"""Puts a planner in a pod together: the API server, the graph's sources, /metrics."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

from prometheus_client import generate_latest

from dynamo_local.arbiter.planner_options import prometheus_options
from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.core.types import Role
from dynamo_local.errors import ConfigError
from dynamo_local.kubernetes.api import ApiAway, ApiRefused, KubeApi
from dynamo_local.kubernetes.connector import KubernetesConnector
from dynamo_local.kubernetes.election import Election
from dynamo_local.kubernetes.observation import FrontendScrapes
from dynamo_local.kubernetes.official_client import connected, parent
from dynamo_local.kubernetes.options import PodOptions, expected_of
from dynamo_local.kubernetes.passes import HeardPasses, Registered, registered
from dynamo_local.kubernetes.planner import PodPlanner, tell
from dynamo_local.planner.prometheus import PrometheusTraffic
from dynamo_local.planner.sources import TrafficSource

# --- probed
# What the kubelet asks a planner's pod: `/live` and `/health`, on the port that Dynamo's operator probes.
#
# The operator's startup and liveness probes ask /live, which answers as long as the process does: a planner that
# holds
# since the API server is away is not helped by a restart. /health answers 503 until the planner has begun, and while
# its
# ticks fail.

LIVE, HEALTH = "/live", "/health"
PORT_VARIABLE = "DYN_SYSTEM_PORT"
PORT = 9090
"""Where the operator's probes ask; it sets the variable, too."""


def probes_app(health: Callable[[], str | None]) -> Any:
    """An ASGI application. `health` says why the planner is not healthy; None where it is."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked, read = scope["path"], scope["method"] in ("GET", "HEAD")
        why = health() if asked == HEALTH else None
        status = 404 if asked not in (LIVE, HEALTH) else 405 if not read else 200 if why is None else 503
        told: dict[str, str] = {"status": "healthy" if status == 200 else "unhealthy"}
        if status in (404, 405):
            told = {"error": f"there are only GET {LIVE} and GET {HEALTH}"}
        elif why is not None:
            told["reason"] = why
        body = json.dumps(told).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if status == 405:
            headers.append((b"allow", b"GET, HEAD"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    return app


log = logging.getLogger(__name__)

ANYWHERE = "0.0.0.0"
FRONTEND_PORT = 8000


async def started(options: PodOptions, identity: str) -> Callable[[], Awaitable[None]]:
    """Plans from now on, until what this returns is awaited. Raises `DynamoError`s fit for a person."""
    async with AsyncExitStack() as stack:
        transport = connected(options.kubeconfig)
        name, namespace = parent(os.environ.get, options.graph, options.namespace, transport.namespace)
        clock, api = AsyncioClock(), KubeApi(transport, namespace, name)
        expected = expected_of(options.planner)
        connector = KubernetesConnector(api, clock, expected, tell=tell)
        traffic = await _traffic(options, name, namespace, connector, clock, stack)
        planner = PodPlanner(
            options.planner,
            connector,
            Election(api, clock, lease_name(name, expected.only), identity),
            clock,
            options.logs,
            name=name,
            traffic=traffic,
            passes=await _passes(api, dynamo_namespace(options, name, namespace), connector, clock, stack),
        )
        await _serve_probes(planner, options.system_port, stack)
        stack.push_async_callback(planner.stop)
        await planner.start()
        if options.metrics_port:
            await _serve(metrics_of(planner), options.metrics_port, "Planner.metrics-port", stack)
        log.info("planning %s in namespace %s by %s", name, namespace, options.planner.policy)
        return stack.pop_all().aclose
    raise AssertionError("unreachable")


def lease_name(graph: str, only: Role | None = None) -> str:
    """The Lease by which one planner of the graph acts; planners of one role alone have one for each role."""
    return f"{graph}-dynamo-local-planner{'' if only is None else f'-{only}'}"


def dynamo_namespace(options: PodOptions, name: str, namespace: str) -> str:
    """The graph's namespace within Dynamo: as the operator tells its pods, else as it makes it."""
    return options.planner.namespace or os.environ.get("DYN_NAMESPACE") or f"{namespace}-{name}"


async def _traffic(
    options: PodOptions,
    name: str,
    namespace: str,
    connector: KubernetesConnector,
    clock: Clock,
    stack: AsyncExitStack,
) -> TrafficSource:
    prometheus = prometheus_options(options.planner, dynamo_namespace(options, name, namespace))
    if prometheus is not None:
        source = PrometheusTraffic(prometheus, clock)
        stack.push_async_callback(source.close)
        return source
    url = options.frontend or f"http://{name}-frontend:{FRONTEND_PORT}/metrics"
    keep_s = options.planner.throughput_adjustment_interval_seconds
    scrapes = FrontendScrapes(url, clock, connector.frontends, keep_s=keep_s)
    await scrapes.start()
    stack.push_async_callback(scrapes.close)
    return scrapes


async def _passes(
    api: KubeApi, dynamo: str, connector: KubernetesConnector, clock: Clock, stack: AsyncExitStack
) -> HeardPasses | None:
    async def look() -> Registered:
        return registered(await api.worker_metadata(), dynamo)

    url, nats = os.environ.get("NATS_SERVER"), None
    if url:
        from dynamo_local.transport.access import NatsAccess
        from dynamo_local.transport.nats import connect_nats

        nats = await connect_nats(url, NatsAccess.of(os.environ), name="dynamo-planner")
        stack.push_async_callback(nats.close)
    elif (why := await _unlisted(look)) is not None:
        log.warning("the engines' passes are not heard: NATS_SERVER is not set, and %s", why)
        return None
    heard = HeardPasses(clock, connector.pools)
    stack.push_async_callback(heard.close)
    await heard.follow(nats, dynamo, look)
    return heard


async def _unlisted(look: Callable[[], Awaitable[Registered]]) -> str | None:
    """Why it cannot be known where workers publish over ZeroMQ; None where it can, if not now."""
    try:
        await look()
    except ApiRefused as error:
        return str(error)
    except ApiAway:
        pass
    return None


async def _serve_probes(planner: PodPlanner, port: int | None, stack: AsyncExitStack) -> None:
    if port is None:
        told = os.environ.get(PORT_VARIABLE) or (str(PORT) if "KUBERNETES_SERVICE_HOST" in os.environ else "0")
        if not told.isdecimal():
            raise ConfigError(f"{PORT_VARIABLE} must be a port, or 0 for none, and not {told!r}")
        port = int(told)
    if port:
        await _serve(probes_app(planner.unhealthy), port, "Planner.system-port", stack)


def metrics_of(planner: PodPlanner) -> Any:
    """The application of its /metrics."""
    from dynamo_local.arbiter.exporter import metrics_app

    return metrics_app(lambda: generate_latest(planner.registry))


async def _serve(app: Any, port: int, option: str, stack: AsyncExitStack) -> None:
    from dynamo_local.components.openai.server import HttpServer, bind_socket

    server = HttpServer(app, bind_socket(ANYWHERE, port, option=option), idle=True)
    await server.start()
    stack.push_async_callback(server.stop)
