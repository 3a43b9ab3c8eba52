"""Time as a dependency. Everything that waits or measures takes a `Clock`."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic seconds and a sleep to an absolute deadline (which does not drift)."""

    def now_s(self) -> float:
        """Seconds on a monotonic clock with an arbitrary origin."""
        ...

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
