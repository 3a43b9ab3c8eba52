"""Puts a planner in a pod together: the API server, the graph's sources, /metrics."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from prometheus_client import generate_latest

from dynamo_local.autoscale.planner_options import prometheus_options
from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.in_cluster.frontends import FrontendScrapes
from dynamo_local.in_cluster.hearing import HeardPasses
from dynamo_local.in_cluster.options import PodOptions, expected_of
from dynamo_local.in_cluster.running import PodPlanner, tell
from dynamo_local.planner.connectors.kubernetes.api import KubeApi
from dynamo_local.planner.connectors.kubernetes.connector import KubernetesConnector
from dynamo_local.planner.connectors.kubernetes.electing import Election
from dynamo_local.planner.connectors.kubernetes.official import connected, parent
from dynamo_local.planner.sources import PassSource, TrafficSource
from dynamo_local.planner.sources.prometheus import PrometheusTraffic

log = logging.getLogger(__name__)

ANYWHERE = "0.0.0.0"
FRONTEND_PORT = 8000


async def started(options: PodOptions, identity: str) -> Callable[[], Awaitable[None]]:
    """Plans from now on, until what this returns is awaited. Raises `DynamoError`s fit for a person."""
    async with AsyncExitStack() as stack:
        transport = connected(options.kubeconfig)
        name, namespace = parent(os.environ.get, options.graph, options.namespace, transport.namespace)
        clock, api = AsyncioClock(), KubeApi(transport, namespace, name)
        connector = KubernetesConnector(api, clock, expected_of(options.planner), tell=tell)
        traffic = await _traffic(options, name, namespace, connector, clock, stack)
        planner = PodPlanner(
            options.planner,
            connector,
            Election(api, clock, lease_name(name), identity),
            clock,
            options.logs,
            name=name,
            traffic=traffic,
            passes=await _passes(dynamo_namespace(options, name, namespace), connector, clock, stack),
        )
        stack.push_async_callback(planner.stop)
        await planner.start()
        if options.metrics_port:
            await _serve(planner, options.metrics_port, stack)
        log.info("planning %s in namespace %s by %s", name, namespace, options.planner.policy)
        return stack.pop_all().aclose
    raise AssertionError("unreachable")


def lease_name(graph: str) -> str:
    """The Lease by which one planner of the graph acts."""
    return f"{graph}-dynamo-local-planner"


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
    dynamo: str, connector: KubernetesConnector, clock: Clock, stack: AsyncExitStack
) -> PassSource | None:
    url = os.environ.get("NATS_SERVER")
    if not url:
        log.info("NATS_SERVER is not set: the engines' passes are not heard")
        return None
    from dynamo_local.runtime.nats import connect_nats

    nats = await connect_nats(url)
    stack.push_async_callback(nats.close)
    heard = HeardPasses(clock, connector.pools)
    await heard.listen(nats, dynamo)
    return heard


async def _serve(planner: PodPlanner, port: int, stack: AsyncExitStack) -> None:
    from dynamo_local.components.openai.server import HttpServer, bind_socket
    from dynamo_local.telemetry.exporter import metrics_app

    app = metrics_app(lambda: generate_latest(planner.registry))
    server = HttpServer(app, bind_socket(ANYWHERE, port, option="Planner.metrics-port"), idle=True)
    await server.start()
    stack.push_async_callback(server.stop)
