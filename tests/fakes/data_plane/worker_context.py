"""A graph in one process: `FakeCluster` holds what etcd and NATS hold, `FakeWorkerContext` is one worker's view.

    cluster = FakeCluster()
    worker = await cluster.start(VllmWorker, VllmWorkerConfig(...))
    client = cluster.client("VllmWorker", "generate")     # a FakeEndpointClient
    await worker.drain(); await worker.kill(); await cluster.close()

Payloads take the way through msgpack, the queue and its redelivery are the contract-tested fakes.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dynamo_local.core.routing.kv_events import KvEvent
from dynamo_local.core.traffic import Recent
from dynamo_local.core.types import Load
from dynamo_local.errors import RequestCancelled, WorkerLost, to_wire
from dynamo_local.sdk.context import EngineSleeper, Work, set_current_context
from dynamo_local.sdk.service import DynamoService
from dynamo_local.transport.control import Op
from dynamo_local.transport.passes import PassRecorder
from dynamo_local.transport.prefill_replies import ExpectedReply
from dynamo_local.transport.requests.frames import decode_value, encode_value
from tests.fakes.data_plane.endpoints import FakeEndpointClient
from tests.fakes.infra.etcd import FakeEtcd
from tests.fakes.infra.prefill_queue import FakePrefillQueue, FakeQueueServer


class FakePrefillReplies:
    """`sdk.context.PrefillReplies` without NATS; all of one cluster share `switchboard`. Waiting is the real code's."""

    def __init__(self, switchboard: dict[str, FakePrefillReplies], subject: str) -> None:
        self._switchboard = switchboard
        self.reply_to = subject
        self._expected: dict[str, ExpectedReply] = {}
        switchboard[subject] = self

    def expect(self, request_id: str) -> ExpectedReply:
        if request_id in self._expected:
            raise RuntimeError(f"a prefill of {request_id} is awaited already")
        expected = self._expected[request_id] = ExpectedReply(self, request_id)  # type: ignore[arg-type]
        return expected

    def awaited(self, request_id: str) -> ExpectedReply | None:
        """What waits for that answer."""
        return self._expected.get(request_id)

    def forget(self, expected: ExpectedReply) -> None:
        if self._expected.get(expected.request_id) is expected:
            del self._expected[expected.request_id]

    async def begin(self, subject: str, request_id: str) -> bool:
        await asyncio.sleep(0)
        target = self._switchboard.get(subject)
        if target is not None:
            target.held(request_id, self)
        return target is not None

    def give_back(self, subject: str, request_id: str) -> None:
        if (target := self._switchboard.get(subject)) is not None:
            target.held(request_id, None)

    def held(self, request_id: str, holder: FakePrefillReplies | None) -> None:
        """As `PrefillReplies.held`."""
        if (expected := self._expected.get(request_id)) is not None:
            expected.holder = holder

    async def send_reply(self, subject: str, request_id: str, result: Any) -> None:
        await asyncio.sleep(0)
        target = self._switchboard.get(subject)
        if target is None:
            raise WorkerLost(f"the decode worker that asked for {request_id} is gone; free its KV")
        expected = target.awaited(request_id)
        if expected is None or expected.future.done():
            raise RequestCancelled(f"the prefill of {request_id} is not wanted any more; free its KV")
        failed = isinstance(result, BaseException)
        message = {"error": to_wire(result)} if failed else {"result": decode_value(encode_value(result))}
        expected.future.set_result(message)

    def close(self) -> None:
        """The process is gone: nobody listens on its subject."""
        self._switchboard.pop(self.reply_to, None)


class FakeKvEvents:
    """`sdk.context.KvEvents`: what was said, for tests to look at."""

    def __init__(self) -> None:
        self.block_size = 0
        self.events: list[KvEvent] = []

    def publish(self, events: Sequence[KvEvent]) -> None:
        self.events += events

    async def answer(self, request: Mapping[str, Any] | None) -> AsyncGenerator[dict[str, Any], None]:
        yield {"block_size": self.block_size, "epoch": "fake", "seq": 0, "replay": False}


