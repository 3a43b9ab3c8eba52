"""Running a handler: the same code for the real server and for the fake one of the component tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from dynamo_local.runtime.requests.context import RequestContext, enter_request, leave_request
from dynamo_local.runtime.requests.pumping import pump

Handler = Callable[[Any, RequestContext], AsyncIterator[Any] | Awaitable[Any]]
"""An async generator function, or a coroutine function (whose one value becomes a stream of one item)."""

Put = Callable[[Any], Awaitable[None] | None]
"""Takes one item. Returns an awaitable only if the receiver must catch up first: most items cost no await."""


async def drive(handler: Handler, payload: Any, context: RequestContext, put: Put) -> None:
    """Run `handler` to its end and `put` each item; what it raises passes through.

    However this ends (also if cancelled while it waits for space), an async generator is closed, so that its
    `finally` blocks run here and not when the garbage collector runs.
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
            if (room := put(result)) is not None:
                await room
            return
        try:
            async for item in result:
                if (room := put(item)) is not None:
                    await room
        finally:
            aclose = getattr(result, "aclose", None)
            if aclose is not None:
                await aclose()
    finally:
        leave_request(token)


def _put_all(put: Put, batch: Sequence[Any]) -> Awaitable[None] | None:
    room: Awaitable[None] | None = None
    for item in batch:
        room = put(item) or room
    return room
