"""Observes a graph for its planner in a pod: traffic from frontends' /metrics, and engines' passes and loads.

Every frontend behind a name is asked, and the counters are summed. The name of a Service leads to one pod at a time. So
with several frontends it must be a headless Service, with an address for each of them, or Prometheus is asked instead.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import zmq
import zmq.asyncio

from dynamo_local.clock import Clock, NowClock
from dynamo_local.components.commands.dynamo_1x_events import frontend_counters, limits_of
from dynamo_local.components.commands.metrics_text import Metrics
from dynamo_local.components.commands.probe import get_ok
from dynamo_local.components.commands.runner import ChildSilent
from dynamo_local.core.passes import ForwardPass
from dynamo_local.core.types import Load, Missing, Role
from dynamo_local.errors import DynamoError
from dynamo_local.planner.collector import Sampled
from dynamo_local.planner.sources import (
    SCRAPE_EVERY_S,
    STALE_AFTER_S,
    Counted,
    CounterHistory,
    PassTracker,
    ReadyWorker,
)
from dynamo_local.planner.values import Capabilities, Engines, EngineSeen, Traffic, WorkerPools
from dynamo_local.system.executors import ended
from dynamo_local.transport import passes as event_plane
from dynamo_local.transport.fpm import decode_pass
from dynamo_local.transport.nats import nats_call

log = logging.getLogger(__name__)

RESOLVE_S = 3.0


class FrontendScrapes:
    """The `TrafficSource` from `start` to `close`. `replicas` is how many frontends the graph asks for."""

    def __init__(self, url: str, clock: Clock, replicas: Callable[[], int], *, keep_s: float) -> None:
        self.url = url
        self._clock = clock
        self._replicas = replicas
        self._history = CounterHistory()
        self._history.keep_s = keep_s
        self._known: dict[str, float] = {}
        """Since when each address counts, as far as it was seen."""
        self._scraped = False
        self._asking = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        task, self._task = self._task, None
        await ended(task)

    async def traffic(self, window_s: float) -> Traffic | Missing:
        await self.scrape()
        return self._history.traffic(window_s, self._clock.now_s())

    async def _run(self) -> None:
        next_s = self._clock.now_s()
        while True:
            try:
                await self.scrape()
            except Exception:
                log.exception("counting the requests failed, and is tried again")
            next_s = max(next_s + SCRAPE_EVERY_S, self._clock.now_s())
            await self._clock.sleep_until(next_s)

    async def scrape(self) -> None:
        """Read all counters once."""
        async with self._asking:
            try:
                urls = await _addresses(self.url)
            except OSError as error:
                self._history.failed(f"{urlsplit(self.url).hostname} cannot be resolved: {error}")
                return
            if len(urls) == 1 and self._replicas() > 1:
                self._history.failed(
                    f"there are {self._replicas()} frontends, and {self.url} leads to one of them at a time: give a "
                    "headless Service, or metric_pulling_prometheus_endpoint"
                )
                return
            reported = await asyncio.gather(*(self._ask(url) for url in urls), return_exceptions=True)
            found = [one for one in reported if isinstance(one, Counted)]
            absent = [url for url, one in zip(urls, reported, strict=True) if not isinstance(one, Counted)]
            for one in reported:
                if isinstance(one, BaseException) and not isinstance(one, (ChildSilent, ValueError)):
                    raise one
            self._history.add(self._clock.now_s(), found, absent=absent)
            self._scraped = True

    async def _ask(self, url: str) -> Counted:
        counters = frontend_counters(Metrics(await get_ok(url)))
        began_s = self._clock.now_s() - SCRAPE_EVERY_S if self._scraped else -math.inf
        since_s = self._known.setdefault(url, began_s)
        return Counted(frontend=True, prefills=False, name=url, epoch=url, up_since_s=since_s, counters=counters)


async def _addresses(url: str) -> list[str]:
    """The same URL at each address of its name. Raises `OSError`."""
    parts = urlsplit(url)
    async with asyncio.timeout(RESOLVE_S):
        found = await asyncio.get_running_loop().getaddrinfo(
            parts.hostname or "", parts.port or 80, family=socket.AF_INET, type=socket.SOCK_STREAM
        )
    hosts = sorted({str(address[0]) for *_, address in found})
    return [urlunsplit(parts._replace(netloc=f"{host}:{parts.port or 80}")) for host in hosts]


# The policy `load` needs the load of each worker, from its engine's passes. A decode worker's KV use is the KV of its
# scheduled and queued requests, as a share of the capacity on its card. Requests for a prefill wait in the prefill
# engines themselves, because there is no queue beside them.


class LoadsOfPasses:
    """A `LoadSource` and a `QueueSource`. `ready` are the names by which its loads are known."""

    def __init__(self, heard: HeardPasses, pools: Callable[[], WorkerPools], clock: NowClock) -> None:
        self._heard = heard
        self._pools = pools
        self._clock = clock

    def ready(self) -> tuple[str, ...]:
        """Serving decode workers, with or without passes."""
        return tuple(self._of(self._pools().decode.component))

    async def loads(self) -> dict[str, Sampled[Load]]:
        """Workers whose passes arrived recently."""
        decode = self._pools().decode.component
        limits = self._heard.capabilities().get(decode)
        max_kv = None if limits is None else limits.max_kv_tokens
        now_s = self._clock.now_s()
        found = {name: _load(engines, max_kv) for name, engines in self._of(decode).items()}
        return {name: Sampled(load, now_s) for name, load in found.items() if load is not None}

    async def depth(self) -> Sampled[int] | Missing:
        """Requests in the queues of all prefill engines. Missing if one of them was silent."""
        prefill = self._pools().prefill
        if prefill is None:
            return Missing("the graph has no prefill component")
        waiting = 0
        for engines in self._of(prefill.component).values():
            for engine in engines:
                if isinstance(engine.last, Missing):
                    return engine.last
                waiting += engine.last.queued.num_prefill_requests
        return Sampled(waiting, self._clock.now_s())

    def _of(self, component: str) -> dict[str, list[EngineSeen]]:
        """The engines of a component, by worker."""
        found: dict[str, list[EngineSeen]] = {}
        for engine, seen in self._heard.seen().items():
            if seen.component == component:
                found.setdefault(engine.worker_id, []).append(seen)
        return found


def _load(engines: Iterable[EngineSeen], max_kv: int | None) -> Load | None:
    """The load of one worker, the mean of its ranks, which share nothing. None if one was silent."""
    kv = running = waiting = ranks = 0
    for engine in engines:
        if isinstance(engine.last, Missing):
            return None
        now, queued = engine.last.scheduled, engine.last.queued
        kv += now.sum_decode_kv_tokens + queued.sum_decode_kv_tokens
        running += now.num_decode_requests + now.num_prefill_requests
        waiting += queued.num_prefill_requests + queued.num_decode_requests
        ranks += 1
    usage: float | Missing = Missing("its card does not say how much KV it has")
    if max_kv:
        usage = min(1.0, kv / (max_kv * ranks))
    return Load(request_active_slots=running, num_requests_waiting=waiting, gpu_cache_usage_perc=usage)


# Where Dynamo discovers workers by Kubernetes, each has an object `DynamoWorkerMetadata`. Its `spec.data` holds
# endpoints, model cards and event channels: the limits of its engine, and the address of its passes over ZeroMQ. During
# a rolling update the operator may append a hash to a worker's namespace within Dynamo.

WORKER_HASH = r"(-[0-9a-f]{8})?"
"""A hash of the workers' part of the graph's specification, after its namespace."""
ADDRESS = re.compile(r"tcp://[][\w.:-]{1,255}:\d{1,5}", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class Channel:
    """A socket on which a worker of this component publishes its passes: `tcp://…`, as the worker says."""

    component: str
    address: str


@dataclass(frozen=True, slots=True)
class WorkerRegistrations:
    """The registrations of workers.

    `namespaces` are those with workers of the graph. `limits` are their engines', by Dynamo's name of the component.
    During a rolling update the newest hash counts. `channels` are those of workers whose event plane is ZeroMQ.
    """

    namespaces: frozenset[str] = frozenset()
    limits: Mapping[str, Capabilities] = field(default_factory=dict)
    channels: frozenset[Channel] = frozenset()


def registered(objects: Iterable[Any], namespace: str) -> WorkerRegistrations:
    """The registrations among these objects of the graph with that namespace. Unreadable ones are left out."""
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
        reported = limits_of(json.dumps(entry).encode()) if "card_json" in entry else {}
        if reported and component not in limits:
            limits[component] = Capabilities(
                max_num_batched_tokens=reported["max_num_batched_tokens"],
                max_num_seqs=reported["max_num_seqs"],
                max_kv_tokens=reported["max_kv_tokens"],
                context_length=reported["context_length"],
                dp_size=reported["dp_size"] or 1,
            )
    return WorkerRegistrations(frozenset(namespaces), limits, frozenset(channels))


def _entries(objects: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    """Cards, endpoints and event channels of all objects."""
    for one in objects:
        data = _dict(_dict(_dict(one).get("spec")).get("data"))
        for kind in ("model_cards", "endpoints", "event_channels"):
            yield from map(_dict, _dict(data.get(kind)).values())


def _scope(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """The place of namespace and component: the entry itself.

    After Dynamo 1.2 a channel has both in its `scope` or in the endpoint there.
    """
    scope = _dict(entry.get("scope"))
    return _dict(scope.get("endpoint")) or scope or entry


def _address(entry: Mapping[str, Any]) -> str | None:
    """A channel of passes over ZeroMQ that other pods can reach, else None."""
    transport = _dict(entry.get("transport"))
    address = _dict(transport.get("config")).get("endpoint")
    if entry.get("topic") != event_plane.TOPIC or transport.get("kind") != "Zmq" or not isinstance(address, str):
        return None
    return address if ADDRESS.fullmatch(address) else None


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


# Dynamo's event plane without NATS: each worker publishes its passes on a ZeroMQ socket of its own. We connect as
# workers register and disconnect as they go. ZeroMQ reconnects by itself, and an unreachable worker counts as silent.

log = logging.getLogger(__name__)

RETRY_MAX_MS = 2000


class PassSockets:
    """`heard` gets a worker's component and the payload of each of its messages, None for an invalid envelope."""

    def __init__(self, heard: Callable[[str, bytes | None], None]) -> None:
        self._heard = heard
        self._context: zmq.asyncio.Context | None = None
        self._listening: dict[Channel, asyncio.Task[None]] = {}

    def follow(self, channels: Iterable[Channel]) -> None:
        """Listen to exactly these from now on."""
        wanted = set(channels)
        for gone in self._listening.keys() - wanted:
            self._listening.pop(gone).cancel()
        if wanted and self._context is None:
            self._context = zmq.asyncio.Context()
        for channel in sorted(wanted - self._listening.keys()):
            assert self._context is not None
            try:
                socket = _connected(self._context, channel.address)
            except zmq.ZMQError as error:
                log.warning("the passes of a %s worker at %s: %s", channel.component, channel.address, error)
                continue  # the next look tries again
            self._listening[channel] = asyncio.create_task(self._listen(channel.component, socket))

    async def close(self) -> None:
        tasks = list(self._listening.values())
        self.follow(())
        await asyncio.gather(*tasks, return_exceptions=True)
        context, self._context = self._context, None
        if context is not None:
            context.destroy(linger=0)

    async def _listen(self, component: str, socket: zmq.asyncio.Socket) -> None:
        try:
            while True:
                self._heard(component, event_plane.unframe(await socket.recv_multipart()))
        finally:
            socket.close()


