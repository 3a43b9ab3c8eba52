"""Clients of a graph: so many requests per second, which grow and fall again, as a frontend would count them."""

from __future__ import annotations

from collections.abc import Callable

from dynamo_local.clock import NowClock
from dynamo_local.core.types import Missing
from dynamo_local.planner.values import Traffic


class Demand:
    """`TrafficSource`. `rate` gives requests per second at a time; `silent` says why nobody knows. Latencies are not
    measured: what is planned follows from the requests alone."""

    def __init__(self, clock: NowClock, rate: Callable[[float], float], *, isl: float, osl: float) -> None:
        self.isl, self.osl = isl, osl
        self.silent: str | None = None
        self._clock = clock
        self._rate = rate

    async def traffic(self, window_s: float) -> Traffic | Missing:
        """The window that ends now. Without a request there are no means."""
        if self.silent is not None:
            return Missing(self.silent)
        now_s = self._clock.now_s()
        num_req = sum(self._rate(now_s - back_s) for back_s in range(round(window_s)))
        if not num_req:
            none = Missing("no request in the window")
            return Traffic(now_s, window_s, 0.0, none, none)
        return Traffic(now_s, window_s, num_req, self.isl, self.osl)
