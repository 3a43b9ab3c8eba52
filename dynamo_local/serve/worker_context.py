"""Who a worker is, and what its component may ask of it (`sdk.context.WorkerContext`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo_local.core.types import Load, lease_hex
from dynamo_local.errors import ConfigError
from dynamo_local.ports import EndpointClient, KeyValueStore, PrefillQueue
from dynamo_local.runtime.kv_publisher import NatsKvEventPublisher
from dynamo_local.runtime.lease import LeaseKeeper
from dynamo_local.runtime.prefill_queue import JetStreamPrefillQueue
from dynamo_local.runtime.prefill_replies import PrefillReplies
from dynamo_local.runtime.requests import RequestPlane
from dynamo_local.sdk.context import KvEvents, Work

log = logging.getLogger("dynamo_local.worker")

Callback = Callable[[], Awaitable[None]]
KeyOf = Callable[[int], str]
"""The key under a lease."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this worker is, from its environment. `start_deadline_s` bounds every wait of the start."""

    namespace: str
    component: str
    watcher_name: str
    run_id: str
    statefile: Path
    etcd_endpoints: str
    nats_server: str
    nats_token_file: Path | None
    lease_ttl_s: int
    start_deadline_s: float
    gpus: int = 0

    @classmethod
    def of(cls, env: Mapping[str, str], component: str) -> Identity:
        """Raises `ConfigError` naming the first variable that is missing: workers are started by `dynamo serve`."""

        def need(name: str) -> str:
            try:
                return env[name]
            except KeyError:
                raise ConfigError(f"{name} is not set; workers are started by `dynamo serve`") from None

        token = env.get("DYN_NATS_TOKEN_FILE")
        return cls(
            namespace=need("DYN_NAMESPACE"),
            component=component,
            watcher_name=need("DYN_WATCHER_NAME"),
            run_id=need("DYN_RUN_ID"),
            statefile=Path(need("DYN_STATEFILE")),
            etcd_endpoints=need("ETCD_ENDPOINTS"),
            nats_server=need("NATS_SERVER"),
            nats_token_file=Path(token) if token else None,
            lease_ttl_s=int(env.get("DYN_LEASE_TTL_S", "10")),
            start_deadline_s=float(env.get("DYN_START_DEADLINE_S", "300")),
            gpus=int(env.get("DYN_WORKER_GPUS", "0")),
        )


@dataclass(frozen=True, slots=True)
class Connections:
    """What a worker is connected to, once it is."""

    kv: KeyValueStore
    nats: Any
    plane: RequestPlane
    lease: LeaseKeeper


class Context:
    """The component's context. What the component gave us (callbacks, sources, keys, facts) is kept here.

    `stack` closes what the component opened, before the connections are closed. `on_fatal` is told why the worker
    is of no use any more. `on_facts` is called when `facts` has changed.
    """

    def __init__(
        self,
        identity: Identity,
        connections: Connections,
        settings: Any,
        *,
        draining: asyncio.Event,
        stack: contextlib.AsyncExitStack,
        on_fatal: Callable[[str, BaseException], None],
        on_facts: Callable[[], None],
    ) -> None:
        self.namespace = identity.namespace
        self.component = identity.component
        self.watcher_name = identity.watcher_name
        self.run_id = identity.run_id
        self.gpus = identity.gpus
        self.settings = settings
        self.kv = connections.kv
        self.nats = connections.nats
        self.draining = draining
        self.facts: dict[str, str] = {}
        self.load_source: Callable[[], Load] | None = None
        self.load_changed: Callback = _never
        self.work_source: Callable[[], Work] = Work
        self._plane = connections.plane
        self._lease = connections.lease
        self._stack = stack
        self._on_fatal = on_fatal
        self._on_facts = on_facts
        self._on_drain: list[Callback] = []
        self._on_resume: list[Callback] = []
        self._waiting_keys: list[tuple[KeyOf, bytes]] | None = []

    # --- for the component (sdk.context.WorkerContext) -------------------------------------------

    @property
    def lease_id(self) -> int:
        return self._lease.lease_id

    def on_drain(self, callback: Callback) -> None:
        self._on_drain.append(callback)

    def on_resume(self, callback: Callback) -> None:
        self._on_resume.append(callback)

    def set_load_source(self, source: Callable[[], Load], changed: Callback | None = None) -> None:
        self.load_source, self.load_changed = source, changed or _never

    def set_work_source(self, source: Callable[[], Work]) -> None:
        self.work_source = source

    def vital(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._vital_ended)
        return task

    def _vital_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_fatal(task.get_name(), error)

    async def register_key(self, prefix: str, value: bytes) -> None:
        await self._register_soon(lambda lease: f"{prefix}:{lease_hex(lease)}", value)

    async def register_whole_key(self, key: str, value: bytes) -> None:
        await self._register_soon(lambda _lease: key, value)

    async def announce(self, **facts: str) -> None:
        self.facts.update(facts)
        self._on_facts()

    async def endpoint_client(self, component: str, endpoint: str) -> EndpointClient:
        return await self._plane.client(self.kv, self.namespace, component, endpoint)

    async def prefill_queue(self) -> PrefillQueue:
        queue = JetStreamPrefillQueue(self.nats, self.namespace, self.run_id)
        self._stack.push_async_callback(queue.close)
        await queue.start()
        return queue

    async def prefill_replies(self) -> PrefillReplies:
        replies = PrefillReplies(self.nats, self.namespace)
        self._stack.push_async_callback(replies.close)
        await replies.start()
        return replies

    async def kv_events(self) -> KvEvents:
        events = NatsKvEventPublisher(self.nats, self.namespace, self.component, lambda: self.lease_id)
        self._stack.push_async_callback(events.close)
        await events.start()
        return events

    # --- for the process -------------------------------------------------------------------------

    async def register_waiting_keys(self) -> None:
        """The worker can be asked now: put the component's keys, and from now on each at once."""
        waiting, self._waiting_keys = self._waiting_keys or [], None
        for key_of, value in waiting:
            await self._register(key_of, value)

    async def _register_soon(self, key_of: KeyOf, value: bytes) -> None:
        """Before the worker is ready the key waits: a model must not be listed before it can be asked."""
        if self._waiting_keys is not None:
            self._waiting_keys.append((key_of, value))
        else:
            await self._register(key_of, value)

    async def _register(self, key_of: KeyOf, value: bytes) -> None:
        await self._lease.register(key_of, lambda _lease: value)

    def drain_callbacks(self) -> list[Callback]:
        """Those, and in the order, that the component gave."""
        return list(self._on_drain)

    async def resume(self) -> None:
        """Run the component's resume callbacks side by side."""
        await run_all("taking the drain back", self._on_resume)


async def run_all(what: str, callbacks: Iterable[Callback]) -> None:
    """Run them side by side to their ends. What the component's code raises is logged, never ours to fail with."""
    results = await asyncio.gather(*(_call(callback) for callback in callbacks), return_exceptions=True)
    for error in results:
        if isinstance(error, BaseException):
            log.error("a callback for %s failed", what, exc_info=error)


async def _call(callback: Callback) -> None:
    await callback()


async def _never() -> None:
    await asyncio.Event().wait()