def _connected(context: zmq.asyncio.Context, address: str) -> zmq.asyncio.Socket:
    socket = context.socket(zmq.SUB)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, event_plane.MAX_EVENT_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RETRY_MAX_MS)
        socket.subscribe(b"")  # this topic alone
        socket.connect(address)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket


DYNAMOS_NAMES: Mapping[Role, str] = {Role.PREFILL: "prefill", Role.DECODE: "backend"}
"""The names under which Dynamo's vLLM workers register. An aggregated one is a `backend`, too."""
ROLES = {name: "prefill" if role is Role.PREFILL else "decode" for role, name in DYNAMOS_NAMES.items()}
"""The pool of a worker with that name."""
LOOK_EVERY_S = 10.0
"""The interval of reading registered workers."""


class HeardPasses:
    """The `PassSource`. `pools` counts the workers now."""

    def __init__(self, clock: Clock, pools: Callable[[], WorkerPools]) -> None:
        self._clock = clock
        self._pools = pools
        self._tracker = PassTracker()
        self._last: dict[str, dict[str, float]] = {}
        """When each worker was last heard, by role."""
        self.registered = WorkerRegistrations()
        """The registrations, as last read."""
        self._heard_in: dict[str, list[Any]] = {}
        self._sockets = PassSockets(self._took)
        self._following: asyncio.Task[None] | None = None
        self._trouble: str | None = None

    async def listen(self, nats: Any, namespace: str) -> None:
        """Subscribe to all workers of both roles in this namespace. Raises `NatsUnavailable`."""
        if namespace in self._heard_in:
            return
        subscriptions = self._heard_in[namespace] = []
        for component in ROLES:
            for subject in event_plane.subjects(namespace, component):
                with nats_call(nats, f"listen on {subject}"):
                    subscriptions.append(await nats.subscribe(subject, cb=self._callback(component)))

    async def follow(
        self, nats: Any | None, namespace: str, look: Callable[[], Awaitable[WorkerRegistrations]]
    ) -> None:
        """Listen there, and read registrations from now on. Without NATS listen to sockets only.

        Raises `NatsUnavailable`.
        """
        if nats is not None:
            await self.listen(nats, namespace)
        self._following = asyncio.ensure_future(self._follow(nats, namespace, look))

    async def close(self) -> None:
        task, self._following = self._following, None
        await ended(task)
        await self._sockets.close()

    async def _follow(
        self, nats: Any | None, namespace: str, look: Callable[[], Awaitable[WorkerRegistrations]]
    ) -> None:
        while True:
            try:
                found = await look()
                self.registered, self._trouble = found, None
                self._sockets.follow(channel for channel in found.channels if channel.component in ROLES)
                if nats is not None:
                    await self._listen_in(nats, found.namespaces | {namespace})
            except DynamoError as error:
                if self._trouble != str(error):
                    self._trouble = str(error)
                    log.warning("the engines' limits are not known (policies take Dynamo's defaults): %s", error)
            except Exception:
                log.exception("looking at the registered workers failed, and goes on")
            await self._clock.sleep_until(self._clock.now_s() + LOOK_EVERY_S)

    async def _listen_in(self, nats: Any, namespaces: frozenset[str]) -> None:
        """Listen in exactly these namespaces."""
        for where in sorted(namespaces):
            await self.listen(nats, where)
        for where in self._heard_in.keys() - namespaces:
            for subscription in self._heard_in.pop(where):
                with nats_call(nats, f"leave {where}"):
                    await subscription.unsubscribe()

    def _callback(self, component: str) -> Callable[[Any], Any]:
        async def heard(message: Any) -> None:
            self._took(component, event_plane.unseal(message.data))

        return heard

    def _took(self, component: str, payload: bytes | None) -> None:
        """A message of a worker of this component. None is an invalid envelope."""
        passed = None if payload is None else decode_pass(payload, asyncio.get_running_loop().time())
        if passed is not None:
            self.heard(ROLES[component], passed)

    def heard(self, role: str, passed: ForwardPass) -> None:
        """A pass, or a heartbeat."""
        worker = passed.engine.worker_id
        self._last.setdefault(role, {})[worker] = passed.at_s
        self._tracker.heard(worker, [passed])

    async def passes(self) -> Engines:
        """Empty without an event plane: then no engine is silent."""
        return self.seen() if self._heard_in or self.registered.channels else {}

    def seen(self) -> Engines:
        """Every ready engine, silent or not."""
        now_s, ready = self._clock.now_s(), list[ReadyWorker]()
        for role, pool in self._pools().by_role.items():
            last = {worker: s for worker, s in self._last.get(role, {}).items() if now_s - s <= 2 * STALE_AFTER_S}
            self._last[role] = last
            newest = sorted(last, key=lambda worker: -last[worker])[: pool.ready]
            ready += [ReadyWorker(worker, pool.component, worker) for worker in newest]
            silent = range(len(newest), pool.ready)
            ready += [ReadyWorker(f"{pool.component} (not heard, {n})", pool.component, f"{role}-{n}") for n in silent]
        return self._tracker.take(ready, now_s)

    def capabilities(self) -> Mapping[str, Capabilities]:
        """For an unregistered component policies take Dynamo's defaults."""
        names = {"prefill": DYNAMOS_NAMES[Role.PREFILL], "decode": DYNAMOS_NAMES[Role.DECODE]}
        limits, pools = self.registered.limits, self._pools().by_role.items()
        return {pool.component: limits[names[role]] for role, pool in pools if names[role] in limits}
