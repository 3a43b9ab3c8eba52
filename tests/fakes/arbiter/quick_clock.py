"""A clock on which every sleep is over at once, for loops whose work is real: files, threads."""

from __future__ import annotations

import asyncio


class QuickClock:
    """Time goes on by sleeping, and by nothing else. `slept_s` are the sleeps so far."""

    def __init__(self) -> None:
        self.at_s = 0.0
        self.slept_s: list[float] = []

    def now_s(self) -> float:
        return self.at_s

    def wall_s(self) -> float:
        return 1.8e9 + self.at_s

    async def sleep_until(self, deadline_s: float) -> None:
        self.slept_s.append(max(0.0, deadline_s - self.at_s))
        self.at_s = max(self.at_s, deadline_s)
        await asyncio.sleep(0)
