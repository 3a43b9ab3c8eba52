"""What a running component may ask of its worker process.

The entry point (`dynamo_local.serve.serve_dynamo`) makes the one `WorkerContext` of the process and
sets it before the component's class is instantiated; tests set a fake one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dynamo_local.core.kv_events import KvEvent
from dynamo_local.core.types import Load
from dynamo_local.ports import EndpointClient, KeyValueStore, PrefillQueue


@dataclass(frozen=True, slots=True)
class Work:
    """What a component has in hand beside its endpoints' streams: requests that it took in by other ways.

    `requests` are their ids; `pulled` counts those of them that came out of a queue; `unnamed` counts those whose ids
    only somebody else knows.
    """

    requests: tuple[str, ...] = ()
    pulled: int = 0
    unnamed: int = 0


class PrefillReplies(Protocol):
    """How a prefill's result comes back to the decode worker; see `runtime.prefill_queue`."""

    @property
    def reply_subject(self) -> str: ...

    def expect(self, request_id: str) -> Any: ...

    async def send_reply(self, subject: str, request_id: str, result: Any) -> None: ...


class KvEvents(Protocol):
    """`ports.KvEventPublisher`, and the answers for a Router that has missed something; `runtime.kv_publisher`."""

    block_size: int
    """Tokens per block; the component sets it once its engine has started."""

    def publish(self, events: Sequence[KvEvent]) -> None: ...

    def answer(self, request: Mapping[str, Any] | None) -> AsyncGenerator[dict[str, Any], None]: ...


class WorkerContext(Protocol):
    """The worker's side of the runtime, as a component sees it.

    `settings` is the validated configuration model of the service (None if it declared none), `gpus` its devices.
    `draining` is set from the moment on which the worker takes nothing new, and cleared when the drain was taken back.
    """

    namespace: str
    component: str
    watcher_name: str
    run_id: str
    gpus: int
    settings: Any
    kv: KeyValueStore
    nats: Any
    draining: asyncio.Event

    @property
    def lease_id(self) -> int:
        """The lease of now: it changes when etcd lost the old one."""
        ...

    def on_drain(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Await `callback` when endpoints have stopped taking new requests, before the worker exits.

        Callbacks run side by side; each returns when the component's own work (HTTP connections,
        pulled queue entries, KV hand-offs) is finished. It is cancelled when the drain is taken back: so it only
        waits, and gives nothing up. What closes for good belongs into an `on_shutdown` hook.
        """
        ...

    def on_resume(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Await `callback` when a drain was taken back: `draining` is clear, the worker is registered again."""
        ...

    def set_load_source(self, source: Callable[[], Load], changed: Callable[[], Awaitable[None]] | None = None) -> None:
        """`source` is published once a second, and soon after `changed()` returns.

        Without a source of its own a worker publishes how many requests its endpoints have in flight.
        """
        ...

    def set_work_source(self, source: Callable[[], Work]) -> None:
        """What `status` shows of the component's own work, beside the streams of its endpoints."""
        ...

    def vital(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` beside everything else. If it raises, the worker is of no use any more: its process ends
        at once, with a non-zero exit code and the reason in its log. Returning, or being cancelled, is fine."""
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

    async def endpoint_client(self, component: str, endpoint: str) -> EndpointClient: ...

    async def prefill_queue(self) -> PrefillQueue: ...

    async def prefill_replies(self) -> PrefillReplies: ...

    async def kv_events(self) -> KvEvents:
        """Where this worker's engine says what its KV cache holds."""
        ...


_current: WorkerContext | None = None


def current_context() -> WorkerContext:
    """The process's context; RuntimeError outside a worker (a bug in the caller, hence no DynamoError)."""
    if _current is None:
        raise RuntimeError("no WorkerContext: this code runs outside a dynamo worker; tests call set_current_context()")
    return _current


def set_current_context(context: WorkerContext | None) -> None:
    """Called once by the entry point, and by tests (None takes it away)."""
    global _current
    _current = context
