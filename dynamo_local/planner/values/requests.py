"""Requests one by one, for policies to which means say too little."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that was answered at `at_s` (planner's clock): its tokens, and its latencies in seconds (None: not
    known). `itl_s` is the mean gap between its own tokens."""

    at_s: float
    isl: int
    osl: int
    ttft_s: float | None = None
    itl_s: float | None = None

    @property
    def lasted_s(self) -> float:
        """From its arrival to its end, as far as that is known."""
        return (self.ttft_s or 0.0) + (self.itl_s or 0.0) * max(0, self.osl - 1)


@dataclass(frozen=True, slots=True)
class Requests:
    """What clients did from `since_s` to `at_s` (planner's clock, seconds): when requests began (ascending), and those
    that ended. Beginnings and ends are of different requests."""

    since_s: float
    at_s: float
    began: tuple[float, ...] = ()
    ended: tuple[Ended, ...] = ()
