"""A graph on the fake API server, its operator, and a connector: on virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from dynamo_local.clock import AsyncioClock
from dynamo_local.core.types import Role
from dynamo_local.kubernetes.api import KubeApi
from dynamo_local.kubernetes.connector import KubernetesConnector
from dynamo_local.kubernetes.graph import Requirements
from tests.fakes.arbiter.told import Told
from tests.fakes.kubernetes.api_server import Kube
from tests.fakes.kubernetes.graphs import NAME, adapter, beta
from tests.fakes.kubernetes.operator import Operator

EXPECTED = Requirements(max_gpus=8, floors={Role.PREFILL: 1, Role.DECODE: 1}, prefill=True)


@dataclass(slots=True)
class Planned:
    """All of it, running."""

    kube: Kube
    operator: Operator
    connector: KubernetesConnector
    clock: AsyncioClock
    told: Told
    #: One entry for each time that the connector noticed somebody else's change.
    manual: list[bool]

    @property
    def graph(self) -> dict[str, Any]:
        return self.kube.objects["default", "dynamographdeployments", NAME]

    def asked(self) -> dict[str, int]:
        spec = self.graph["spec"]
        found = {one["name"]: one for one in spec["components"]} if "components" in spec else spec["services"]
        return {name: one.get("replicas", 1) for name, one in found.items() if name != "Frontend"}

    async def until(self, done: Callable[[], bool], within_s: float = 60.0) -> None:
        end_s = self.clock.now_s() + within_s
        while not done():
            assert self.clock.now_s() < end_s, f"not within {within_s:g} s"
            await self.clock.sleep_until(self.clock.now_s() + 0.1)

    async def settled(self) -> None:
        await self.until(self._reconciled)
        await self.connector.look()

    def _reconciled(self) -> bool:
        status, generation = self.graph["status"], self.graph["metadata"]["generation"]
        return status["state"] == "successful" and status["observedGeneration"] == generation

    def person(self, name: str, replicas: int) -> None:
        spec = self.graph["spec"]
        found = {one["name"]: one for one in spec["components"]} if "components" in spec else spec["services"]
        found[name]["replicas"] = replicas
        self.graph["metadata"]["generation"] += 1
        self.graph["metadata"]["resourceVersion"] = str(next(self.kube.counter))


@asynccontextmanager
async def planned(
    graph: dict[str, Any] | None = None, expected: Requirements = EXPECTED, *, ready: bool = True, **operator: Any
) -> AsyncIterator[Planned]:
    """Deployed, reconciled and, with `ready`, ready; adapters are made for components that ask for one."""
    graph = beta() if graph is None else graph
    version = graph["apiVersion"].partition("/")[2]
    kube, clock, told = Kube((version,)), AsyncioClock(), Told()
    admin = kube.client()
    base = f"/apis/nvidia.com/{version}/namespaces/default"
    assert (await admin.request("POST", f"{base}/dynamographdeployments", graph)).status == 201
    for one in graph["spec"].get("components", ()):
        if "scalingAdapter" in one:
            made = adapter(one["name"], one.get("replicas", 1))
            await admin.request("POST", f"{base}/dynamographdeploymentscalingadapters", made)
    manual: list[bool] = []
    works = Operator(admin, clock, NAME, version=version, **operator)
    connector = KubernetesConnector(
        KubeApi(kube.client(), "default", NAME), clock, expected, tell=told, on_manual=lambda: manual.append(True)
    )
    await works.start()
    world = Planned(kube, works, connector, clock, told, manual)
    try:
        if ready:
            await world.until(lambda: world.graph["status"]["state"] == "successful")
        await connector.start()
        connector.worker_pools()
        yield world
    finally:
        await connector.close()
        await works.close()
