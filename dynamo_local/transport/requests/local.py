"""Calls between components of one process: the handler runs in its caller's task. No message, no connection, no bytes.

A caller sees the same as over NATS: items, the handler's errors under their types, deadlines, and a handler that
ends when its stream is closed. Two things differ. Values are passed as they are, not copied (only the request is
made into the model that the endpoint declares). And nothing is buffered: the handler goes on when its reader does.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Final

import msgspec

from dynamo_local import errors
from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.core.types import Instance, lease_hex
from dynamo_local.ports import EndpointClient, KeyValueStore
from dynamo_local.transport.requests.client import Plane
from dynamo_local.transport.requests.frames import invalid_payload
from dynamo_local.transport.requests.handlers import REQUEST, Handler, RequestContext
from dynamo_local.transport.requests.stream import Take, pump

logger = logging.getLogger(__name__)

Bindings = Sequence[tuple[ContextVar[Any], Any]]
"""Context variables that a handler sees, and their values."""

_END: Final = object()


class LocalEndpoint:
    """An endpoint of a component in this process: its handler, and the model of its requests.

    `bindings` are context variables of the component beside the request's own.
    """

    def __init__(self, name: str, handler: Handler, model: type | None, bindings: Bindings = ()) -> None:
        self.name = name
        self.handler = handler
        self.bindings = bindings
        self._struct = model if isinstance(model, type) and issubclass(model, msgspec.Struct) else None

    def request(self, payload: Any) -> Any:
        """The handler's argument. Raises `InvalidRequest` for a payload that is none."""
        if self._struct is None:
            return payload
        try:
            return msgspec.convert(payload, self._struct)
        except msgspec.ValidationError as error:
            raise invalid_payload(error) from error


class LocalClient:
    """`ports.EndpointClient` of an endpoint in this process: its one instance is the process itself."""

    def __init__(self, endpoint: LocalEndpoint, instance: Callable[[], Instance], clock: Clock | None = None) -> None:
        self._endpoint = endpoint
        self._instance = instance
        self._clock: Clock = clock or AsyncioClock()

    def instances(self) -> tuple[Instance, ...]:
        return (self._instance(),)

    async def wait_for_instances(self, timeout_s: float) -> tuple[Instance, ...]:
        return self.instances()

    async def wait_for_others(self, than: Collection[int], timeout_s: float) -> tuple[Instance, ...]:
        """There are never others: not waited for, because none can come."""
        return tuple(instance for instance in self.instances() if instance.instance_id not in than)

    async def call(
        self,
        payload: Any,
        *,
        instance_id: int | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
    ) -> LocalStream:
        """As `EndpointClient.call`; the handler begins when the stream is read."""
        own_id = self._instance().instance_id
        if instance_id not in (None, own_id):
            raise errors.WorkerLost(f"{self._endpoint.name}:{lease_hex(instance_id or 0)} is not in this process")
        deadline_s = None if timeout_s is None else self._clock.now_s() + timeout_s
        context = RequestContext(request_id or uuid.uuid4().hex, deadline_s, self._clock)
        if timeout_s is not None and timeout_s <= 0:
            raise errors.DeadlineExceeded(f"the deadline passed before request {context.request_id} was sent")
        return LocalStream(own_id, self._endpoint, self._endpoint.request(payload), context)


