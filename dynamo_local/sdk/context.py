"""The interface of a worker process for its component.

The entry point (`dynamo_local.worker.serve_dynamo`) makes one `WorkerContext` and sets it before it instantiates the
component's class. Tests set a fake one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dynamo_local.core.passes import ForwardPass
from dynamo_local.core.routing.kv_events import KvEvent
from dynamo_local.core.traffic import Recent
from dynamo_local.core.types import Load, Missing
from dynamo_local.ports import EndpointClient, KeyValueStore, PassSink, PrefillQueue


@dataclass(frozen=True, slots=True)
class Work:
    """Requests of a component that did not come through its endpoints.

    `requests`: their ids. `pulled`: how many of them came out of a queue. `unnamed`: requests whose ids are
    unknown here. `unread_s`: for how long each answer has waited for a client that reads nothing. `abandoned`: such
    answers that were ended.
    """

    requests: tuple[str, ...] = ()
    pulled: int = 0
    unnamed: int = 0
    unread_s: tuple[float, ...] = ()
    abandoned: int = 0


class PrefillReplies(Protocol):
    """How a prefill's result comes back to the decode worker; see `transport.prefill_replies`."""

    @property
    def reply_to(self) -> str:
        """Where results come to this worker."""
        ...

    def expect(self, request_id: str) -> Any:
        """The result of that request, when it comes; to be called before it is asked for."""
        ...

    async def begin(self, reply_to: str, request_id: str) -> bool:
        """Tell the decode worker that this worker computes the request now. False: it is gone."""
        ...

    def give_back(self, reply_to: str, request_id: str) -> None:
        """Tell it that this worker computes the request no more."""
        ...

    async def send_reply(self, reply_to: str, request_id: str, result: Any) -> None:
        """Send a result; returns when the decode worker has confirmed it."""
        ...


