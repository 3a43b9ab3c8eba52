"""Running a handler: the same code for the real server and for the fake one of the component tests."""

from __future__ import annotations

import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo_local.clock import AsyncioClock, Clock
from dynamo_local.transport.requests.stream import pump

_CLOCK = AsyncioClock()


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One request, as its handler sees it. `deadline_s` is absolute (of `clock.now_s()`), None without a deadline."""

    request_id: str
    deadline_s: float | None = None
    clock: Clock = field(default=_CLOCK, repr=False, compare=False)

    def remaining_s(self) -> float | None:
        """Seconds until the deadline, never below 0; None where the caller set no deadline."""
        if self.deadline_s is None:
            return None
        return max(0.0, self.deadline_s - self.clock.now_s())


REQUEST: contextvars.ContextVar[RequestContext | None] = contextvars.ContextVar("dynamo_request", default=None)
"""The request that the running task serves."""


def current_request() -> RequestContext | None:
    """The request that the running task serves; None outside a handler."""
    return REQUEST.get()


def enter_request(context: RequestContext) -> contextvars.Token[RequestContext | None]:
    """Make `context` the running task's request. For code that runs a handler; undo with `leave_request`."""
    return REQUEST.set(context)


def leave_request(token: contextvars.Token[RequestContext | None]) -> None:
    """Undo `enter_request`, which returned `token`."""
    REQUEST.reset(token)


Handler = Callable[[Any, RequestContext], AsyncIterator[Any] | Awaitable[Any]]
"""An async generator function, or a coroutine function (whose one value becomes a stream of one item)."""

Put = Callable[[Any], Awaitable[None] | None]
"""Takes one item. Returns an awaitable only if the receiver must catch up first. Most items cost no await."""


async def drive(handler: Handler, payload: Any, context: RequestContext, put: Put) -> None:
    """Run `handler` to its end and `put` each item; what it raises passes through.

    An async generator is closed in every case, also if this is cancelled while it waits. So its `finally` blocks run
    here, and not when the garbage collector runs.
    """
    token = enter_request(context)
    try:
        result: Any = handler(payload, context)
        if not hasattr(result, "__aiter__"):
            result = await result
        # A coroutine may answer with a stream of its own, for example that of the next component.
        if hasattr(result, "pump"):
            await pump(result, lambda batch: _put_all(put, batch))
            return
        if not hasattr(result, "__aiter__"):
            if (catch_up := put(result)) is not None:
                await catch_up
            return
        try:
            async for item in result:
                if (catch_up := put(item)) is not None:
                    await catch_up
        finally:
            aclose = getattr(result, "aclose", None)
            if aclose is not None:
                await aclose()
    finally:
        leave_request(token)


def _put_all(put: Put, batch: Sequence[Any]) -> Awaitable[None] | None:
    catch_up: Awaitable[None] | None = None
    for item in batch:
        catch_up = put(item) or catch_up
    return catch_up
