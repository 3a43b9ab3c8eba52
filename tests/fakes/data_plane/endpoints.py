"""`FakeEndpointClient`: the `EndpointClient` Protocol in one process, over plain handlers. No NATS, no sockets.

It passes the same contract suite as the real client (`tests/contract/test_endpoint_client.py`): payloads and
items take the way through msgpack, a slow reader holds the handler back, `aclose()` ends the handler.

    client = FakeEndpointClient(handler)                   # one instance, id 1
    client = FakeEndpointClient({7: handler, 8: other})    # two
    client.refuse(7, WorkerBusy("full"))                   # until `client.refuse(7, None)`
    client.lose(8)                                         # as kill -9: gone, its streams end with WorkerLost
    client.calls                                           # [Call(instance_id, payload, request_id, timeout_s), ...]
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dynamo_local import errors
from dynamo_local.clock import AsyncioClock
from dynamo_local.core.types import Instance
from dynamo_local.ports import ResponseStream
from dynamo_local.transport.requests.client import LATE_NEWS_S
from dynamo_local.transport.requests.frames import decode_value, encode_value
from dynamo_local.transport.requests.handlers import Handler, RequestContext, drive
from dynamo_local.transport.requests.stream import Take

QUEUE_ITEMS = 64


@dataclass(frozen=True, slots=True)
class Call:
    """One call as the test's subject made it, refused ones included."""

    instance_id: int
    payload: Any
    request_id: str | None
    timeout_s: float | None


class FakeResponseStream:
    """A handler that runs in a task of this process, and a bounded queue of its items."""

    def __init__(self, instance_id: int, handler: Handler, payload: Any, context: RequestContext) -> None:
        self.instance_id = instance_id
        self._queue: list[Any] = []
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._error: BaseException | None = None
        self._ended = False
        self.task = asyncio.create_task(self._run(handler, payload, context), name=f"fake-{context.request_id}")

    async def _run(self, handler: Handler, payload: Any, context: RequestContext) -> None:
        try:
            async with asyncio.timeout(context.remaining_s()) as limit:
                await drive(handler, payload, context, self._put)
        except TimeoutError as error:
            expired = limit.expired()
            self._end(errors.DeadlineExceeded(f"request {context.request_id} ran out of time") if expired else error)
        except asyncio.CancelledError:
            self._end(errors.RequestCancelled(f"the handler of request {context.request_id} was cancelled"))
            raise
        except Exception as error:  # the handler is the test's: what it raises is what the caller must see
            self._end(error)
        else:
            self._end(None)

    def _put(self, item: Any) -> Any:
        self._queue.append(decode_value(encode_value(item)))
        self._changed.set()
        return None if len(self._queue) < QUEUE_ITEMS else self._wait_for_room()

    async def _wait_for_room(self) -> None:
        self._room.clear()
        await self._room.wait()

    def _end(self, error: BaseException | None) -> None:
        if not self._ended:
            self._ended = True
            self._error = error if error is None else errors.from_wire(errors.to_wire(error))
            self._changed.set()

    def fail(self, error: errors.DynamoError) -> None:
        """End the stream with `error` and cancel the handler."""
        self._end(error)
        self.task.cancel()

    async def _next_batch(self) -> list[Any] | None:
        while not self._queue:
            if self._ended:
                if self._error is not None:
                    raise self._error
                return None
            self._changed.clear()
            await self._changed.wait()
        batch, self._queue = self._queue, []
        self._room.set()
        return batch

    async def batches(self) -> AsyncIterator[list[Any]]:
        while (batch := await self._next_batch()) is not None:
            yield batch

    async def pump(self, take: Take) -> None:
        async for batch in self.batches():
            if (room := take(batch)) is not None:
                await room

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (batch := await self._next_batch()) is not None:
            for item in batch:
                yield item

    async def single(self) -> Any:
        """As `transport.requests.stream.ResponseStream.single`."""
        items = [item async for item in self]
        if len(items) != 1:
            raise errors.RequestError(f"a single value was expected, the handler gave {len(items)}")
        return items[0]

    async def aclose(self) -> None:
        self._end(errors.RequestCancelled("the stream was closed"))
        self._queue.clear()
        self.task.cancel()
        await asyncio.wait([self.task])


