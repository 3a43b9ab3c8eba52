"""The load of a chaos run: open loop, each request sent once, and what failed judged.

The client is the drain benchmark's. A request that failed with a typed, retryable error while something was broken is
sent once more when all is well again, and must then be right. Every other failure is a failure of the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from benchmarks.drain.client import ANSWER_S, Exchange, Oracle, http_request, judge, read_answer
from benchmarks.drain.trace import Ask, asks
from benchmarks.traces import conversation
from dynamo_local.errors import from_wire

ANSWER_MAX = 300
RETRIES_MAX = 5
"""How often a request may meet a new fault before the test says that it cannot be saved."""
RETRIES_AT_ONCE = 16
"""All is well again for hundreds of requests in one moment: sent all at once they would be a fault of their own."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One sending. `code` is the error's, "connection" where there was none (no answer at all), None if it is right."""

    began_s: float
    ended_s: float
    right: bool
    code: str | None = None
    why: str = ""

    @property
    def retryable(self) -> bool:
        return self.code not in (None, "connection") and from_wire({"code": self.code, "message": self.why}).retryable


@dataclass(slots=True)
class Tally:
    """The outcome of all requests. `saved` are those that a retry made right; `codes` counts first failures."""

    right: int = 0
    saved: int = 0
    codes: dict[str, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    under_way: set[int] = field(default_factory=set)

    def __str__(self) -> str:
        return f"{self.right} right at once, {self.saved} saved by a retry {self.codes}, {len(self.lost)} lost"


async def attempt(port: int, ask: Ask, oracle: Oracle) -> Attempt:
    began_s = time.monotonic()
    loop, request = asyncio.get_running_loop(), http_request(ask)
    try:
        _, exchange = await loop.create_connection(lambda: Exchange(request), "127.0.0.1", port)
    except OSError as error:
        return Attempt(began_s, time.monotonic(), False, "connection", str(error))
    try:
        why = await asyncio.wait_for(exchange.done, ANSWER_S)
    except TimeoutError:
        return Attempt(began_s, time.monotonic(), False, None, f"no end within {ANSWER_S:g} s")
    ended_s = time.monotonic()
    outcome, what, _ = judge(exchange, why, oracle, ask)
    code = {"right": None, "wrong": None, "refused": _refusal(exchange), "cut": _cut(exchange)}[outcome]
    return Attempt(began_s, ended_s, outcome == "right", code, f"{outcome}: {what}")


def _refusal(exchange: Exchange) -> str | None:
    if not exchange.whole:
        return "connection"
    try:
        code = json.loads(exchange.body)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return None
    return str(code)


def _cut(exchange: Exchange) -> str | None:
    error = read_answer(bytes(exchange.body)).error
    return "connection" if error is None and not exchange.whole else error


class Clients:
    """Sends the trace's requests when they are due, until `stop`."""

    def __init__(
        self, port: int, excused: Callable[[Attempt], bool], calm: Callable[[], Awaitable[None]], tally: Tally
    ) -> None:
        self._port = port
        self._excused = excused
        self._calm = calm
        self._oracle = Oracle()
        self.tally = tally
        self._stopped = asyncio.Event()
        self._retries = asyncio.Semaphore(RETRIES_AT_ONCE)

    def stop(self) -> None:
        self._stopped.set()

    async def run(self) -> None:
        begin_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number, ask in enumerate(asks(conversation().rows, speed=1.0, thinning=1, answer_max=ANSWER_MAX)):
                if await self._stopped_before(begin_s + ask.at_s):
                    return
                group.create_task(self._one(number, ask))

    async def _stopped_before(self, due_s: float) -> bool:
        try:
            async with asyncio.timeout(max(0.0, due_s - time.monotonic())):
                await self._stopped.wait()
        except TimeoutError:
            pass
        return self._stopped.is_set()

    async def _one(self, number: int, ask: Ask) -> None:
        self.tally.under_way.add(number)
        try:
            await self._to_its_end(number, ask)
        finally:
            self.tally.under_way.discard(number)

    async def _to_its_end(self, number: int, ask: Ask) -> None:
        tally = self.tally
        tried: list[str] = []
        while len(tried) <= RETRIES_MAX:
            async with self._retries if tried else contextlib.nullcontext():
                found = await attempt(self._port, ask, self._oracle)
            if found.right:
                tally.saved += bool(tried)
                tally.right += not tried
                return
            tried.append(f"{found.began_s:.2f}-{found.ended_s:.2f} {found.code} {found.why}")
            if not tried[1:]:
                tally.codes[str(found.code)] = tally.codes.get(str(found.code), 0) + 1
            if not self._excused(found):
                break
            await self._calm()
        tally.lost.append(f"request {number} ({ask.max_tokens} tokens): {'; then '.join(tried)}")
