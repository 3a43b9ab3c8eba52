"""A clock that stands still until the test moves it."""

from __future__ import annotations


class HandClock:
    """Time is what the test says."""

    def __init__(self) -> None:
        self.at_s = 50.0

    def now_s(self) -> float:
        return self.at_s

    def wall_s(self) -> float:
        return 1.8e9 + self.at_s

    async def sleep_until(self, deadline_s: float) -> None:
        raise AssertionError("nothing here sleeps")
