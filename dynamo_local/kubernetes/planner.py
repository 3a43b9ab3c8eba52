"""A planner in a pod: its options, its probes, and its connector, election, sources and loop from start to end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from dynamo_local.arbiter.logged_decisions import LoggedDecisions, LoggedTicks
from dynamo_local.arbiter.planner_metrics import PlannerMetrics, PlannerNow
from dynamo_local.arbiter.planner_options import prometheus_options
from dynamo_local.arbiter.planner_report_schedule import ReportSchedule
from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.config.planner_section import own_names, planner_section
from dynamo_local.config.yaml_text import parse_mapping
from dynamo_local.core.notes import About
from dynamo_local.core.types import Load, Role
from dynamo_local.errors import ConfigError, DynamoError
from dynamo_local.kubernetes.api import ApiAway, ApiRefused, Conflict, KubeApi, NotThere, connected, parent
from dynamo_local.kubernetes.connector import KubernetesConnector
from dynamo_local.kubernetes.graph import Requirements
from dynamo_local.kubernetes.observation import (
    FrontendScrapes,
    HeardPasses,
    LoadsOfPasses,
    WorkerRegistrations,
    registered,
)
from dynamo_local.planner.choosing import policy_of
from dynamo_local.planner.collector import Collector, Sampled
from dynamo_local.planner.forecasting.answers import ArbiterForecaster, InlineForecaster
from dynamo_local.planner.loop import PlannerLoop, PlannerState
from dynamo_local.planner.policies.protocol import start_up_s
from dynamo_local.planner.prometheus import PrometheusTraffic
from dynamo_local.planner.records.decision_log import DecisionLog, decision_log_path
from dynamo_local.planner.records.ticks import TickLog, tick_log_path
from dynamo_local.planner.sources import TrafficSource
from dynamo_local.planner.values import WorkerPools
from dynamo_local.system.executors import ended

log = logging.getLogger(__name__)

# The election of the planner that acts: the one that holds a coordination Lease.
#
# No two clocks are compared. A lease has expired when it has not changed for its duration, on the reader's clock. The
# holder stops acting earlier, `RENEW_WITHIN_S` after its last renewal, before another planner may take the lease.

LEASE_S = 15
RENEW_WITHIN_S = 10.0
RENEW_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class HeldLease:
    """The lease as of its last change, and when that was seen (planner's clock)."""

    holder: str
    resource_version: str
    seen_s: float
    transitions: int = 0
    duration_s: float = LEASE_S


def looked(lease: Mapping[str, Any], known: HeldLease | None, now_s: float) -> HeldLease:
    """The lease, read now."""
    spec, version = lease.get("spec") or {}, lease["metadata"]["resourceVersion"]
    if known is not None and known.resource_version == version:
        return known
    return HeldLease(
        spec.get("holderIdentity") or "",
        version,
        now_s,
        int(spec.get("leaseTransitions") or 0),
        float(spec.get("leaseDurationSeconds") or LEASE_S),
    )


def may_take(held: HeldLease, own: str, now_s: float) -> bool:
    """Whether it is ours, nobody's, or expired."""
    return held.holder in ("", own) or now_s - held.seen_s > held.duration_s


def claimed(name: str, held: HeldLease | None, own: str, wall_s: float) -> dict[str, Any]:
    """The lease to write. Without `held` it is created."""
    now = datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    changes_hands = held is not None and held.holder != own
    spec: dict[str, Any] = {
        "holderIdentity": own,
        "leaseDurationSeconds": LEASE_S,
        "renewTime": now,
        "leaseTransitions": (0 if held is None else held.transitions) + changes_hands,
    }
    if held is None or changes_hands:
        spec["acquireTime"] = now
    metadata = {"name": name} if held is None else {"name": name, "resourceVersion": held.resource_version}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


def released(name: str, held: HeldLease) -> dict[str, Any]:
    """The released lease: the next planner need not wait."""
    spec = {"holderIdentity": "", "leaseDurationSeconds": 1, "leaseTransitions": held.transitions}
    metadata = {"name": name, "resourceVersion": held.resource_version}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}


