"""The observation of a planner in the arbiter, made in a test's own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from dynamo_local.arbiter.planner_observation import ObservationSources
from dynamo_local.clock import AsyncioClock
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.fleet.fleet import Fleet, Worker
from dynamo_local.core.types import GraphSpec, Missing, Role, ServiceSpec, WorkerState
from dynamo_local.planner.sources import SCRAPE_EVERY_S
from dynamo_local.planner.values import Engines, Traffic
from dynamo_local.transport.access import NatsAccess
from dynamo_local.transport.nats import close_quietly, connect_nats
from tests.drivers.served import Served

NATIVE = {"Frontend": Role.FRONTEND, "VllmWorker": Role.DECODE, "PrefillWorker": Role.PREFILL}


class SeenFleet:
    """The ready workers of a graph; `look` brings them up to date."""

    def __init__(self, served: Served, roles: dict[str, Role]) -> None:
        self._served = served
        self._roles = roles
        self.fleet = Fleet(served.namespace, ())
        self.look()

    def look(self) -> None:
        workers = [w for w in self._served.status()["workers"] if w["component"] in self._roles]
        self.fleet = Fleet(self._served.namespace, (), {w["watcher_name"]: self._worker(w) for w in workers})

    def _worker(self, shown: dict[str, Any]) -> Worker:
        component = shown["component"]
        state = WorkerState(shown["state"])
        return Worker(shown["watcher_name"], component, self._roles[component], 0, state).changed(lease=shown["lease"])


@asynccontextmanager
async def observing(
    served: Served, roles: dict[str, Role] | None = None, *, runtime: str | None = None, counting: bool = False
) -> AsyncIterator[tuple[ObservationSources, SeenFleet]]:
    """`ObservationSources` over the graph's own NATS. `counting`: as for a policy that goes by the traffic."""
    env = served.environment()
    nats = await connect_nats(env["NATS_SERVER"], NatsAccess.of(env), name="a planner")
    roles = roles or NATIVE
    fleet = SeenFleet(served, roles)
    graph = GraphSpec(
        served.namespace, "graph.yaml", tuple(ServiceSpec(name, role, runtime=runtime) for name, role in roles.items())
    )

    def background(work: Coroutine[Any, Any, None]) -> None:
        work.close()

    links: Any = SimpleNamespace(nats=nats)
    controller: Any = fleet
    made = ObservationSources(
        lambda: graph, controller, links, AsyncioClock(), background, lambda text, about=None: None
    )
    made.follow(PlannerConfig(policy="throughput-load" if counting else "load"))
    try:
        yield made, fleet
    finally:
        made.close()
        await close_quietly(nats)


async def counted(observed: ObservationSources, since_s: float, within_s: float = 60.0) -> Traffic:
    """The traffic of a window that began then at the latest."""
    async with asyncio.timeout(within_s):
        while True:
            window_s = max(0.1, asyncio.get_running_loop().time() - since_s) + SCRAPE_EVERY_S / 2
            traffic = await observed.traffic(window_s)
            if isinstance(traffic, Traffic):
                return traffic
            await asyncio.sleep(0.2)


async def all_seen(observed: ObservationSources, engines: int, within_s: float = 60.0) -> Engines:
    """The engines, once there are so many, and something is known of each."""
    found: Engines = {}
    try:
        async with asyncio.timeout(within_s):
            while len(found) != engines or any(isinstance(seen.last, Missing) for seen in found.values()):
                await asyncio.sleep(0.2 if found else 0.0)
                found = await observed.passes()
    except TimeoutError:
        raise AssertionError(found) from None
    return found
