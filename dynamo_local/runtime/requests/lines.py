"""Requests that a worker has not taken yet: a line before each worker's endpoint, and one watch over each line.

A worker takes requests in the order in which they were sent. As long as its line moves it is busy, and not gone: what
came at once may take a starved host longer than a worker may be silent. (Seen: a thousand requests each gave their
worker up after five seconds, for another one whose line was as long, and each asked NATS four times a second whether
its worker was still there. Nothing was answered for more than a minute.)
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Final

from dynamo_local import errors
from dynamo_local.runtime.requests.listener import Offer

PROBE_INTERVAL_S: Final = 0.25
"""How soon those who wait notice that their worker, or NATS, went away meanwhile."""

REMEMBERED: Final = 256
"""Workers of which we know when they took something last; of more, those that did lately."""

Probe = Callable[["Line"], Awaitable[None]]
"""Asks NATS whether anybody serves the line's subject, and raises where NATS itself is away; the reply goes to
`Line.refuse`."""


class _Waiting:
    """One request in a line. `since_s` is when it came, or when the line moved last before it, in the line's time;
    `connection` is the number of the NATS connection that has it."""

    __slots__ = ("connection", "number", "offer", "since_s")

    def __init__(self, number: int, offer: Offer, since_s: float, connection: int) -> None:
        self.number = number
        self.offer = offer
        self.since_s = since_s
        self.connection = connection


class Line:
    """Offers to one endpoint of one worker, in the order in which they were sent.

    Its time goes on with its watch: what our own event loop was late is no silence of the worker, as we could not have
    heard anything.
    """

    def __init__(self, subject: str, name: str, interval_s: float, clock_s: Callable[[], float]) -> None:
        self.subject = subject
        self.name = name
        self.timer: asyncio.TimerHandle | None = None
        self._interval_s = interval_s
        self._clock_s = clock_s
        self._numbers = itertools.count()
        self._waiting: dict[Offer, _Waiting] = {}
        self._moves: list[tuple[int, float]] = []
        self._time_s = 0.0
        self._ticked_s = clock_s()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def now_s(self) -> float:
        """Of the line's time."""
        return self._time_s + min(self._clock_s() - self._ticked_s, 2 * self._interval_s)

    def join(self, offer: Offer, connection: int) -> None:
        """To the end of it."""
        self._waiting[offer] = _Waiting(next(self._numbers), offer, self.now_s, connection)

    def leave(self, offer: Offer, *, taken: bool) -> None:
        """It is waited for no longer. `taken`: by the worker, so that all behind it have moved up."""
        waiting = self._waiting.pop(offer)
        if taken:
            self._moves.append((waiting.number, self.now_s))

    def open(self) -> list[Offer]:
        """Those that have no answer yet."""
        return [offer for offer in self._waiting if not offer.answer.done()]

    def tick(self, silence_s: float) -> list[Offer]:
        """Those before which nobody was taken for so long, nor they themselves."""
        self._time_s, self._ticked_s = self.now_s, self._clock_s()
        moves, self._moves = sorted(self._moves), []
        at, moved_s = 0, 0.0
        silent = []
        for waiting in self._waiting.values():
            while at < len(moves) and moves[at][0] < waiting.number:
                moved_s = max(moved_s, moves[at][1])
                at += 1
            waiting.since_s = max(waiting.since_s, moved_s)
            if self._time_s - waiting.since_s >= silence_s and not waiting.offer.answer.done():
                silent.append(waiting.offer)
        return silent

    def refuse(self, why: Callable[[str], errors.DynamoError], *, unless_of: int | None = None) -> None:
        """All that still wait; not those that were sent over that connection. `why` is given the worker's name."""
        for waiting in self._waiting.values():
            if waiting.connection != unless_of:
                waiting.offer.refuse(why(waiting.offer.who))


class Lines:
    """All of one caller's. A worker that is silent for `silence_s` has its offers refused with `silent`."""

    def __init__(self, silence_s: float, silent: Callable[[str], errors.WorkerLost], probe: Probe) -> None:
        self._silence_s = silence_s
        self._silent = silent
        self._probe = probe
        self._interval_s = min(PROBE_INTERVAL_S, silence_s / 2)
        self._lines: dict[str, Line] = {}
        self._taken_s: dict[str, float] = {}
        self._probing: set[asyncio.Task[None]] = set()
        self._names = itertools.count(1)

    @contextmanager
    def waiting(self, offer: Offer, connection: int) -> Iterator[None]:
        """While the offer waits to be taken. `connection` is the number of the NATS connection that has it."""
        line = self._lines.get(offer.subject)
        if line is None:
            name, clock_s = f"line-{next(self._names)}", asyncio.get_running_loop().time
            line = self._lines[offer.subject] = Line(offer.subject, name, self._interval_s, clock_s)
            self._tick_later(line)
        line.join(offer, connection)
        try:
            yield
        finally:
            answer = offer.answer
            taken = answer.done() and not answer.cancelled() and answer.exception() is None
            line.leave(offer, taken=taken)
            if taken:
                self.took(offer.subject)
            if not line:
                del self._lines[offer.subject]
                if line.timer is not None:
                    line.timer.cancel()

    def took(self, subject: str) -> None:
        """That worker has taken a request, in a line or not."""
        self._taken_s.pop(subject, None)
        self._taken_s[subject] = asyncio.get_running_loop().time()
        if len(self._taken_s) > REMEMBERED:
            del self._taken_s[next(iter(self._taken_s))]

    def is_taking(self, subject: str) -> bool:
        """Whether that worker has taken a request lately: it is busy then, and does not hang."""
        taken_s = self._taken_s.get(subject)
        return taken_s is not None and asyncio.get_running_loop().time() - taken_s < self._silence_s

    def named(self, name: str) -> Line | None:
        """The line whose probe has this name."""
        return next((line for line in self._lines.values() if line.name == name), None)

    async def close(self) -> None:
        """Watch no longer; whoever waits is refused by the listener."""
        for line in self._lines.values():
            if line.timer is not None:
                line.timer.cancel()
        for task in self._probing:
            task.cancel()
        if self._probing:
            await asyncio.wait(self._probing)

    def _tick_later(self, line: Line) -> None:
        line.timer = asyncio.get_running_loop().call_later(self._interval_s, self._tick, line)

    def _tick(self, line: Line) -> None:
        for offer in line.tick(self._silence_s):
            offer.refuse(self._silent(offer.who))
        self._tick_later(line)
        if line.open():
            task = asyncio.create_task(self._probed(line), name=f"probe of {line.subject}")
            self._probing.add(task)
            task.add_done_callback(self._probing.discard)

    async def _probed(self, line: Line) -> None:
        try:
            await self._probe(line)
        except errors.NatsUnavailable as error:
            why = str(error)
            line.refuse(lambda _: errors.NatsUnavailable(why))