class FakeEndpointClient:
    """`EndpointClient` over handlers. `instances_changed` is set whenever the set of instances changes."""

    def __init__(
        self,
        handlers: Handler | Mapping[int, Handler] | None = None,
        *,
        namespace: str = "dynamo",
        component: str = "VllmWorker",
        endpoint: str = "generate",
    ) -> None:
        self.namespace, self.component, self.endpoint = namespace, component, endpoint
        self.calls: list[Call] = []
        self.streams: list[FakeResponseStream] = []
        self.instances_changed = asyncio.Event()
        self._refusals: dict[int, errors.DynamoError] = {}
        self._turn = 0
        if handlers is None:
            self._handlers: dict[int, Handler] = {}
        else:
            self._handlers = dict(handlers) if isinstance(handlers, Mapping) else {1: handlers}

    # --- what a test does to it ---

    def add_instance(self, instance_id: int, handler: Handler) -> None:
        self._handlers[instance_id] = handler
        self.instances_changed.set()

    def remove_instance(self, instance_id: int) -> None:
        del self._handlers[instance_id]
        self.instances_changed.set()

    def refuse(self, instance_id: int, error: errors.DynamoError | None) -> None:
        """Answer every call to that instance with `error`; None takes calls again."""
        if error is None:
            self._refusals.pop(instance_id, None)
        else:
            self._refusals[instance_id] = error

    def lose(self, instance_id: int) -> None:
        """The worker dies: deregistered, and its streams end with `WorkerLost`."""
        self.remove_instance(instance_id)
        for stream in self.streams:
            if stream.instance_id == instance_id:
                stream.fail(errors.WorkerLost(f"instance {instance_id:x} went away"))

    async def close(self) -> None:
        for stream in self.streams:
            await stream.aclose()

    # --- EndpointClient ---

    def instances(self) -> tuple[Instance, ...]:
        return tuple(
            Instance(self.namespace, self.component, self.endpoint, i, f"fake.{self.endpoint}-{i:x}")
            for i in sorted(self._handlers)
        )

    async def wait_for_instances(self, timeout_s: float) -> tuple[Instance, ...]:
        if found := await self.wait_for_others((), timeout_s):
            return found
        raise errors.NoWorkers(f"no instance of {self.component}/{self.endpoint} within {timeout_s:g} s")

    async def wait_for_others(self, than: Collection[int], timeout_s: float) -> tuple[Instance, ...]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not (others := tuple(i for i in self.instances() if i.instance_id not in than)):
                    self.instances_changed.clear()
                    await self.instances_changed.wait()
                return others
        return ()

    async def call(
        self,
        payload: Any,
        *,
        instance_id: int | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> ResponseStream:
        await asyncio.sleep(0)
        if timeout_s is not None and timeout_s <= 0:
            raise errors.DeadlineExceeded("the deadline had passed before the request was sent")
        chosen = self._choose() if instance_id is None else instance_id
        if instance_id is None and isinstance(self._refusals.get(chosen), errors.WorkerDraining):
            others = await self.wait_for_others(self._refusals, LATE_NEWS_S if timeout_s is None else timeout_s)
            chosen = others[0].instance_id if others else chosen
        self.calls.append(Call(chosen, payload, request_id, timeout_s))
        if chosen in self._refusals:
            raise self._refusals[chosen]
        if chosen not in self._handlers:
            raise errors.WorkerLost(f"instance {chosen:x} of {self.component}/{self.endpoint} is gone")
        clock = AsyncioClock()
        context = RequestContext(
            request_id=request_id or uuid.uuid4().hex,
            deadline_s=None if timeout_s is None else clock.now_s() + timeout_s,
            clock=clock,
        )
        stream = FakeResponseStream(chosen, self._handlers[chosen], decode_value(encode_value(payload)), context)
        self.streams.append(stream)
        return stream

    def _choose(self) -> int:
        """Round-robin over those that refuse nothing; when all refuse, the next in turn (its refusal is raised)."""
        everyone = sorted(self._handlers)
        if not everyone:
            raise errors.NoWorkers(f"no instance of {self.component}/{self.endpoint} is registered")
        willing = [i for i in everyone if i not in self._refusals] or everyone
        self._turn += 1
        return willing[(self._turn - 1) % len(willing)]