class LocalStream:
    """`ports.ResponseStream` of a handler that runs in its reader's task. One reader."""

    def __init__(self, instance_id: int, endpoint: LocalEndpoint, request: Any, context: RequestContext) -> None:
        self.instance_id = instance_id
        self._endpoint = endpoint
        self._request = request
        self._context = context
        self._bindings = ((REQUEST, context), *endpoint.bindings)
        self._items: AsyncIterator[Any] | None = None
        self._ended = False
        self._late = False
        self._readers_own: Exception | None = None
        self._reader: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        if (left_s := context.remaining_s()) is not None:
            # A weak reference: a stream that is dropped half read does not live until its deadline.
            self._timer = asyncio.get_running_loop().call_later(left_s, _expire, weakref.ref(self))

    def __del__(self) -> None:
        if (timer := self._timer) is not None:
            timer.cancel()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        item = _END if self._ended else await self._step()
        if item is _END:
            raise StopAsyncIteration
        return item

    async def pump(self, take: Take) -> None:
        """Call `take` with the items as they arrive, until the end."""
        if self._ended:
            return

        def taken(batch: list[Any]) -> Awaitable[None] | None:
            try:
                return take(batch)
            except Exception as error:
                self._readers_own = error
                raise

        await self._within(lambda: self._pumped(taken) if self._items is None else self._all(taken))
        self._end()

    async def single(self) -> Any:
        """The one value of a unary handler. `RequestError` if there was none, or more than one."""
        try:
            found = [item async for item in self]
        finally:
            await self.aclose()
        if len(found) != 1:
            raise errors.RequestError(f"a single value was expected, the handler gave {len(found)}")
        return found[0]

    async def aclose(self) -> None:
        """Stop: the handler's `finally` blocks have run when this returns. Idempotent."""
        self._end()
        items, self._items = self._items, None
        if (close := getattr(items, "aclose", None)) is not None:
            tokens = self._enter()
            try:
                await close()
            finally:
                _leave(tokens)

    # --- the handler ---

    async def _step(self) -> Any:
        """The next item, or `_END`."""
        item = await self._within(self._next)
        if item is _END:
            self._end()
        return item

    async def _pumped(self, take: Take) -> None:
        """A handler that answers with a stream which can be pumped: its items do not come through this task."""
        stream: Any = self._endpoint.handler(self._request, self._context)
        if not hasattr(stream, "__aiter__"):
            stream = await stream
        if hasattr(stream, "pump"):
            await pump(stream, take)
            return
        self._items = aiter(stream) if hasattr(stream, "__aiter__") else _one(stream)
        await self._all(take)

    async def _all(self, take: Take) -> None:
        while (item := await self._next()) is not _END:
            if (catch_up := take([item])) is not None:
                await catch_up

    async def _within(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """The result of work of the handler. Raises what that raised, as it would arrive over the wire."""
        if self._late:
            await self.aclose()
            raise self._overdue()
        tokens = self._enter()
        reader = self._reader = asyncio.current_task()
        try:
            return await work()
        except asyncio.CancelledError:
            self._end()
            cancelled = reader.cancelling() if reader is not None else 1
            if self._late and reader is not None and reader.uncancel() == 0:
                raise self._overdue() from None
            if not cancelled:  # nobody cancelled the reader: the handler awaited something that was
                raise errors.RequestCancelled(f"the handler of {self._endpoint.name} was cancelled") from None
            raise
        except errors.DynamoError:
            self._end()
            raise
        except Exception as error:  # foreign code: its errors go to the caller and to our log
            self._end()
            if error is self._readers_own:
                raise
            logger.exception("the handler of request %s failed", self._context.request_id)
            raise errors.from_wire(errors.to_wire(error)) from error
        finally:
            self._reader = None
            _leave(tokens)

    async def _next(self) -> Any:
        if self._items is None:
            result: Any = self._endpoint.handler(self._request, self._context)
            if not hasattr(result, "__aiter__"):
                result = await result
            if not hasattr(result, "__aiter__"):
                self._items = _nothing()
                return result
            # A coroutine may answer with a stream of its own, for example that of the next component.
            self._items = aiter(result)
        return await anext(self._items, _END)

    def _enter(self) -> list[tuple[ContextVar[Any], Any]]:
        return [(variable, variable.set(value)) for variable, value in self._bindings]

    def _end(self) -> None:
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def expire(self) -> None:
        """The deadline has passed: the handler is stopped where it waits, at once."""
        self._timer = None
        self._late = True
        if self._reader is not None:
            self._reader.cancel()

    def _overdue(self) -> errors.DeadlineExceeded:
        return errors.DeadlineExceeded(f"the deadline of request {self._context.request_id} passed")


def _expire(stream: weakref.ref[LocalStream]) -> None:
    if (alive := stream()) is not None:
        alive.expire()


def _leave(tokens: list[tuple[ContextVar[Any], Any]]) -> None:
    for variable, token in reversed(tokens):
        variable.reset(token)


async def _one(value: Any) -> AsyncIterator[Any]:
    """The one value of a unary handler."""
    yield value


async def _nothing() -> AsyncIterator[Any]:
    """Follows the one value of a unary handler."""
    return
    yield


class ColocatedPlane:
    """Clients of components in this process, and over `plane` of all others."""

    def __init__(self, plane: Plane, instance: Callable[[str, str], Instance]) -> None:
        self._plane = plane
        self._instance = instance
        self._guests: dict[str, Mapping[str, LocalEndpoint]] = {}

    def add(self, component: str, endpoints: Mapping[str, LocalEndpoint]) -> None:
        """From now on clients of that component call it here."""
        self._guests[component] = endpoints

    async def client(self, kv: KeyValueStore, namespace: str, component: str, endpoint: str) -> EndpointClient:
        """As `RequestPlane.client`. Raises `NoWorkers` for an endpoint that a component of this process has not."""
        if component not in self._guests:
            return await self._plane.client(kv, namespace, component, endpoint)
        found = self._guests[component].get(endpoint)
        if found is None:
            raise errors.NoWorkers(f"{component} runs in this process and has no endpoint {endpoint!r}")
        return LocalClient(found, lambda: self._instance(component, endpoint))
