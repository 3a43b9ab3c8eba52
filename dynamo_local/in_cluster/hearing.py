"""Forward passes of the graph's engines, where their event plane is NATS (`NATS_SERVER`, as the operator sets it).

Each engine sends one a second even when it is idle, so those that were heard of late are those that serve. An engine
that is ready and was not heard is `Missing`. Where the workers are registered on Kubernetes (`registered`), their
engines' limits are known, and they are heard in all namespaces that a rolling update gives them.
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
from dynamo_local.planner.sources.passes import STALE_AFTER_S, PassTracker, ReadyWorker
from dynamo_local.planner.values.passes import Capabilities, Engines, ForwardPass
from dynamo_local.planner.values.pools import WorkerPools
from dynamo_local.runtime.nats_errors import nats_call
from dynamo_local.runtime.passes import event_plane
from dynamo_local.runtime.passes.fpm import decode_pass

log = logging.getLogger(__name__)

DYNAMOS_NAMES: Mapping[Role, str] = {Role.PREFILL: "prefill", Role.DECODE: "backend"}
"""What Dynamo's vLLM workers register as; an aggregated one is a `backend`, too."""
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
        self._following: asyncio.Task[None] | None = None
        self._trouble: str | None = None

    async def listen(self, nats: Any, namespace: str) -> None:
        """To all workers of both roles in this namespace. Raises `NatsUnavailable`."""
        if namespace in self._heard_in:
            return
        subscriptions = self._heard_in[namespace] = []
        for role, component in DYNAMOS_NAMES.items():
            subject = event_plane.subject(namespace, component)
            callback = self._callback("prefill" if role is Role.PREFILL else "decode")
            with nats_call(nats, f"listen on {subject}"):
                subscriptions.append(await nats.subscribe(subject, cb=callback))

    async def follow(self, nats: Any, namespace: str, look: Callable[[], Awaitable[Registered]]) -> None:
        """Listen there, and look from now on at who is registered, and where. Raises `NatsUnavailable`."""
        await self.listen(nats, namespace)
        self._following = asyncio.ensure_future(self._follow(nats, namespace, look))

    async def close(self) -> None:
        """Look no more. Closing twice is no error."""
        task, self._following = self._following, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _follow(self, nats: Any, namespace: str, look: Callable[[], Awaitable[Registered]]) -> None:
        while True:
            try:
                found = await look()
                self.registered, self._trouble = found, None
                for where in sorted(found.namespaces):
                    await self.listen(nats, where)
                for where in self._heard_in.keys() - found.namespaces - {namespace}:
                    for subscription in self._heard_in.pop(where):
                        with nats_call(nats, f"leave {where}"):
                            await subscription.unsubscribe()
            except DynamoError as error:
                if self._trouble != str(error):
                    self._trouble = str(error)
                    log.warning("the engines' limits are not known (policies take Dynamo's defaults): %s", error)
            except Exception:
                log.exception("looking at the registered workers failed; it goes on")
            await self._clock.sleep_until(self._clock.now_s() + LOOK_EVERY_S)

    def _callback(self, role: str) -> Callable[[Any], Any]:
        async def heard(message: Any) -> None:
            payload = event_plane.unseal(message.data)
            passed = None if payload is None else decode_pass(payload, asyncio.get_running_loop().time())
            if passed is not None:
                self.heard(role, passed)

        return heard

    def heard(self, role: str, passed: ForwardPass) -> None:
        """A pass, or a heartbeat."""
        worker = passed.engine.worker_id
        self._last.setdefault(role, {})[worker] = passed.at_s
        self._tracker.heard(worker, [passed])

    async def passes(self) -> Engines:
        """See `PassSource`."""
        return self.seen()

    def seen(self) -> Engines:
        """The same."""
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