class FakeWorkerContext:
    """`sdk.context.WorkerContext`; `keys`, `load_source` and `drained` are for tests to look at."""

    def __init__(self, cluster: FakeCluster, component: str, lease_id: int, settings: Any) -> None:
        self.namespace = cluster.namespace
        self.component = component
        self.watcher_name = f"{cluster.namespace}_{component}_{lease_id}"
        self.run_id = "run"
        self.siblings_folder: Path | None = None
        self.gpus = 0
        self.standby = False
        self.sleeper: EngineSleeper | None = None
        self.settings = settings
        self.kv = cluster.kv
        self.nats: Any = None
        self.draining = asyncio.Event()
        self.lease_id = lease_id
        self.keys: list[str] = []
        self.queues: list[FakePrefillQueue] = []
        self.facts: dict[str, str] = {}
        self.load_source: Callable[[], Load] | None = None
        self.waits_for = ""
        self.kv_told = FakeKvEvents()
        self.recorder = PassRecorder()
        self.counters: Callable[[], Awaitable[Mapping[str, float]]] | None = None
        self.limits: Callable[[], Mapping[str, int | None]] = dict
        self.replies = FakePrefillReplies(cluster.switchboard, f"replies.{lease_id}")
        self._cluster = cluster
        self.work_source: Callable[[], Work] = Work
        self.dispatch_source: Callable[[], Mapping[str, float]] | None = None
        self.served_source: Callable[[], Mapping[str, float]] | None = None
        self.vital_tasks: list[asyncio.Task[None]] = []
        self.operations: dict[str, Op] = {}
        self.ready_callbacks: list[Callable[[], Awaitable[None]]] = []
        self._drain_callbacks: list[Callable[[], Awaitable[None]]] = []
        self._resume_callbacks: list[Callable[[], Awaitable[None]]] = []
        self.inherited: Mapping[str, Any] = {}
        self.flips_to: str | None = None
        self.kept: list[Callable[[], Awaitable[None]]] = []

    def keep(self, close: Callable[[], Awaitable[None]]) -> None:
        self.kept.append(close)

    def on_drain(self, callback: Callable[[], Awaitable[None]]) -> None:
        self._drain_callbacks.append(callback)

    def on_ready(self, callback: Callable[[], Awaitable[None]]) -> None:
        self.ready_callbacks.append(callback)

    def on_resume(self, callback: Callable[[], Awaitable[None]]) -> None:
        self._resume_callbacks.append(callback)

    def on_control(self, op: str, answer: Op) -> None:
        self.operations[op] = answer

    def set_dispatch_source(self, source: Callable[[], Mapping[str, float]]) -> None:
        self.dispatch_source = source

    def set_served_source(self, source: Callable[[], Mapping[str, float]]) -> None:
        self.served_source = source

    def set_sleeper(self, sleeper: EngineSleeper) -> None:
        self.sleeper = sleeper

    def set_load_source(self, source: Callable[[], Load], changed: Callable[[], Awaitable[None]] | None = None) -> None:
        self.load_source = source

    unread_bound_s = 30.0

    def set_work_source(self, source: Callable[[], Work]) -> None:
        self.work_source = source

    def vital(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self.vital_tasks.append(task)
        return task

    def wait_for(self, what: str) -> None:
        self.waits_for = what

    async def register_key(self, prefix: str, value: bytes) -> None:
        await self.register_whole_key(f"{prefix}:{self.lease_id:x}", value)

    async def register_whole_key(self, key: str, value: bytes) -> None:
        await self.kv.put(key, value)
        self.keys.append(key)

    async def announce(self, **facts: str) -> None:
        self.facts.update(facts)

    async def endpoint_client(self, component: str, endpoint: str) -> FakeEndpointClient:
        return self._cluster.client(component, endpoint)

    async def prefill_queue(self, name: str = "") -> FakePrefillQueue:
        queue = FakePrefillQueue(self._cluster.queue_server, self.run_id, ack_wait_s=self._cluster.ack_wait_s)
        self.queues.append(queue)
        return queue

    async def kv_events(self) -> FakeKvEvents:
        return self.kv_told

    async def prefill_replies(self) -> FakePrefillReplies:
        return self.replies

    async def passes(self, *, publish: bool) -> PassRecorder:
        return self.recorder

    def observe(
        self,
        counters: Callable[[], Awaitable[Mapping[str, float]]] | None = None,
        limits: Callable[[], Mapping[str, int | None]] = dict,
        requests: Callable[[float], Recent | None] | None = None,
    ) -> None:
        self.counters, self.limits, self.requests = counters, limits, requests

    async def run_drain_callbacks(self) -> None:
        await asyncio.gather(*(callback() for callback in self._drain_callbacks))

    async def run_resume_callbacks(self) -> None:
        await asyncio.gather(*(callback() for callback in self._resume_callbacks))


class FakeWorker:
    """A started service instance and its context."""

    def __init__(
        self, cluster: FakeCluster, service: DynamoService[Any], instance: Any, context: FakeWorkerContext
    ) -> None:
        self.instance = instance
        self.context = context
        self._cluster = cluster
        self._service = service
        self._endpoints = list(service.endpoints)
        self._up = True

    async def deregister(self) -> None:
        """Out of routing: the keys go, streams go on."""
        for name in self._endpoints:
            client = self._cluster.client(self.context.component, name)
            if any(i.instance_id == self.context.lease_id for i in client.instances()):
                client.remove_instance(self.context.lease_id)
        for key in self.context.keys:
            await self.context.kv.delete(key)

    async def drain(self) -> None:
        """What SIGTERM does: deregister, finish the streams, the drain callbacks, the shutdown hook."""
        if not self._up:
            return
        self._up = False
        await self.deregister()
        self.context.draining.set()
        for name in self._endpoints:
            streams = self._cluster.client(self.context.component, name).streams
            mine = [s.task for s in streams if s.instance_id == self.context.lease_id]
            if mine:
                await asyncio.wait(mine)
        await self.context.run_drain_callbacks()
        await self._shut_down()
        self.context.replies.close()

    async def kill(self) -> None:
        """As `kill -9`: streams break, nothing is given back or answered, no hook runs in time to help."""
        self._up = False
        self.context.replies.close()
        for queue in self.context.queues:  # what the hooks below say must not reach the queue any more
            queue.server = FakeQueueServer(available=False)
        for name in self._endpoints:
            client = self._cluster.client(self.context.component, name)
            if any(i.instance_id == self.context.lease_id for i in client.instances()):
                client.lose(self.context.lease_id)
        for key in self.context.keys:
            await self.context.kv.delete(key)
        await self._shut_down()

    async def _shut_down(self) -> None:
        for hook in self._service.on_shutdown:
            await getattr(self.instance, hook)()
        for close in reversed(self.context.kept):
            await close()


class FakeCluster:
    """One namespace: etcd, queue, replies, and every endpoint's instances."""

    def __init__(self, namespace: str = "dynamo", *, ack_wait_s: float = 5.0) -> None:
        self.namespace = namespace
        self.ack_wait_s = ack_wait_s
        self.kv = FakeEtcd()
        self.queue_server = FakeQueueServer()
        self.switchboard: dict[str, FakePrefillReplies] = {}
        self.workers: list[FakeWorker] = []
        self._clients: dict[tuple[str, str], FakeEndpointClient] = {}
        self._last_lease = 0

    def client(self, component: str, endpoint: str) -> FakeEndpointClient:
        """The live view of an endpoint; also before its first instance."""
        key = (component, endpoint)
        if key not in self._clients:
            self._clients[key] = FakeEndpointClient(
                {}, namespace=self.namespace, component=component, endpoint=endpoint
            )
        return self._clients[key]

    async def start(self, service: DynamoService[Any], settings: Any, without: Collection[str] = ()) -> FakeWorker:
        """Instantiate, run the start hooks, register the endpoints: what `serve_dynamo` does.

        `without` names optional dependencies that the graph does not run.
        """
        self._last_lease += 1
        context = FakeWorkerContext(self, service.name, self._last_lease, settings)
        set_current_context(context)
        try:
            clients = {
                attr: None if dependency.on.name in without else SimpleNamespace(component=dependency.on.name)
                for attr, dependency in service.depends.items()
            }
            instance = service.create(clients)
            for hook in service.on_start:
                await getattr(instance, hook)()
        finally:
            set_current_context(None)
        for name, declared in service.endpoints.items():
            handler = _handler(getattr(instance, declared.method))
            self.client(service.name, name).add_instance(context.lease_id, handler)
        worker = FakeWorker(self, service, instance, context)
        self.workers.append(worker)
        return worker

    async def close(self) -> None:
        """Drain whatever still runs, last started first."""
        for worker in reversed(self.workers):
            await worker.drain()
        for client in self._clients.values():
            await client.close()
        await self.kv.close()


def _handler(method: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    def handle(payload: Any, _context: Any) -> Any:
        result = method(payload)
        assert inspect.isawaitable(result) or hasattr(result, "__aiter__")
        return result

    return handle
