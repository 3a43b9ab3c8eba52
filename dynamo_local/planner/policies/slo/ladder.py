"""The rungs: ways to more workers, each with its own lead and its own cost, as data. Pure.

A slow rung is taken for what is expected at its lead, a fast one for what the slow ones did not foresee. Today there is
one, the cold start; a rung that a deployment does not have is absent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dynamo_local.planner.policies.slo.options import SloOptions
from dynamo_local.planner.values.pools import WorkerPools

COLD_START = "cold_start"
LEAD_CHANGED = 1.25
"""A lead is another one where it differs by this factor: what was learned of the old one holds until then."""


@dataclass(frozen=True, slots=True)
class Rung:
    """`lead_s`: from the decision to a worker that serves. `order_price`: what a GPU that is taken this way must be
    worth, in prices of one that is held (more than 1: it is paid while it starts, and may be wanted for a short while).
    `available`: workers that can be had this way, None for as many as there are GPUs."""

    name: str
    lead_s: float
    order_price: float
    available: int | None = None

    def lead_bins(self, interval_s: float) -> int:
        """In intervals: a decision that is made now is in force at the lead, and the next one an interval later."""
        return max(1, math.ceil((self.lead_s + interval_s) / interval_s - 0.5))


ORDER_PRICE = 2.0


def rungs_of(pools: WorkerPools, options: SloOptions, before: tuple[Rung, ...] = ()) -> tuple[Rung, ...]:
    """The rungs that there are, the slowest first, with leads as they were seen (the median of the last starts)."""
    seen = max((pool.start_up_s or 0.0 for pool in pools.all), default=0.0)
    lead_s = seen or options.start_up_s
    known = next((rung for rung in before if rung.name == COLD_START), None)
    if known is not None and known.lead_s / LEAD_CHANGED <= lead_s <= known.lead_s * LEAD_CHANGED:
        lead_s = known.lead_s
    return (Rung(COLD_START, lead_s, ORDER_PRICE),)
