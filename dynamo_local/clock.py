"""Time as a dependency. Everything that waits or measures takes a `Clock`."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class NowClock(Protocol):
    """Monotonic seconds."""

    def now_s(self) -> float:
        """Seconds on a monotonic clock with an arbitrary origin."""
        ...


class Clock(NowClock, Protocol):
    """Monotonic seconds and a sleep to an absolute deadline (which does not drift)."""

    def wall_s(self) -> float:
        """Seconds since the Unix epoch: for records and for people, never for intervals."""
        ...

    async def sleep_until(self, deadline_s: float) -> None:
        """Return at or after `deadline_s` (of `now_s`); at once, but yielding, when it has passed."""
        ...


class AsyncioClock:
    """The running event loop's clock. Under a virtual-time loop it is virtual, with the same code."""

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def wall_s(self) -> float:
        return time.time()

    async def sleep_until(self, deadline_s: float) -> None:
        await asyncio.sleep(max(0.0, deadline_s - self.now_s()))


def reader(clock: NowClock) -> Callable[[], float]:
    """`now_s` of that clock, for whoever reads it at every token: the running loop is looked up once, which takes
    Python a system call each time."""
    return asyncio.get_running_loop().time if type(clock) is AsyncioClock else clock.now_s


async def sleep_to_next(clock: Clock, every_s: float) -> None:
    """Return when the clock next shows a multiple of `every_s`, half of `every_s` from now at the earliest.

    For looks that are taken regularly: those of one period are taken in one go, so that a process with nothing to do
    wakes once for all of them.
    """
    await clock.sleep_until((round(clock.now_s() / every_s) + 1) * every_s)


HOLD_MAX_S = 0.002
"""Long work on the event loop lets others have it after so long: nobody is to wait for 5 ms."""


class Turns:
    """For a loop over many things, each of which takes some time: `await turns.next()` between two of them."""

    def __init__(self, hold_max_s: float = HOLD_MAX_S) -> None:
        self._hold_max_s = hold_max_s
        self._began_s = asyncio.get_running_loop().time()

    async def next(self) -> None:
        """Lets others have the loop, once this has had it for long enough."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._began_s >= self._hold_max_s:
            await asyncio.sleep(0)
            self._began_s = loop.time()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose time stands still while anything is ready, and jumps to the next timer when nothing is.

    An hour of timers passes in milliseconds, in the same order every time. It is for code that waits for timers and
    for itself only: a socket or a thread takes real time, in which virtual time would run away. When every task waits
    and no timer is set, nothing can ever happen: that is an error (`VirtualDeadlock`), not a hang.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._virtual = _JumpingSelector(start_s)
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now_s


class VirtualDeadlock(RuntimeError):
    """All tasks of a `VirtualTimeLoop` wait, and no timer is set."""


class _JumpingSelector(selectors.DefaultSelector):
    """Never waits: a time-out passes at once, on the virtual clock."""

    def __init__(self, start_s: float) -> None:
        super().__init__()
        self.now_s = start_s

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise VirtualDeadlock("every task waits for another, and no timer is set: virtual time cannot go on")
        self.now_s += timeout
        return ready


def run_virtual(main: Coroutine[Any, Any, T], *, start_s: float = 0.0) -> T:
    """`asyncio.run` on a `VirtualTimeLoop`: the result of `main`, without waiting for its sleeps."""
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(start_s)) as runner:
        return runner.run(main)
