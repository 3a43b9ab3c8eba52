"""A graph on an API server, its operator and its clients; and planners of it, each a process as a pod runs it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamo_local.clock import AsyncioClock
from dynamo_local.kubernetes.api import ApiAway, Transport
from tests.drivers.kube_http import frontend, serving
from tests.fakes.kubernetes.graphs import DECODE, NAME, PREFILL, adapter, beta
from tests.fakes.kubernetes.operator import Operator
from tests.tools.free_port import free_port

ISL, OSL = 2000, 400
BUSY, IDLE = 50.0, 0.2
OPERATORS = ("DYN_", "KUBE", "NATS", "POD_", "PLANNER_")


@dataclass(slots=True)
class PlannerProcess:
    """One planner. `metrics_port` and `system_port` are those of its /metrics and of its probes."""

    folder: Path
    metrics_port: int
    system_port: int
    process: asyncio.subprocess.Process

    @property
    def log(self) -> str:
        path = self.folder / "planner.log"
        return path.read_text() if path.exists() else "no log"

    async def status(self, path: str, port: int | None = None) -> int:
        return (await asyncio.to_thread(_get, f"http://127.0.0.1:{port or self.system_port}{path}"))[0]

    async def says(self, words: str) -> bool:
        return words in (await asyncio.to_thread(_get, f"http://127.0.0.1:{self.metrics_port}/metrics"))[1]


@dataclass(slots=True)
class Cluster:
    """`rate` is how many requests per second the clients send, `lengths` are their ISL and OSL; `url` is where the
    frontend is."""

    admin: Transport
    kubeconfig: Path
    folder: Path
    operator: Operator
    url: str = ""
    rate: float = BUSY
    lengths: tuple[int, int] = (ISL, OSL)
    version: str = "v1beta1"
    planners: list[PlannerProcess] = field(default_factory=list)

    @property
    def graphs(self) -> str:
        return f"/apis/nvidia.com/{self.version}/namespaces/default/dynamographdeployments"

    async def graph(self) -> dict[str, Any]:
        return dict((await self.admin.request("GET", f"{self.graphs}/{NAME}")).body)

    async def asked(self) -> dict[str, int]:
        """Replicas that the graph asks for, by component; nothing while there is no graph."""
        spec = (await self.graph()).get("spec", {})
        named = {one["name"]: one for one in spec["components"]} if "components" in spec else spec.get("services", {})
        return {name: one["replicas"] for name, one in named.items() if name != "Frontend"}

    async def until_asked(self, prefill: int, decode: int, within_s: float = 240.0) -> None:
        async def so_many() -> bool:
            return await self.asked() == {PREFILL: prefill, DECODE: decode}

        await self.until(so_many, within_s, f"{prefill}P{decode}D; it was asked for {self.operator.history}")

    async def until(self, done: Callable[[], Awaitable[bool]], within_s: float = 120.0, what: str = "it") -> None:
        """Every planner must live meanwhile. A server that is too busy to answer is asked again."""
        end_s = asyncio.get_running_loop().time() + within_s
        while True:
            with suppress(ApiAway):
                if await done():
                    return
            for one in self.planners:
                assert one.process.returncode is None, one.log
            logs = "\n".join(one.log[-6000:] for one in self.planners)
            assert asyncio.get_running_loop().time() < end_s, f"not within {within_s:g} s: {what}\n{logs}"
            await asyncio.sleep(0.2)

    async def made(self, graph: dict[str, Any]) -> None:
        answer = await self.admin.request("POST", self.graphs, graph)
        assert answer.status == 201, answer.body
        for one in graph["spec"].get("components", ()):
            if "scalingAdapter" in one:
                where = self.graphs.replace("dynamographdeployments", "dynamographdeploymentscalingadapters")
                made = await self.admin.request("POST", where, adapter(one["name"], one.get("replicas", 1)))
                assert made.status == 201, made.body

    @asynccontextmanager
    async def planner(self, config: dict[str, Any], name: str = "a", **env: str) -> AsyncIterator[PlannerProcess]:
        """A planner until the block ends; its exit code is then 0, unless it was killed."""
        folder = self.folder / name
        folder.mkdir()
        (folder / "planner.yaml").write_text(json.dumps(config))
        ports = (free_port(), free_port())
        words = (
            *("--environment", "kubernetes", "--config", str(folder / "planner.yaml")),
            *("--kubeconfig", str(self.kubeconfig), "--frontend", f"{self.url}/metrics"),
            *("--logs", str(folder / "logs"), "--metrics-port", str(ports[0]), "--system-port", str(ports[1])),
        )
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(OPERATORS)}
        with (folder / "planner.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "dynamo_local.planner", *words),
                stdout=log,
                stderr=log,
                env={**inherited, "DYN_PARENT_DGD_K8S_NAME": NAME, "POD_NAME": name, **env},
            )
        one = PlannerProcess(folder, *ports, process)
        self.planners.append(one)
        try:
            yield one
        finally:
            if one in self.planners:
                self.planners.remove(one)
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            code = await asyncio.wait_for(process.wait(), 60)
            assert code in (0, -signal.SIGKILL), one.log


@asynccontextmanager
async def cluster(
    admin: Transport, kubeconfig: Path, folder: Path, graph: dict[str, Any] | None = None, **operator: Any
) -> AsyncIterator[Cluster]:
    """With a graph of 1P1D that is reconciled, and a frontend."""
    graph = beta() if graph is None else graph
    version = graph["apiVersion"].partition("/")[2]
    works = Operator(admin, AsyncioClock(), NAME, version=version, start_s=0.5, **operator)
    made = Cluster(admin, kubeconfig, folder, works, version=version)
    await made.made(graph)
    await works.start()
    try:
        with serving(frontend(lambda: made.rate, lambda: made.lengths)) as made.url:
            yield made
    finally:
        await works.close()


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)
