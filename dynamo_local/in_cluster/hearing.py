"""Forward passes of the graph's engines, from their event plane: over NATS (`NATS_SERVER`, as the operator sets it),
and over the ZeroMQ sockets of workers that are registered on Kubernetes.

Each engine sends one a second even when it is idle, so those that were heard of late are those that serve. An engine
that is ready and was not heard is `Missing`. Where the workers are registered on Kubernetes (`registered`), their
engines' limits are known, too, and they are heard in all namespaces that a rolling update gives them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from dynamo_local.clock import Clock
from dynamo_local.core.types import Role
from dynamo_local.errors import DynamoError
from dynamo_local.in_cluster.registered import Registered
from dynamo_local.in_cluster.sockets import PassSockets
from dynamo_local.planner.sources.passes import STALE_AFTER_S, PassTracker, ReadyWorker
from dynamo_local.planner.values.passes import Capabilities, Engines, ForwardPass
from dynamo_local.planner.values.pools import WorkerPools
from dynamo_local.runtime.nats_errors import nats_call
from dynamo_local.runtime.passes import event_plane
from dynamo_local.runtime.passes.fpm import decode_pass
from dynamo_local.system.cancelling import ended

log = logging.getLogger(__name__)

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
