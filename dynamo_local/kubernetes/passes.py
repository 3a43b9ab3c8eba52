"""Forward passes of the graph's engines, from their event plane: over NATS (`NATS_SERVER`, as the operator sets it),
and over the ZeroMQ sockets of workers that are registered on Kubernetes.

Each engine sends one a second even when it is idle, so those that were heard of late are those that serve. An engine
that is ready and was not heard is `Missing`. Where the workers are registered on Kubernetes (`registered`), their
engines' limits are known, too, and they are heard in all namespaces that a rolling update gives them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import zmq
import zmq.asyncio

from dynamo_local.clock import Clock
from dynamo_local.components.commands.dynamo_1x_events import limits_of
from dynamo_local.core.passes import ForwardPass
from dynamo_local.core.types import Role
from dynamo_local.errors import DynamoError
from dynamo_local.planner.sources import STALE_AFTER_S, PassTracker, ReadyWorker
from dynamo_local.planner.values import Capabilities, Engines, WorkerPools
from dynamo_local.system.executors import ended
from dynamo_local.transport import passes as event_plane
from dynamo_local.transport.fpm import decode_pass
from dynamo_local.transport.nats import nats_call

# --- registered
# What the graph's workers tell of themselves, where Dynamo discovers them by Kubernetes: their engines' limits, and
# where they publish their passes over ZeroMQ.
#
# Each has an object `DynamoWorkerMetadata`, whose `spec.data` holds its endpoints, its model cards and its event
# channels. The operator may put a hash behind a worker's namespace within Dynamo, so that those of a rolling update
# are
# told apart. Pure.

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


# --- sockets
# ZeroMQ sockets on which workers publish their passes, one for each: Dynamo's event plane where it is not NATS.
#
# They are connected as workers register, and left as those go. ZeroMQ tries by itself again and again: a worker that
# cannot be reached from here is not heard, which is told of its engine.

log = logging.getLogger(__name__)

RETRY_MAX_MS = 2000


class PassSockets:
    """`heard` gets a worker's component and the payload of each of its messages, None for what was no envelope."""

    def __init__(self, heard: Callable[[str, bytes | None], None]) -> None:
        self._heard = heard
        self._context: zmq.asyncio.Context | None = None
        self._listening: dict[Channel, asyncio.Task[None]] = {}

    def follow(self, channels: Iterable[Channel]) -> None:
        """Listen to these from now on, and to no others."""
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
                continue  # it is tried again at the next look
            self._listening[channel] = asyncio.create_task(self._listen(channel.component, socket))

    async def close(self) -> None:
        """Closing twice is no error."""
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
        socket.subscribe(b"")  # it has this topic alone
        socket.connect(address)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket


DYNAMOS_NAMES: Mapping[Role, str] = {Role.PREFILL: "prefill", Role.DECODE: "backend"}
"""What Dynamo's vLLM workers register as; an aggregated one is a `backend`, too."""
ROLES = {name: "prefill" if role is Role.PREFILL else "decode" for role, name in DYNAMOS_NAMES.items()}
"""The pool to which a worker of that name belongs."""
LOOK_EVERY_S = 10.0
"""Workers that are registered are looked at so often."""


class HeardPasses:
    """`PassSource`. `pools` counts the workers now."""

    def __init__(self, clock: Clock, pools: Callable[[], WorkerPools]) -> None:
        self._clock = clock
        self._pools = pools
        self._tracker = PassTracker()
        self._last: dict[str, dict[str, float]] = {}
        """When each worker was heard last, by role."""
        self.registered = Registered()
        """Whoever is, as last seen."""
        self._heard_in: dict[str, list[Any]] = {}
        self._sockets = PassSockets(self._took)
        self._following: asyncio.Task[None] | None = None
        self._trouble: str | None = None

    async def listen(self, nats: Any, namespace: str) -> None:
        """To all workers of both roles in this namespace. Raises `NatsUnavailable`."""
        if namespace in self._heard_in:
            return
        subscriptions = self._heard_in[namespace] = []
        for component in ROLES:
            for subject in event_plane.subjects(namespace, component):
                with nats_call(nats, f"listen on {subject}"):
                    subscriptions.append(await nats.subscribe(subject, cb=self._callback(component)))

    async def follow(self, nats: Any | None, namespace: str, look: Callable[[], Awaitable[Registered]]) -> None:
        """Listen there (without NATS only to sockets), and look from now on at who is registered, and where. Raises
        `NatsUnavailable`."""
        if nats is not None:
            await self.listen(nats, namespace)
        self._following = asyncio.ensure_future(self._follow(nats, namespace, look))

    async def close(self) -> None:
        """Look no more, and leave the sockets. Closing twice is no error."""
        task, self._following = self._following, None
        await ended(task)
        await self._sockets.close()

    async def _follow(self, nats: Any | None, namespace: str, look: Callable[[], Awaitable[Registered]]) -> None:
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
                log.exception("looking at the registered workers failed; it goes on")
            await self._clock.sleep_until(self._clock.now_s() + LOOK_EVERY_S)

    async def _listen_in(self, nats: Any, namespaces: frozenset[str]) -> None:
        """In these, and in no others any more."""
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
        """What a worker of this component published; None: it was no envelope."""
        passed = None if payload is None else decode_pass(payload, asyncio.get_running_loop().time())
        if passed is not None:
            self.heard(ROLES[component], passed)

    def heard(self, role: str, passed: ForwardPass) -> None:
        """A pass, or a heartbeat."""
        worker = passed.engine.worker_id
        self._last.setdefault(role, {})[worker] = passed.at_s
        self._tracker.heard(worker, [passed])

    async def passes(self) -> Engines:
        """See `PassSource`. None at all while there is no event plane to listen to: then nobody is silent."""
        return self.seen() if self._heard_in or self.registered.channels else {}

    def seen(self) -> Engines:
        """Every engine that is ready, heard or not."""
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
        """See `PassSource`. Of a component that nobody has registered policies take Dynamo's defaults."""
        names = {"prefill": DYNAMOS_NAMES[Role.PREFILL], "decode": DYNAMOS_NAMES[Role.DECODE]}
        limits, pools = self.registered.limits, self._pools().by_role.items()
        return {pool.component: limits[names[role]] for role, pool in pools if names[role] in limits}
