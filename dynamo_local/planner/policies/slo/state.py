"""The policy's state, as an immutable value, and how it absorbs an observation. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dynamo_local.core.types import Missing
from dynamo_local.planner.policies.slo.corrections import Factors, Served
from dynamo_local.planner.policies.slo.forecast import ENDED_MIN, REQUESTS, WINDOWS_S, Outlook, Scenario
from dynamo_local.planner.policies.slo.hindsight import MEMORY_S, Hindsight, Turn
from dynamo_local.planner.policies.slo.scaling_options import INTERVAL_S, Fleet, Moment, ScalingOption
from dynamo_local.planner.queueing import Demand
from dynamo_local.planner.values import Ended, FixedFleet, Observation, Reading, Requests, Traffic


def clearing(reading: Reading, rate: float, ttft_s: float, within_s: float) -> float:
    """Requests per second, beyond those that come, that clear within `within_s` what waits too long already: more than
    come in `ttft_s`. 0 where it is not known what waits."""
    if isinstance(reading.queue, Missing):
        return 0.0
    waiting = (reading.queue or 0.0) + reading.kv.waiting
    return max(0.0, waiting - rate * ttft_s) / within_s


BINS_MAX = 720
"""Rates of so many intervals are remembered: an hour."""
ENDED_MAX = 4000
REPLAYED_MAX = 60
"""A new lead's outlook begins with so many intervals of the past: more would take the arbiter's loop too long."""
MEAN_BINS = MEMORY_S / INTERVAL_S
"""Over so many intervals the mean rate and the mean fleet are taken (exponentially, at first over what there is). It is
the memory of the past: otherwise in silence GPUs would get cheaper than what they saved is forgotten."""


@dataclass(frozen=True, slots=True)
class Means:
    """Mean rate (requests/s) and mean number of GPUs, of `bins` intervals at most `MEAN_BINS`."""

    rate: float = 0.0
    gpus: float = 0.0
    bins: int = 0

    def after(self, rate: float, gpus: float) -> Means:
        """With one more interval."""
        share = max(1.0 / (self.bins + 1), 1.0 / MEAN_BINS)
        return Means(self.rate + share * (rate - self.rate), self.gpus + share * (gpus - self.gpus), self.bins + 1)


@dataclass(frozen=True, slots=True)
class SloState:
    """`began_s` and `due_s` are of the interval that is under way.

    `rates` are those of the intervals, the newest first. `began` are the last arrivals and `ended` the last answers,
    ascending. `demands` were taken at `demands_at_s`, when an answer took `answer_s` in the mean.

    Each scaling option has an entry in `outlooks`, `scenarios` (with `clearing`), `expected` (at its lead time) and
    `moments`. These are the moments from now to the lead time, the next one first, as former decisions expected them.

    `served` are the workers of the last minutes. `past` judges the recorded requests. `fixed` are the best fixed fleets
    of the last hour and day. `turn` compares both shapes of the graph. `price_factor` is the price that the past has
    led to, in prices of a mean GPU. `ruled` is the fleet that the rule wants; `chosen` has the workers that the past
    would have held besides. `clearing` is the rate (requests/s) beyond the expected one that removes waiting requests.
    `part` of the load is planned for: all of it, unless it is more than the budget can serve.
    `first` is the initial fleet, a floor until `first_until_s`.
    `held` says why this tick plans nothing (rule, sentence). `flips` of its decode workers were prefill workers
    (negative: the other way).
    """

    began_s: float
    due_s: float
    rates: tuple[float, ...] = ()
    began: tuple[float, ...] = ()
    ended: tuple[Ended, ...] = ()
    scaling_options: tuple[ScalingOption, ...] = ()
    outlooks: tuple[Outlook, ...] = ()
    demands: tuple[Demand, ...] = ()
    demands_at_s: float = float("-inf")
    answer_s: float = 0.0
    demands_for: Factors = Factors()  # noqa: RUF009 - frozen
    moments: tuple[tuple[Moment, ...], ...] = ()
    means: Means = Means()
    factors: Factors = Factors()  # noqa: RUF009 - frozen
    served: tuple[Served, ...] = ()
    past: Hindsight | None = None
    fixed: tuple[FixedFleet, ...] = ()
    turn: Turn | None = None
    price_factor: float = 1.0
    clearing: float = 0.0
    part: float = 1.0
    scenarios: tuple[tuple[Scenario, ...], ...] = ()
    first: Fleet | None = None
    first_until_s: float = 0.0
    held: tuple[str, str] | None = None
    expected: tuple[Moment, ...] = ()
    ruled: Fleet | None = None
    chosen: Fleet | None = None
    flips: int = 0
    decided: tuple[float, tuple[Reading, ...]] = (0.0, ())

    @property
    def ruling_past(self) -> Hindsight | None:
        """The past, unless nothing was judged for so long that it rules no more."""
        return None if self.past is None or self.past.is_stale(self.began_s) else self.past


def seen_requests(observation: Observation) -> Requests | Missing:
    """The interval's requests one by one; where they are only counted together, as many equal ones, evenly spread."""
    if observation.blind is not None:
        return Missing(observation.blind)
    if observation.requests is not None:
        return observation.requests
    traffic = observation.traffic
    if not isinstance(traffic, Traffic):
        return Missing("nobody was asked") if traffic is None else traffic
    if isinstance(traffic.num_req, Missing):
        return traffic.num_req
    if traffic.duration_s <= 0:
        return Missing("a window of no length was counted")
    return _evenly(traffic, traffic.num_req)


