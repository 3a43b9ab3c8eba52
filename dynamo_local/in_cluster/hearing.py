"""Forward passes of the graph's engines, where their event plane is NATS (`NATS_SERVER`, as the operator sets it).

Each engine sends one a second even when it is idle, so those that were heard of late are those that serve. An engine
that is ready and was not heard is `Missing`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from dynamo_local.clock import Clock
from dynamo_local.core.types import Role
from dynamo_local.planner.sources.passes import STALE_AFTER_S, PassTracker, ReadyWorker
from dynamo_local.planner.values.passes import Capabilities, Engines, ForwardPass
from dynamo_local.planner.values.pools import WorkerPools
from dynamo_local.runtime.nats_errors import nats_call
from dynamo_local.runtime.passes import event_plane
from dynamo_local.runtime.passes.fpm import decode_pass

log = logging.getLogger(__name__)

DYNAMOS_NAMES: Mapping[Role, str] = {Role.PREFILL: "prefill", Role.DECODE: "backend"}
"""What Dynamo's vLLM workers register as; an aggregated one is a `backend`, too."""


class HeardPasses:
    """`PassSource`. `pools` counts the workers now."""

    def __init__(self, clock: Clock, pools: Callable[[], WorkerPools]) -> None:
        self._clock = clock
        self._pools = pools
        self._tracker = PassTracker()
        self._last: dict[str, dict[str, float]] = {}
        """When each worker was heard last, by role."""

    async def listen(self, nats: Any, namespace: str) -> None:
        """To all workers of both roles. Raises `NatsUnavailable`."""
        for role, component in DYNAMOS_NAMES.items():
            subject = event_plane.subject(namespace, component)
            with nats_call(nats, f"listen on {subject}"):
                await nats.subscribe(subject, cb=self._callback("prefill" if role is Role.PREFILL else "decode"))

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
        """See `PassSource`: nothing tells the limits here, so policies take Dynamo's defaults."""
        return self._tracker.capabilities()
