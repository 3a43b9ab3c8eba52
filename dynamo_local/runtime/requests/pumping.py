"""Handing a stream's items on without a task in between: whoever takes them is called as they arrive.

An `async for` over a stream costs a task switch per frame, and another resumption in each generator on the way. Where
tokens pass through five of those, that was half of their cost. `pump` calls one plain function instead.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

Take = Callable[[list[Any]], Awaitable[None] | None]
"""Takes the items that arrived together. An awaitable comes back where nothing more may be given until it is done."""


class Enough(Exception):
    """Raised by a `Take` that wants no more: the stream is closed, and `pump` raises this."""


async def pump(stream: Any, take: Take) -> None:
    """Give `take` all items until the stream's end. Raises what the stream ended with, or what `take` raised.

    A stream that has a `pump` of its own calls `take` wherever its items arrive; of any other the batches are read. The
    caller closes the stream.
    """
    own = getattr(stream, "pump", None)
    if own is not None:
        await own(take)
        return
    batches = stream.batches()
    try:
        async for batch in batches:
            if (room := take(batch)) is not None:
                await room
    finally:
        if (aclose := getattr(batches, "aclose", None)) is not None:
            await aclose()