def _evenly(traffic: Traffic, num_req: float) -> Requests:
    since_s = traffic.at_s - traffic.duration_s
    count = round(num_req)
    began = tuple(since_s + traffic.duration_s * (number + 0.5) / count for number in range(count))
    isl, osl = traffic.isl, traffic.osl
    if isinstance(isl, Missing) or isinstance(osl, Missing):
        return Requests(since_s, traffic.at_s, began)
    ttft_s = None if isinstance(traffic.ttft_ms, Missing) else traffic.ttft_ms / 1000
    itl_s = None if isinstance(traffic.itl_ms, Missing) else traffic.itl_ms / 1000
    one = Ended(traffic.at_s, max(1, round(isl)), max(1, round(osl)), ttft_s, itl_s)
    return Requests(since_s, traffic.at_s, began, (one,) * max(1, count))


def with_requests(state: SloState, seen: Requests, gpus: int) -> SloState:
    """One more interval in the history. After an answer that came late, the next one covers its time, too."""
    span_s = seen.at_s - seen.since_s
    if span_s <= 0:
        return state
    rate = len(seen.began) / span_s
    silent = not state.rates and rate == 0  # when the service was switched on says nothing about its load
    rates = state.rates if silent else (rate, *state.rates[: BINS_MAX - 1])
    oldest_s = seen.at_s - WINDOWS_S[-1]
    before = state.ended[: bisect_right(state.ended, seen.since_s, key=lambda each: each.at_s)]
    ended = (*before, *seen.ended)[-ENDED_MAX:]
    first = min(bisect_right(ended, oldest_s, key=lambda each: each.at_s), max(0, len(ended) - ENDED_MIN))
    return replace(
        state,
        rates=rates,
        began=(*state.began[: bisect_right(state.began, seen.since_s)], *seen.began)[-REQUESTS - 1 :],
        ended=ended[first:],
        outlooks=state.outlooks if silent else tuple(each.after(rates) for each in state.outlooks),
        means=state.means if silent else state.means.after(rate, gpus),
    )


def with_scaling_options(state: SloState, scaling_options: tuple[ScalingOption, ...], interval_s: float) -> SloState:
    """These are the scaling options. An outlook at another lead begins with what is remembered of the rates; the
    moments of a scaling option that was there stay."""
    known = {outlook.lead_bins: outlook for outlook in state.outlooks}
    outlooks = []
    for scaling_option in scaling_options:
        bins = scaling_option.lead_bins(interval_s)
        outlooks.append(known[bins] if bins in known else _replayed(bins, state.rates))
    before = {
        scaling_option.name: moments
        for scaling_option, moments in zip(state.scaling_options, state.moments, strict=False)
    }
    moments = tuple(before.get(scaling_option.name, ()) for scaling_option in scaling_options)
    return replace(state, scaling_options=scaling_options, outlooks=tuple(outlooks), moments=moments)


def _replayed(lead_bins: int, rates: Sequence[float]) -> Outlook:
    outlook = Outlook(lead_bins)
    for newest in range(min(len(rates), REPLAYED_MAX) - 1, -1, -1):
        outlook = outlook.after(rates[newest:])
    return outlook