class Election:
    """Runs from `start` to `close`.

    `on_change` is called with True when this planner begins to lead, with False when it stops.
    """

    def __init__(
        self,
        api: KubeApi,
        clock: Clock,
        name: str,
        identity: str,
        on_change: Callable[[bool], None] = lambda leads: None,
    ) -> None:
        self._on_change = on_change
        self.identity = identity
        self._api = api
        self._clock = clock
        self._name = name
        self._held: HeldLease | None = None
        self._renewed_s: float | None = None
        self._why = "it is not known yet which planner leads"
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Try for the first time, and go on. Raises `Forbidden`, which is final."""
        await self.renew()
        self._task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        """Release the lease, if it is ours. Closing twice is no error."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        is_leader, self._renewed_s = self.follows() is None, None
        if is_leader and self._held is not None:
            try:
                await self._give_back(self._held)
            except DynamoError as error:
                log.info("the lease was not given back, it expires: %s", error)

    async def _give_back(self, held: HeldLease) -> None:
        try:
            await self._api.replace_lease(released(self._name, held))
        except Conflict:  # the renewal that was cut short had arrived, or another planner has the lease
            now = looked(await self._api.lease(self._name), held, self._clock.now_s())
            if now.holder == self.identity:
                await self._api.replace_lease(released(self._name, now))

    def follows(self) -> str | None:
        """Why this planner may not act; None while it leads."""
        if self._renewed_s is None:
            return self._why
        if self._clock.now_s() - self._renewed_s > RENEW_WITHIN_S:
            return f"the lease {self._name} could not be renewed for {RENEW_WITHIN_S:g} s: {self._why}"
        return None

    async def _run(self) -> None:
        while True:
            await self._clock.sleep_until(self._clock.now_s() + RENEW_EVERY_S)
            try:
                await self.renew()
            except DynamoError as error:
                if self._renewed_s is not None and self.follows() is not None:
                    self._lost(f"its lease expired: {error}")
                self._why = str(error)
            except Exception:
                log.exception("the election failed, and goes on")

    async def renew(self) -> None:
        """Renew the lease, take it, or read its holder. Raises the API server's errors."""
        began_s, wall_s = self._clock.now_s(), self._clock.wall_s()
        try:
            self._held = looked(await self._api.lease(self._name), self._held, began_s)
        except NotThere:
            self._held = None
        if self._held is not None and not may_take(self._held, self.identity, began_s):
            self._lost(f"another planner leads ({self._held.holder}, lease {self._name})")
            return
        lease = claimed(self._name, self._held, self.identity, wall_s)
        write = self._api.create_lease if self._held is None else self._api.replace_lease
        try:
            self._held = looked(await write(lease), None, began_s)
        except Conflict:
            self._lost(f"another planner took the lease {self._name} first")
            return
        began, self._renewed_s = self.follows() is not None, began_s  # counted from before the request
        if began:
            log.info("this planner leads (%s, lease %s)", self.identity, self._name)
            self._on_change(True)

    def _lost(self, why: str) -> None:
        led, self._renewed_s, self._why = self._renewed_s is not None, None, why
        if led:
            log.warning("this planner leads no more: %s", why)
            self._on_change(False)


NO_PASSES = (
    "policy load goes by the load of each worker, which on Kubernetes follows from the engines' passes, and these are "
    "heard over NATS (NATS_SERVER is not set; the operator sets it where its platform has NATS) or on the sockets that "
    "workers tell in their DynamoWorkerMetadata (which cannot be listed here). slo, sla and throughput-load with "
    "optimization_target sla go by the traffic alone"
)


