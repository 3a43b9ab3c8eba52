"""The graph that is measured: started and ended by `dynamo`'s own commands, asked over its own data plane."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from dynamo_local.components.commands.launch import HTTP
from dynamo_local.components.measurement import MEASURE
from dynamo_local.core.types import WorkerState, ready_key
from dynamo_local.errors import DynamoError
from dynamo_local.measuring.host import Ours
from dynamo_local.measuring.repetition import Server
from dynamo_local.measuring.target import Target
from dynamo_local.profile.outside import Unknown, limits_of
from dynamo_local.profile.points import Limits
from dynamo_local.state.schema import State
from dynamo_local.state.store import load
from dynamo_local.system.paths import Paths
from dynamo_local.transport.access import EtcdAccess, NatsAccess, run_environment
from dynamo_local.transport.etcd import EtcdStore
from dynamo_local.transport.nats import close_quietly, connect_nats
from dynamo_local.transport.observation import Observer, Question
from dynamo_local.transport.requests.client import NatsEndpointClient, RequestPlane

# Progress of a start. Engines take minutes to start, and silence would look like a hang.

EVERY_S = 15.0

T = TypeVar("T")


async def told_while(started: Awaitable[T], namespace: str, tell: Callable[[str], None], every_s: float = EVERY_S) -> T:
    """Await `started`. Meanwhile report the workers that are not ready, every few seconds."""
    began_s = time.monotonic()
    task = asyncio.ensure_future(started)
    try:
        while True:
            done, _ = await asyncio.wait({task}, timeout=every_s)
            if done:
                return task.result()
            tell(f"starting for {time.monotonic() - began_s:.0f} s: {waiting_for(_state(namespace))}")
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


def waiting_for(state: State | None) -> str:
    """The workers that are not ready, in words."""
    if state is None or not state.components:
        return "no worker runs yet"
    late = [
        f"{name.removeprefix(f'{state.namespace}_')} is {each.state.value}"
        for name, each in sorted(state.components.items())
        if each.state is not WorkerState.READY
    ]
    return ", ".join(late) or "all are ready"


def _state(namespace: str) -> State | None:
    """None before there is one."""
    try:
        return load(Paths.found(namespace, os.environ).statefile)
    except (OSError, DynamoError):
        return None


SERVE_S = 900.0
"""`dynamo serve` has deadlines of its own for a start; beyond this it hangs."""
READY_S = 30.0
"""So long a worker's endpoint may take to be seen after the graph is ready."""

LOOKS = 6
"""Each waits five seconds for the arbiter."""


class GraphFailed(DynamoError):
    """The graph that was to be measured did not start, or a command on it failed."""

    code = "graph_failed"


@dataclass(frozen=True, slots=True)
class Worker:
    """A ready worker: its watcher's name, its component, and its instance."""

    name: str
    component: str
    instance_id: int
    gpus: tuple[str, ...]


