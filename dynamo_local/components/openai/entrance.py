"""Where a burst of requests waits: what has been begun is passed on before more is begun.

Hundreds of clients may ask at the same moment. If all of them were read, tokenised and sent to workers before the loop
did anything else, the first of them would get its first token as late as the last, and no stream that runs would get a
token meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

AT_ONCE: Final = 8
"""Requests that are begun in one pass of the event loop: some six milliseconds. With fewer, tokens travel in smaller
frames, which costs more than it gains."""


class Entrance:
    """Lets `AT_ONCE` requests in at each pass of the loop, in the order in which they came."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._let_in = 0

    async def enter(self) -> None:
        """Returns when the request may be begun: at once, where few others came in this pass of the loop."""
        if self._let_in < AT_ONCE:
            self._one_more()
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    def _one_more(self) -> None:
        if self._let_in == 0:
            asyncio.get_running_loop().call_soon(self._next_pass)
        self._let_in += 1

    def _next_pass(self) -> None:
        self._let_in = 0
        while self._waiting and self._let_in < AT_ONCE:
            turn = self._waiting.popleft()
            if not turn.done():  # else it was cancelled
                turn.set_result(None)
                self._one_more()