class PodPlanner:
    """Runs from `start` to `stop`. `registry` has the metrics of /metrics."""

    def __init__(
        self,
        options: PlannerConfig,
        connector: KubernetesConnector,
        election: Election,
        clock: Clock,
        logs: Path,
        *,
        name: str,
        traffic: TrafficSource | None,
        passes: HeardPasses | None = None,
        forecaster: ArbiterForecaster | InlineForecaster | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self.options = options
        self.loop: PlannerLoop | None = None
        self._connector = connector
        self._election = election
        self._clock = clock
        self._logs = logs
        self._name = name
        self._traffic = traffic
        self.passes = passes
        self._loads = None if passes is None else LoadsOfPasses(passes, connector.pools, clock)
        self._forecaster = forecaster or ArbiterForecaster()
        self._background: set[asyncio.Task[Any]] = set()
        self._logged: list[LoggedDecisions | LoggedTicks] = []
        self._reports: ReportSchedule | None = None
        self._gpu_hours, self._counted_s = 0.0, clock.now_s()

    async def start(self) -> None:
        """Check the graph, stand for election, and plan. Raises `GraphUnfit`, `Forbidden`, `ConfigError`."""
        options = self.options
        if self.options.policy == "load" and self._loads is None:
            raise ConfigError(NO_PASSES)
        await self._connector.start()
        pools = self._connector.pools()
        policy = await asyncio.to_thread(partial(policy_of, options, gpus=pools.gpus, start_up_s=start_up_s(pools)))
        await self._election.start()
        loop = self.loop = await self._made()
        loop.start(options, policy, no_operation=self.options.no_operation, paused=self._election.follows() is not None)
        if self._reports is not None:
            self._reports.began()
            self._run(self._reports.run())

    async def stop(self) -> None:
        """The present tick ends. The lease is released, so that another planner goes on at once."""
        if self.loop is not None:
            await asyncio.gather(self.loop.stop(), self._forecaster.close())
        await self._election.close()
        await self._connector.close()
        if self._reports is not None and self.loop is not None:
            self._reports.ended()
            await self._reports.close()
        await ended(*self._background)

    def lead(self, leads: bool) -> None:
        """Plan from now on, or only observe: for the election."""
        if self.loop is None or self.loop.state is PlannerState.STOPPED:
            return
        if leads:
            self.loop.resume()
        else:
            self.loop.pause()

    def on_manual_change(self) -> None:
        """Somebody else has changed the number of a component: the policy holds for a while."""
        if self.loop is not None:
            self.loop.on_manual_change()

    async def _made(self) -> PlannerLoop:
        await asyncio.to_thread(_made_folder, self._logs)
        decisions, ticks = decision_log_path(self._logs), tick_log_path(self._logs)
        logged = await asyncio.to_thread(LoggedDecisions, DecisionLog, decisions, self._run, tell)
        recorder = await asyncio.to_thread(LoggedTicks, TickLog, ticks, self._run, tell)
        self._logged = [logged, recorder]
        loads = self._loads if self.options.policy == "load" else None
        loop = PlannerLoop(
            _Graph(self._connector, loads, shaped=self.options.policy == "slo"),
            Collector(loads or _NoLoads(), self._queue(loads), self._clock, traffic=self._traffic, passes=self.passes),
            self._connector,
            self._clock,
            last_number=logged.log.last_seq,
            tell=tell,
            forecaster=self._forecaster,
            recorder=recorder,
        )
        metrics = PlannerMetrics(self.registry, self._now)
        loop.observers += [logged, metrics]
        self._reports = ReportSchedule(
            self._name,
            self._logs,
            self._clock,
            hours=lambda: self.options.report_interval_hours,
            written=self._written,
            tell=tell,
        )
        return loop

    def _queue(self, loads: LoadsOfPasses | None) -> LoadsOfPasses | None:
        return loads if self._connector.seen.prefill is not None else None

    def unhealthy(self) -> str | None:
        """Why this planner does not plan as it should. None if it does, or holds for a reason of its own."""
        if self.loop is None or self.loop.state is PlannerState.STOPPED:
            return "it has not begun yet"
        trouble = self.loop.trouble
        return trouble if trouble is not None and trouble.startswith("a tick failed") else None

    def _now(self) -> PlannerNow:
        loop = self.loop
        if loop is None:
            return PlannerNow()
        now_s = self._clock.now_s()
        held = self._connector.pools().gpus_spoken_for
        self._gpu_hours += held * (now_s - self._counted_s) / 3600
        self._counted_s = now_s
        return PlannerNow(loop.state, loop.counts, 0, loop.since_s, self._gpu_hours, fixed_fleet=loop.fixed_fleet)

    async def _written(self) -> None:
        for logged in self._logged:
            await logged.written()

    def _run(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def _made_folder(logs: Path) -> None:
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the folder {logs} of the planner's logs cannot be made: {error.strerror}") from error


class _Graph:
    """The loop's view of the graph: `loop.World`. With `shaped` the policy began with the graph's present roles."""

    def __init__(self, connector: KubernetesConnector, loads: LoadsOfPasses | None, *, shaped: bool) -> None:
        self._connector = connector
        self._loads = loads
        self._shaped = shaped
        self._disaggregated = connector.seen.prefill is not None

    def worker_pools(self) -> WorkerPools:
        return self._connector.worker_pools()

    def ready(self) -> tuple[str, ...]:
        return () if self._loads is None else self._loads.ready()

    def blind(self) -> str | None:
        if self._shaped and self._disaggregated is not (self._connector.seen.prefill is not None):
            was = "had" if self._disaggregated else "had no"
            return f"the graph {was} prefill workers when the policy slo began: restart this planner"
        return self._connector.blind()


class _NoLoads:
    """No loads: only the policy `load` needs those of single workers."""

    async def loads(self) -> dict[str, Sampled[Load]]:
        return {}


def tell(text: str, about: About = None) -> None:
    """The pod's log has it."""
    log.warning("%s", text)


KUBERNETES = "kubernetes"
METRICS_PORT = 9085
PORT_OPTION = "metric_reporting_prometheus_port"
"""Dynamo's name in its configuration. 0 is none."""
PORT_VARIABLE = "PLANNER_PROMETHEUS_PORT"
DYNAMOS_POLICY = "throughput-load"
"""The policy of Dynamo's own planner. A file for that planner names no policy."""


@dataclass(frozen=True, slots=True)
class PodOptions:
    """`planner` is the section `Planner`, the rest is about the pod. None: as found there. Port 0: none."""

    planner: PlannerConfig
    metrics_port: int = METRICS_PORT
    system_port: int | None = None
    graph: str | None = None
    namespace: str | None = None
    kubeconfig: Path | None = None
    frontend: str | None = None
    logs: Path = Path("planner_logs")


def read_config(text: str | None, given: Mapping[str, Any]) -> tuple[PlannerConfig, int]:
    """The section, and the port of /metrics. Raises `ConfigError` that names the option.

    `text` is a file (YAML, JSON) or JSON itself, as Dynamo's planner takes it. `given` goes over it.
    """
    found = {} if text is None else _mapping(text)
    values = {**{key.replace("-", "_"): value for key, value in found.items()}, **given}
    port = values.pop(PORT_OPTION, os.environ.get(PORT_VARIABLE, METRICS_PORT))
    try:
        metrics_port = int(port)
    except (TypeError, ValueError):
        raise ConfigError(f"{PORT_OPTION} must be a port, or 0 for none, and not {port!r}") from None
    environment = values.setdefault("environment", KUBERNETES)
    if environment != KUBERNETES:
        raise ConfigError(
            f"environment is {environment!r}: a planner by itself plans a graph on Kubernetes; a graph of this host "
            "has its planner in its arbiter (`dynamo planner start`)"
        )
    values.setdefault("policy", DYNAMOS_POLICY)
    config = planner_section("--config", own_names("--config", values, str(values["policy"])))
    return config, metrics_port


def _mapping(text: str) -> dict[str, Any]:
    what = "--config"
    if not text.lstrip().startswith("{"):
        what = f"--config {text}"
        try:
            text = Path(text).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ConfigError(f"{what} cannot be read: {why}") from None
    found = parse_mapping(text, what, what="the planner's options by name")
    section = found.get("Planner", found)
    if not isinstance(section, dict):
        raise ConfigError(f"{what} must hold the planner's options by name")
    return section


def expected_of(config: PlannerConfig) -> Requirements:
    """The requirements of these options for the graph."""

    def floor(own: int | None) -> int:
        return config.min_endpoint if own is None else own

    mode = config.mode if config.policy == "throughput-load" else None
    disaggregated = True if config.policy == "sla" or mode == "disagg" else False if mode == "agg" else None
    return Requirements(
        max_gpus=config.max_gpu_budget,
        floors={Role.PREFILL: floor(config.prefill_min_endpoint), Role.DECODE: floor(config.decode_min_endpoint)},
        model=config.served_model_name,
        gpus={Role.PREFILL: config.prefill_engine_num_gpu, Role.DECODE: config.decode_engine_num_gpu},
        prefill=disaggregated,
        only={"prefill": Role.PREFILL, "decode": Role.DECODE}.get(mode or ""),
    )


# The operator's startup and liveness probes ask /live, which answers as long as the process runs. A restart does not
# help a planner that waits for the API server. /health answers 503 until the planner has begun, and while its ticks
# fail.

LIVE, HEALTH = "/live", "/health"
SYSTEM_PORT_VARIABLE = "DYN_SYSTEM_PORT"
PORT = 9090
"""The port that the operator's probes ask. The operator sets the variable, too."""


def probes_app(health: Callable[[], str | None]) -> Any:
    """An ASGI application. `health` says why the planner is not healthy, or None."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        requested, read = scope["path"], scope["method"] in ("GET", "HEAD")
        why = health() if requested == HEALTH else None
        status = 404 if requested not in (LIVE, HEALTH) else 405 if not read else 200 if why is None else 503
        answer: dict[str, str] = {"status": "healthy" if status == 200 else "unhealthy"}
        if status in (404, 405):
            answer = {"error": f"there are only GET {LIVE} and GET {HEALTH}"}
        elif why is not None:
            answer["reason"] = why
        body = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if status == 405:
            headers.append((b"allow", b"GET, HEAD"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    return app


ANYWHERE = "0.0.0.0"
FRONTEND_PORT = 8000


async def started(options: PodOptions, identity: str) -> Callable[[], Awaitable[None]]:
    """Start planning. The returned coroutine function stops it. Raises `DynamoError`s for people."""
    async with AsyncExitStack() as stack:
        transport = connected(options.kubeconfig)
        name, namespace = parent(os.environ.get, options.graph, options.namespace, transport.namespace)
        clock, api = AsyncioClock(), KubeApi(transport, namespace, name)
        expected = expected_of(options.planner)
        election = Election(
            api, clock, lease_name(name, expected.only), identity, on_change=lambda leads: planner.lead(leads)
        )
        connector = KubernetesConnector(
            api, clock, expected, tell=tell, follows=election.follows, on_manual=lambda: planner.on_manual_change()
        )
        traffic = await _traffic(options, name, namespace, connector, clock, stack)
        planner = PodPlanner(
            options.planner,
            connector,
            election,
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
    """The name of the Lease by which one planner of the graph acts. Planners of one role have one for each role."""
    return f"{graph}-dynamo-local-planner{'' if only is None else f'-{only}'}"


def dynamo_namespace(options: PodOptions, name: str, namespace: str) -> str:
    """The graph's namespace within Dynamo: as the operator tells its pods, else as the operator makes it."""
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
    async def look() -> WorkerRegistrations:
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


async def _unlisted(look: Callable[[], Awaitable[WorkerRegistrations]]) -> str | None:
    """Why the addresses of workers' ZeroMQ sockets cannot be known. None if they can, now or later."""
    try:
        await look()
    except ApiRefused as error:
        return str(error)
    except ApiAway:
        pass
    return None


async def _serve_probes(planner: PodPlanner, port: int | None, stack: AsyncExitStack) -> None:
    if port is None:
        text = os.environ.get(SYSTEM_PORT_VARIABLE) or (str(PORT) if "KUBERNETES_SERVICE_HOST" in os.environ else "0")
        if not text.isdecimal():
            raise ConfigError(f"{SYSTEM_PORT_VARIABLE} must be a port, or 0 for none, and not {text!r}")
        port = int(text)
    if port:
        await _serve(probes_app(planner.unhealthy), port, "Planner.system-port", stack)


def metrics_of(planner: PodPlanner) -> Any:
    from dynamo_local.arbiter.exporter import metrics_app

    return metrics_app(lambda: generate_latest(planner.registry))


async def _serve(app: Any, port: int, option: str, stack: AsyncExitStack) -> None:
    from dynamo_local.components.openai.server import HttpServer, bind_socket

    server = HttpServer(app, bind_socket(ANYWHERE, port, option=option), idle=True)
    await server.start()
    stack.push_async_callback(server.stop)
