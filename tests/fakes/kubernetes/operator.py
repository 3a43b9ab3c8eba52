"""A stand-in for Dynamo's operator: reconciles the status of one graph, by the API alone, on the fake or a real server.

Pods become ready `start_s` after they were asked for, as long as there are `devices` for them; pods without one pend.
`leaves_s` is how long one takes to end. A scaling adapter's number is written to its component. `broken` components
never get ready, a `rollout` and that it `failed` are reported while they are set, and a stopped operator leaves the
status as it was.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from dynamo_local.clock import Clock
from dynamo_local.kubernetes.api import JSON_PATCH, MERGE_PATCH, ApiAway, Transport
from dynamo_local.kubernetes.manifests import ADAPTER_PLURAL, GRAPH_PLURAL, adapter_name

EVERY_S = 0.2
PENDS = float("inf")


@dataclass(slots=True)
class _Pods:
    ready_at: list[float] = field(default_factory=list)
    leaving_until: list[float] = field(default_factory=list)

    @property
    def held(self) -> int:
        return len(self.leaving_until) + sum(at_s < PENDS for at_s in self.ready_at)


class Operator:
    """Between `start` and `close`."""

    def __init__(
        self,
        transport: Transport,
        clock: Clock,
        graph: str,
        *,
        version: str = "v1beta1",
        start_s: float = 1.0,
        leaves_s: float = 0.4,
        devices: int = 64,
    ) -> None:
        self.start_s, self.leaves_s, self.devices = start_s, leaves_s, devices
        self.broken: set[str] = set()
        self.rollout: str | None = None
        self.failed = False
        self.stopped = False
        self.peak = 0
        """Workers that were there at once, at most; those that leave are counted, those that pend are not."""
        self.history: list[dict[str, int]] = []
        """The numbers asked for, whenever they changed."""
        self._transport = transport
        self._clock = clock
        self._graph = graph
        self._base = f"/apis/nvidia.com/{version}/namespaces/default"
        self._field = "components" if version == "v1beta1" else "services"
        self._pods: dict[str, _Pods] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.reconcile()
        self._task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await self._clock.sleep_until(self._clock.now_s() + EVERY_S)
            if not self.stopped:
                with suppress(ApiAway):  # it is tried again
                    await self.reconcile()

    async def reconcile(self) -> None:
        """Look at the graph and its adapters once, and write the status."""
        path = f"{self._base}/{GRAPH_PLURAL}/{self._graph}"
        answer = await self._transport.request("GET", path)
        if answer.status != 200:
            return
        graph = dict(answer.body)
        await self._adapted(path, graph)
        answer = await self._transport.request("GET", path)
        if answer.status != 200:
            return
        graph = dict(answer.body)
        await self._transport.request("PATCH", f"{path}/status", {"status": self._status(graph)}, content=MERGE_PATCH)

    async def _adapted(self, path: str, graph: dict[str, Any]) -> None:
        """Adapters that a component asks for are made; their numbers are the components'."""
        for pointer, name, one in _components(graph):
            if one.get("scalingAdapter") is None:
                continue
            adapter = adapter_name(self._graph, name)
            where = f"{self._base}/{ADAPTER_PLURAL}"
            answer = await self._transport.request("GET", f"{where}/{adapter}/scale")
            if answer.status == 404:
                continue
            wanted = answer.body["spec"].get("replicas", 0)
            if one.get("replicas", 1) != wanted:
                patch = [{"op": "add", "path": f"{pointer}/replicas", "value": wanted}]
                await self._transport.request("PATCH", path, patch, content=JSON_PATCH)

    def _status(self, graph: dict[str, Any]) -> dict[str, Any]:
        now_s, told = self._clock.now_s(), {}
        asked = {name: one.get("replicas", 1) for _, name, one in _components(graph)}
        if not self.history or self.history[-1] != asked:
            self.history.append(asked)
        self._place(asked, now_s)
        for name in asked:
            pods = self._pods[name]
            ready = 0 if name in self.broken else sum(at_s <= now_s for at_s in pods.ready_at)
            told[name] = {
                "componentKind": "Deployment",
                **({"componentName": name.lower()} if self._field == "services" else {}),
                "replicas": len(pods.ready_at),
                "updatedReplicas": len(pods.ready_at),
                "readyReplicas": ready,
                "availableReplicas": ready,
            }
        whole = all(counts["readyReplicas"] == asked[name] for name, counts in told.items())
        return {
            "state": "failed" if self.failed else "successful" if whole else "pending",
            "observedGeneration": graph["metadata"]["generation"],
            "conditions": [_ready(whole)],
            self._field: told,
            "rollingUpdate": {"phase": self.rollout} if self.rollout else None,
        }

    def _place(self, asked: dict[str, int], now_s: float) -> None:
        """Pods begin and end; those that pend get a device as soon as one is free."""
        for name, wanted in asked.items():
            pods = self._pods.setdefault(name, _Pods())
            pods.leaving_until = [until for until in pods.leaving_until if until > now_s]
            while len(pods.ready_at) > wanted:
                if pods.ready_at.pop() < PENDS:
                    pods.leaving_until.append(now_s + self.leaves_s)
            pods.ready_at += [PENDS] * (wanted - len(pods.ready_at))
        held = sum(_gpus(name) * pods.held for name, pods in self._pods.items())
        for name, pods in self._pods.items():
            for n, at_s in enumerate(pods.ready_at):
                if at_s == PENDS and held + _gpus(name) <= self.devices:
                    pods.ready_at[n] = now_s + self.start_s
                    held += _gpus(name)
        self.peak = max(self.peak, held)


def _ready(whole: bool) -> dict[str, Any]:
    """The condition that `kubectl wait` waits for."""
    told = {"type": "Ready", "status": "True" if whole else "False", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    return {**told, "reason": "all_resources_are_ready" if whole else "some_resources_are_not_ready", "message": ""}


def _components(graph: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    spec = graph["spec"]
    if "components" in spec:
        return [(f"/spec/components/{n}", one["name"], one) for n, one in enumerate(spec["components"])]
    return [(f"/spec/services/{name}", name, one) for name, one in spec.get("services", {}).items()]


def _gpus(name: str) -> int:
    return 0 if name in ("Frontend", "Planner") else 1