async def dynamo(*words: str, timeout_s: float = 900.0) -> str:
    """Run a command of ours to its end; what it printed. Raises `GraphFailed` with what it said."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "dynamo_local.cli.main",
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is ours: the graph is ended in order
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), timeout_s)
    except BaseException:
        if process.returncode is None:
            process.terminate()
            await process.wait()
        raise
    if process.returncode:
        message = err.decode(errors="replace").strip() or out.decode(errors="replace").strip()
        raise GraphFailed(f"`dynamo {' '.join(words[:2])}` failed: {message.removeprefix('dynamo: ')}")
    return out.decode(errors="replace")


async def patiently(ask: Callable[[], Awaitable[str]], tries: int = LOOKS) -> str:
    """The arbiter's answer, within `attempts`. A busy host may delay it while engines start.

    Raises the last `GraphFailed`.
    """
    for _ in range(tries - 1):
        try:
            return await ask()
        except GraphFailed:
            await asyncio.sleep(0)  # the arbiter was waited for already
    return await ask()


class MeasuredGraph:
    """A running graph whose engines can be measured."""

    def __init__(
        self,
        target: Target,
        status: dict[str, Any],
        state: State,
        plane: RequestPlane,
        kv: EtcdStore,
        observer: Observer,
    ) -> None:
        self.target = target
        self.status = status
        self.state = state
        self._plane = plane
        self._kv = kv
        self._observer = observer
        self._clients: dict[str, NatsEndpointClient] = {}
        self._servers: dict[str, Server] = {}

    @property
    def frontend_url(self) -> str | None:
        """Where it is asked over HTTP; None where it has no Frontend."""
        url = self.status.get("frontend_url")
        return None if url is None else str(url)

    def workers(self, component: str) -> list[Worker]:
        """The ready workers of a component."""
        return [
            Worker(each["watcher_name"], component, int(each["lease"], 16), tuple(each["gpus"]))
            for each in self.status["workers"]
            if each["component"] == component and each["state"] == "ready"
        ]

    def cold_s(self) -> dict[str, float]:
        """Component -> duration of its cold start in this run, s. Unobserved ones are absent."""
        return {
            row["component"]: row["run"]["median_s"]
            for row in self.status["lead_times"]
            if row["rung"] == "cold" and row["run"] is not None and row["component"] in self.target.components.values()
        }

    def ours(self) -> Ours:
        """Whose processes are its own, and the devices of the workers that are measured."""
        workers = [each for each in self.status["workers"] if each["pid"]]
        pids = {self.state.arbiter_pid, *(each["pid"] for each in workers)} - {None}
        held = {gpu for each in workers if each["component"] in self.target.components.values() for gpu in each["gpus"]}
        uuids = {gpu["uuid"] for gpu in self.status["gpus"] if str(gpu["index"]) in held}
        return Ours(frozenset(pids), frozenset(uuids))

    def pid(self, worker: Worker) -> int:
        """Memory of the worker's process."""
        return next(int(each["pid"]) for each in self.status["workers"] if each["watcher_name"] == worker.name)

    async def look(self) -> dict[str, Any]:
        """Its status of now. Raises `GraphFailed`."""
        self.status = json.loads(
            await patiently(lambda: dynamo("status", "--json", "--namespace", self.target.namespace))
        )
        return self.status

    async def measure(self, worker: Worker, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """One repetition on that worker; over HTTP where it is a command. Raises what the data plane, the engine and
        the server raise."""
        if self.target.runtime_of(worker.component) is not None:
            return await (await self._server(worker)).measure(request, timeout_s)
        client = self._clients.get(worker.component)
        if client is None:
            client = await self._plane.client(self._kv, self.target.namespace, worker.component, MEASURE)
            self._clients[worker.component] = client
            await client.wait_for_instances(READY_S)
        stream = await client.call(dict(request), instance_id=worker.instance_id, timeout_s=timeout_s)
        return dict(await stream.single())

    async def limits(self, worker: Worker) -> Limits:
        """Limits of the worker's engine. Raises `GraphFailed` if neither the engine nor the command line names them."""
        target, expected = self.target, frozenset({worker.name})
        runtime = target.runtime_of(worker.component)
        words = () if runtime is None else target.words_of(worker.component)
        found: Limits | Unknown = Unknown(())
        for _ in range(20):
            if runtime == HTTP:
                reported = await (await self._server(worker)).reported_limits(target.model_of(worker.component))
            else:
                # A Dynamo worker reports its limits together with its counters.
                answers = await self._observer.ask(Question(counters=runtime is not None, passes=True), expected)
                reported = dict(answers[worker.name].limits) if worker.name in answers else {}
            found = limits_of(reported, words, target.given)
            if isinstance(found, Limits):
                return found
            await asyncio.sleep(0.25)  # it may still be starting to answer
        raise GraphFailed(f"{worker.name} {found}" + ("; look at `dynamo logs`" if runtime is None else ""))

    async def close(self) -> None:
        """Close the connections to servers that were measured."""
        for server in self._servers.values():
            await server.close()

    async def _server(self, worker: Worker) -> Server:
        """The worker's own where it is an HTTP server; else the frontend before it. Raises `GraphFailed`."""
        http = self.target.runtime_of(worker.component) == HTTP
        name = worker.name if http else "frontend"
        if name not in self._servers:
            if http:
                key = ready_key(self.target.namespace, worker.name, worker.instance_id)
                found = await self._kv.get(key)
                url = None if found is None else json.loads(found.value).get("server_url")
            else:
                url = self.frontend_url
            if url is None:
                raise GraphFailed(f"{worker.name} cannot be asked over HTTP: it does not say where it listens")
            metrics = self.target.metrics_of(worker.component) if http else None
            self._servers[name] = Server(url, metrics, apart=not http and not self.target.standalone)
        return self._servers[name]


@asynccontextmanager
async def running(target: Target, tell: Callable[[str], None]) -> AsyncIterator[MeasuredGraph]:
    """The target's graph, ready; ended when the block is left, whatever happened. `tell` hears of its start."""
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_down, target.namespace)
        serve = dynamo(*target.serve_words(), timeout_s=SERVE_S + (target.deadline_s or 0.0))
        await told_while(serve, target.namespace, tell)
        yield await _joined(target, stack)


async def _joined(target: Target, stack: AsyncExitStack) -> MeasuredGraph:
    status = json.loads(await dynamo("status", "--json", "--namespace", target.namespace))
    state = load(Paths.found(target.namespace, os.environ).statefile)
    env = run_environment(state)
    kv = EtcdStore(env["ETCD_ENDPOINTS"], access=EtcdAccess.of(env))
    stack.push_async_callback(kv.close)
    nats = await connect_nats(env["NATS_SERVER"], NatsAccess.of(env), name="dynamo-profile")
    stack.push_async_callback(close_quietly, nats)
    plane = RequestPlane(nats)
    stack.push_async_callback(plane.close)
    await plane.start()
    graph = MeasuredGraph(target, status, state, plane, kv, Observer(nats, target.namespace))
    stack.push_async_callback(graph.close)
    return graph


async def _down(namespace: str) -> None:
    """End it; one that is gone already is fine."""
    try:
        await dynamo("down", "--namespace", namespace, "--timeout", "30", timeout_s=60.0)
    except GraphFailed:
        if Paths.found(namespace, os.environ).statefile.exists():
            await dynamo("down", "--namespace", namespace, "--now", timeout_s=60.0)
