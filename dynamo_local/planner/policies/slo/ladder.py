"""The rungs: ways to more workers, each with its own lead and its own cost, as data. Pure.

A slow rung is taken for what is expected at its lead, a fast one for what the slow ones did not foresee. A rung that a
deployment does not have is absent; one that was there once stays, also while no worker can take it.

* A cold start (or one from a spare: the lead that was seen is what counts) brings as many as there are GPUs.
* A wake brings those that sleep. What they could bring need not be started, nor held.
* A flip brings one of the other role. So the slower rungs decide how many there are, and flips of which role.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynamo_local.core import lead_times
from dynamo_local.planner.queueing import EngineOptions
from dynamo_local.planner.values import WorkerPools

# --- options
# The options of the policy `slo` as a value. `config` checks what people write.

INTERVAL_S = 5.0
START_UP_S = 30.0
"""How long a start takes, until one was seen."""


@dataclass(frozen=True, slots=True)
class SloOptions:
    """`target` is the share of requests that is to have the first token within `ttft_ms` and a mean gap between tokens
    within `itl_ms`; `thrift` says how much a GPU must do to be held (`choosing.price`).

    `profile` is a profile's name or folder, `speed` how much faster these engines are, `engine` how they are used.
    Floors and budgets are those of the other policies. `start_up_s` is the lead until a start was seen.
    """

    profile: str
    ttft_ms: float = 500.0
    itl_ms: float = 50.0
    target: float = 0.99
    thrift: float = 1.0
    adjustment_interval_s: float = INTERVAL_S
    metric_pulling_interval_s: float = 1.0
    min_endpoint: int = 1
    min_gpu_budget: int = 1
    max_gpu_budget: int = 8
    start_up_s: float = START_UP_S
    speed: float = 1.0
    engine: EngineOptions = EngineOptions()  # noqa: RUF009 - frozen


COLD_START, WAKE, FLIP = "cold_start", "wake", "flip"
LEAD_CHANGED = 1.25
"""A lead is another one where it differs by this factor: what was learned of the old one holds until then."""
ORDER_PRICE: Mapping[str, float] = {COLD_START: 2.0, WAKE: 1.5, FLIP: 1.0}
"""What a GPU that is taken this way must be worth, in prices of one that is held: it is paid while it starts, and may
be wanted for a short while."""
LEAD_S: Mapping[str, float] = {WAKE: 5.0, FLIP: 1.0}
"""Until one was seen."""
WAKES = (lead_times.Rung.WAKE_1, lead_times.Rung.WAKE_2)
FLIPS = (lead_times.Rung.FLIP_TO_PREFILL, lead_times.Rung.FLIP_TO_DECODE)


@dataclass(frozen=True, slots=True)
class Rung:
    """`lead_s`: from the decision to a worker that serves."""

    name: str
    lead_s: float

    @property
    def order_price(self) -> float:
        return ORDER_PRICE[self.name]

    def lead_bins(self, interval_s: float) -> int:
        """In intervals: a decision that is made now is in force at the lead, and the next one an interval later."""
        return max(1, math.ceil((self.lead_s + interval_s) / interval_s - 0.5))


def rungs_of(pools: WorkerPools, options: SloOptions, before: tuple[Rung, ...] = ()) -> tuple[Rung, ...]:
    """The rungs that there are, the slowest first, with leads as they were seen (the median of the last ones)."""
    known = {rung.name: rung.lead_s for rung in before}
    found = {COLD_START: max((pool.start_up_s or 0.0 for pool in pools.all), default=0.0) or options.start_up_s}
    if WAKE in known or any(pool.asleep for pool in pools.all):
        found[WAKE] = _seen(pools, WAKES) or LEAD_S[WAKE]
    if FLIP in known or any(pool.flippable for pool in pools.all):
        found[FLIP] = _seen(pools, FLIPS) or LEAD_S[FLIP]
    return tuple(Rung(name, _steady(lead_s, known.get(name))) for name, lead_s in found.items())


def _seen(pools: WorkerPools, ways: Sequence[str]) -> float:
    return max((pool.leads.get(way, 0.0) for pool in pools.all for way in ways), default=0.0)


def _steady(lead_s: float, before: float | None) -> float:
    if before is not None and before / LEAD_CHANGED <= lead_s <= before * LEAD_CHANGED:
        return before
    return lead_s