class KvEvents(Protocol):
    """`ports.KvEventPublisher`, and the answers for a Router that has missed something; `transport.kv_events`."""

    block_size: int
    """Tokens per block; the component sets it once its engine has started."""

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Tell the Routers what was stored and removed, in this order."""
        ...

    def answer(self, request: Any) -> AsyncGenerator[dict[str, Any], None]:
        """All that is stored now, or what came after the number that the request names."""
        ...


class HeldMemory(Protocol):
    """Memory of processes, bytes: per device, and main memory."""

    @property
    def vram_bytes(self) -> int | Missing:
        """The most on one of the devices."""
        ...

    @property
    def host_bytes(self) -> int | Missing:
        """Main memory."""
        ...


class EngineSleeper(Protocol):
    """Puts the component's engine to sleep and wakes it: `engines.sleep.EngineStandby`, or a command's hooks."""

    @property
    def cannot(self) -> str | None:
        """Why it cannot sleep; None if it can."""
        ...

    @property
    def asleep(self) -> HeldMemory | None:
        """Memory that it keeps while asleep. None: awake."""
        ...

    @property
    def recycle(self) -> str | None:
        """Why its process should be replaced; None while it need not be."""
        ...

    @property
    def rehearsed_bytes(self) -> int | Missing:
        """The main memory that sleeping at level 1 took when it was rehearsed."""
        ...

    async def sleep(self, level: int) -> None:
        """Let go of the GPU; nothing runs. Raises what makes the worker useless."""
        ...

    async def wake(self) -> None:
        """Return when it answers as it did before. Raises what makes the worker useless."""
        ...


class WorkerContext(Protocol):
    """The worker's side of the runtime, as a component sees it.

    `settings` is the validated configuration model of the service (None if it declared none), `gpus` its devices.
    `standby`: its engine is to be made so that it can sleep, and given to `set_sleeper`.
    `siblings_folder` is private to this component's workers on this host, None where there is no such folder; whoever
    needs it makes it, and it goes with the run.
    `draining` is set from the moment on which the worker takes nothing new, and cleared when the drain was taken back.
    """

    namespace: str
    component: str
    watcher_name: str
    run_id: str
    siblings_folder: Path | None
    gpus: int
    standby: bool
    settings: Any
    kv: KeyValueStore
    nats: Any
    draining: asyncio.Event
    inherited: Mapping[str, Any]
    """Objects that the component of the former role handed over. Empty in the first role."""
    flips_to: str | None
    """The component whose role this worker can take over; None where it cannot."""

    @property
    def lease_id(self) -> int:
        """The lease of now: it changes when etcd lost the old one."""
        ...

    def on_drain(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Await `callback` in a drain: after the endpoints stopped taking requests, before the worker exits.

        Callbacks run concurrently. Each returns when the component's own work is finished: HTTP connections, pulled
        queue entries, KV hand-offs. A cancelled drain cancels the callback, so it may only wait. Code that closes for
        good belongs into an `on_shutdown` hook.
        """
        ...

    def on_ready(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Await `callback` when the worker is registered as ready."""
        ...

    def on_resume(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Await `callback` when a drain was taken back: `draining` is clear, the worker is registered again."""
        ...

    def on_control(self, op: str, answer: Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]) -> None:
        """`answer` answers the operation `op` at the worker's control endpoint (`transport.control`)."""
        ...

    def set_load_source(self, source: Callable[[], Load], changed: Callable[[], Awaitable[None]] | None = None) -> None:
        """`source` is published once a second, and soon after `changed()` returns.

        Without a source of its own a worker publishes how many requests its endpoints have in flight.
        """
        ...

    def set_dispatch_source(self, source: Callable[[], Mapping[str, float]]) -> None:
        """Counters of how this worker dispatches requests; `dynamo status` and `/metrics` show them."""
        ...

    def set_served_source(self, source: Callable[[], Mapping[str, float]]) -> None:
        """Counters of what this worker served (`core.served`); `dynamo status` and `top` show the last minute."""
        ...

    def set_sleeper(self, sleeper: EngineSleeper) -> None:
        """Register the object that puts this worker's engine to sleep. Without one, the worker cannot sleep."""
        ...

    @property
    def unread_bound_s(self) -> float:
        """While the worker leaves, an answer of which the client has taken no byte for so long is ended."""
        ...

    def set_work_source(self, source: Callable[[], Work]) -> None:
        """Register the source of the component's own work for `status`, beside the streams of its endpoints."""
        ...

    def vital(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` beside everything else. If it raises, the worker is of no use any more: its process ends
        at once, with a non-zero exit code and the reason in its log. Returning, or being cancelled, is fine."""
        ...

    def keep(self, close: Callable[[], Awaitable[None]]) -> None:
        """Keep an object across changes of role.

        `close` is awaited at the end of the process, after all shutdown hooks.
        """
        ...

    def wait_for(self, what: str) -> None:
        """While the worker starts: say what it waits for now, in words that follow "waits for"."""
        ...

    def serve_endpoint(self, name: str, handler: Callable[[Any], Any], model: type) -> None:
        """Serve one more endpoint than the class declares, for requests of that model; before the start has ended."""
        ...

    async def register_key(self, prefix: str, value: bytes) -> None:
        """Put `{prefix}:{lease hex}` under the worker's lease; put again whenever the lease is granted anew."""
        ...

    async def register_whole_key(self, key: str, value: bytes) -> None:
        """The same for a key that has a name of its own, without the lease at its end."""
        ...

    async def announce(self, **facts: str) -> None:
        """Facts for `dynamo status`, e.g. `frontend_url`; they go into the statefile."""
        ...

    async def endpoint_client(self, component: str, endpoint: str) -> EndpointClient:
        """Calls that endpoint of another component; instances are followed until the worker ends."""
        ...

    async def prefill_queue(self, name: str = "") -> PrefillQueue:
        """The namespace's queue of that name, closed when the worker ends."""
        ...

    async def prefill_replies(self) -> PrefillReplies:
        """How prefills' results are sent and awaited, closed when the worker ends."""
        ...

    async def kv_events(self) -> KvEvents:
        """Where this worker's engine says what its KV cache holds."""
        ...

    async def passes(self, *, publish: bool) -> PassSink:
        """Where this worker's engine says what its scheduler does, for planners that ask. `publish`: each pass also
        goes to Dynamo's event plane, at once, for planners of Dynamo's."""
        ...

    def observe(
        self,
        counters: Callable[[], Awaitable[Mapping[str, float]]] | None = None,
        limits: Callable[[], Mapping[str, int | None]] = dict,
        requests: Callable[[float], Recent | None] | None = None,
        benchmark: Callable[[], tuple[ForwardPass, ...] | Missing | None] | None = None,
    ) -> None:
        """Register the answers for planners (`transport.observation`).

        `counters`: numbers that only grow. `limits`: of the engine. `requests(seconds)`: the recent ones. `benchmark`:
        the passes measured at the start (None: not known yet). If `counters` raises a `DynamoError`, they are missing.
        """
        ...


_current: WorkerContext | None = None

COLOCATED: ContextVar[WorkerContext | None] = ContextVar("dynamo_guest", default=None)
"""The context of the component whose code runs, where it runs in another component's process."""


def current_context() -> WorkerContext:
    """The component's context; RuntimeError outside a worker (a bug in the caller, hence no DynamoError)."""
    if (component := COLOCATED.get()) is not None:
        return component
    if _current is None:
        raise RuntimeError("no WorkerContext: this code runs outside a dynamo worker; tests call set_current_context()")
    return _current


def set_current_context(context: WorkerContext | None) -> None:
    """Called once by the entry point, and by tests (None takes it away)."""
    global _current
    _current = context


# --- Role flips. The process and its engine stay; the component is replaced.
#
# The next component is made beside the old one, with a context of its own. `inherited` holds the objects that the old
# component handed over. The process closes kept objects at its end (`WorkerContext.keep`); a component never does.

FORMER_INSTANCE = "former_instance"
"""In `inherited`: the id of the instance that the process was in its role before."""


@runtime_checkable
class Flippable(Protocol):
    """See `worker.flip`, which calls these in this order."""

    def hand_over(self) -> Mapping[str, Any]:
        """Name -> object for the next component, such as the engine.

        Must not change anything, because a flip may fail.
        """
        ...

    async def try_out(self) -> None:
        """In the new role, before anybody knows of it: whether it works. Raises the `DynamoError` that says why not."""
        ...

    async def settle(self) -> None:
        """In the old role, once it is given up: return when all that it has in hand beside its endpoints' streams is
        finished. The process, and what is kept in it, goes on."""
        ...


@runtime_checkable
class FlipsIdle(Flippable, Protocol):
    """A `Flippable` whose engine can change only while idle.

    The old role leaves routing and finishes first. Then `try_out` changes the engine.
    """

    async def until_idle(self) -> None:
        """In the old role, out of routing: return when its engine has nothing in hand. May be cancelled."""
        ...

    async def go_back(self) -> None:
        """In the old role, whose flip has failed: return when the engine has that role, whichever it had. Where that is
        impossible the worker is useless, and ends."""
        ...
