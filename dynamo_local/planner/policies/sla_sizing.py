"""How many engines a demand needs: the formulas of Dynamo's SLA planner, on numbers.

    prefill:  requests × ISL / interval × min(1, p_corr)  /  tokens/s of an engine with prompts of that length
    decode:   requests × OSL / interval  /  the most tokens/s of an engine within ITL target / d_corr,
              at a context of ISL + OSL / 2

A correction factor is what was measured over what the profile expects. A factor for prefill above 1 means that prompts
waited for each other. Such a factor does not make an engine slower, and adds nothing.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from dynamo_local.core.types import Missing, floor_workers
from dynamo_local.planner.policies.budget import fitting
from dynamo_local.planner.values import Counterfactual, Prediction, Traffic

_ROUNDING = 1e-9
"""So much of an engine is none: 3.0000000001 engines are three."""


class Estimated(Protocol):
    """A value of a profile, and whether it lies outside of what was measured."""

    @property
    def value(self) -> float:
        """Milliseconds, or tokens/s per GPU."""
        ...

    @property
    def extrapolated(self) -> bool:
        """Whether nothing as long, or as loaded, was measured."""
        ...


class Found(Estimated, Protocol):
    """The most that an engine does within a target."""

    @property
    def concurrency(self) -> float:
        """Requests that are in it then."""
        ...

    @property
    def itl_ms(self) -> float:
        """Its ITL then."""
        ...

    @property
    def attainable(self) -> bool:
        """False where a single request misses the target already."""
        ...


class PrefillModel(Protocol):
    """`profiles.PrefillInterpolator`."""

    def interpolate_ttft(self, isl: float) -> Estimated:
        """Milliseconds until the first token of a prompt that waits for nobody."""
        ...

    def interpolate_thpt_per_gpu(self, isl: float) -> Estimated:
        """Prompt tokens per second and GPU."""
        ...


class DecodeModel(Protocol):
    """`profiles.DecodeInterpolator`."""

    def interpolate_itl(self, concurrency: float, context_length: float) -> Estimated:
        """Milliseconds per token."""
        ...

    def find_best_throughput_per_gpu(self, itl: float, context_length: float) -> Found:
        """Tokens per second and GPU within that ITL (ms)."""
        ...


@dataclass(frozen=True, slots=True)
class Corrections:
    """Measured over expected: of TTFT (`prefill`) and of ITL (`decode`). 1: as the profile says, or not known."""

    prefill: float = 1.0
    decode: float = 1.0


@dataclass(frozen=True, slots=True)
class Need:
    """The demand of one role, and the capacity of one engine.

    `tokens_per_request` of each request count as load (discounted already); `engine_tokens_per_s` is one engine's
    throughput, `expected_ms` its TTFT or ITL at that, against `target_ms` (for decode the corrected one).
    """

    tokens_per_request: float
    engine_tokens_per_s: float
    expected_ms: float
    target_ms: float
    attainable: bool
    extrapolated: bool

    def load(self, num_req: float, interval_s: float) -> float:
        """Tokens per second."""
        return num_req * self.tokens_per_request / interval_s

    def engines(self, num_req: float, interval_s: float) -> int:
        """The fewest engines that carry the load."""
        return max(0, math.ceil(self.load(num_req, interval_s) / self.engine_tokens_per_s - _ROUNDING))

    def requests_per_engine(self, interval_s: float) -> float:
        """So many requests in the interval keep one engine busy."""
        return self.engine_tokens_per_s * interval_s / max(self.tokens_per_request, 1e-12)

    def edge(self, num_req: float, interval_s: float) -> float:
        """The number of requests nearest to this one at which it takes one engine more, up to rounding."""
        one = self.requests_per_engine(interval_s)
        return one * (max(0, round(num_req / one)) + _ROUNDING)


def corrected(
    before: Corrections, traffic: Traffic, decode_workers: int, prefill: PrefillModel, decode: DecodeModel
) -> Corrections:
    """The factors after that window. One that cannot be computed stays as it was."""
    return Corrections(
        prefill=_of_prefill(traffic, prefill) or before.prefill,
        decode=_of_decode(traffic, decode_workers, decode) or before.decode,
    )


def _of_prefill(traffic: Traffic, prefill: PrefillModel) -> float | None:
    isl, ttft_ms = known(traffic.isl), known(traffic.ttft_ms)
    if not isl or not ttft_ms:
        return None
    return ttft_ms / prefill.interpolate_ttft(isl).value


def _of_decode(traffic: Traffic, workers: int, decode: DecodeModel) -> float | None:
    """Decode correction. Each engine holds rate × duration requests (Little's law)."""
    isl, osl, itl_ms = known(traffic.isl), known(traffic.osl), known(traffic.itl_ms)
    num_req, lasted_s = known(traffic.num_req), known(traffic.request_duration_s)
    if not isl or not itl_ms or not num_req or not lasted_s or osl is None or workers < 1 or traffic.duration_s <= 0:
        return None
    concurrency = num_req / workers * lasted_s / traffic.duration_s
    return itl_ms / decode.interpolate_itl(concurrency, isl + osl / 2).value


def known(value: float | Missing | None) -> float | None:
    """The measurement; None where there is none, or where it is no number from 0 on."""
    if value is None or isinstance(value, Missing) or not math.isfinite(value) or value < 0:
        return None
    return value


def prefill_need(next_isl: float, factor: float, ttft_ms: float, gpus: int, model: PrefillModel) -> Need:
    """For prompts of `next_isl` tokens, on engines of so many GPUs."""
    alone, thpt = model.interpolate_ttft(next_isl), model.interpolate_thpt_per_gpu(next_isl)
    return Need(
        tokens_per_request=next_isl * min(1.0, factor),
        engine_tokens_per_s=thpt.value * max(1, gpus),
        expected_ms=alone.value,
        target_ms=ttft_ms,
        attainable=alone.value <= ttft_ms,
        extrapolated=thpt.extrapolated,
    )


def decode_need(context: float, next_osl: float, factor: float, itl_ms: float, gpus: int, model: DecodeModel) -> Need:
    """For answers of `next_osl` tokens at a mean context of `context`, on engines of so many GPUs."""
    target_ms = itl_ms / (factor if factor > 0 else 1.0)
    best = model.find_best_throughput_per_gpu(target_ms, context)
    return Need(
        tokens_per_request=next_osl,
        engine_tokens_per_s=best.value * max(1, gpus),
        expected_ms=best.itl_ms,
        target_ms=target_ms,
        attainable=best.attainable,
        extrapolated=best.extrapolated,
    )


def complete(prediction: Prediction | None) -> tuple[float, float, float] | None:
    """Requests, ISL and OSL of a prediction that has all three; None otherwise."""
    if prediction is None:
        return None
    num_req, isl, osl = known(prediction.num_req), known(prediction.isl), known(prediction.osl)
    if num_req is None or not isl or not osl:
        return None
    return num_req, isl, osl


# --- bounds
# From the engines that are needed to the workers that there will be: floors, budget, the longest step, and which of
# them decided.


class SlaRule(enum.StrEnum):
    """The rule that decided about a role, under Dynamo's name if it has one."""

    SCALE = "scale"
    """As many workers as the expected demand needs."""
    NO_CHANGE = "no_change"
    """There are as many as it needs."""
    MIN_ENDPOINT = "min_endpoint"
    """It needs fewer than there always are."""
    MAX_STEP = "max_throughput_scaling_replicas"
    """It needs a longer step than is taken at once."""
    MAX_GPU_BUDGET = "max_gpu_budget"
    """It needs more GPUs than there may be."""
    OVERRIDDEN = "overridden"
    """A plugin wanted another number, or rejected this one."""
    NO_TRAFFIC_DATA = "no_traffic_data"
    """The traffic is not known, or no request has come yet."""
    PREDICT_FAILED = "predict_failed"
    """There is no forecast."""
    SCALING_IN_PROGRESS = "scaling_in_progress"
    """Another environment has yet to acknowledge the last decision."""
    DISAGGREGATED_ONLY = "disaggregated_only"
    """The graph has no prefill workers of its own."""


class Side(NamedTuple):
    """One role. `wanted` are the workers that a plugin asks for in place of those that the `need` says (None: nobody).
    Without either it stays as it is."""

    component: str
    capacity: int
    gpus_per_worker: int
    need: Need | None
    wanted: int | None = None


class Facts(NamedTuple):
    """All numbers of one decision; `sides` are prefill and decode."""

    sides: tuple[Side, Side]
    next_num_req: float
    interval_s: float
    min_endpoint: int
    min_gpu_budget: int
    max_gpu_budget: int
    max_step: int

    def floor(self, side: Side) -> int:
        """The fewest workers of that role."""
        return max(self.min_endpoint, floor_workers(self.min_gpu_budget, side.gpus_per_worker))


class Verdict(NamedTuple):
    """`engines` were wanted, `target` are to be, by that rule."""

    rule: SlaRule
    engines: int
    target: int


def judge(facts: Facts) -> tuple[Verdict, Verdict]:
    """One verdict for each side, in their order."""
    prefill, decode = facts.sides
    wanted = (_wanted(prefill, facts), _wanted(decode, facts))
    of_prefill, of_decode = _stepped(prefill, wanted[0], facts), _stepped(decode, wanted[1], facts)
    fits = fitting(
        (of_prefill[0], of_decode[0]),
        (facts.floor(prefill), facts.floor(decode)),
        (prefill.gpus_per_worker, decode.gpus_per_worker),
        facts.max_gpu_budget,
    )
    if fits is None:  # not even the floors fit: nothing can be right, so nothing is changed
        return (
            Verdict(SlaRule.MAX_GPU_BUDGET, wanted[0], prefill.capacity),
            Verdict(SlaRule.MAX_GPU_BUDGET, wanted[1], decode.capacity),
        )
    return _verdict(prefill, wanted[0], of_prefill, fits[0]), _verdict(decode, wanted[1], of_decode, fits[1])


def _wanted(side: Side, facts: Facts) -> int:
    if side.wanted is not None:
        return side.wanted
    return side.capacity if side.need is None else side.need.engines(facts.next_num_req, facts.interval_s)


def _stepped(side: Side, wanted: int, facts: Facts) -> tuple[int, SlaRule | None]:
    """At most so many more, or fewer, and not below the floor; with what kept it from being `wanted`."""
    near = min(max(wanted, side.capacity - facts.max_step), side.capacity + facts.max_step)
    floor = facts.floor(side)
    if near < floor:
        return floor, SlaRule.MIN_ENDPOINT
    return near, None if near == wanted else SlaRule.MAX_STEP


def _verdict(side: Side, wanted: int, stepped: tuple[int, SlaRule | None], target: int) -> Verdict:
    number, bound = stepped
    if target < number:
        return Verdict(SlaRule.MAX_GPU_BUDGET, wanted, target)
    if bound is not None:
        return Verdict(bound, wanted, target)
    if side.wanted is not None:
        return Verdict(SlaRule.OVERRIDDEN, wanted, target)
    return Verdict(SlaRule.NO_CHANGE if target == side.capacity else SlaRule.SCALE, wanted, target)


# --- options
# The SLA planner's options as a value. `config` checks what people write, and has Dynamo's names for them.


# --- words
# The numbers of a reason of the SLA planner as a sentence.


def why(rule: SlaRule, numbers: Mapping[str, float]) -> str:
    """`7,200 requests of 3,000 tokens in 180 s: 120,000 tokens/s; an engine does 48,981 tokens/s: 3 wanted, 1 there`"""
    if "engine_tokens_per_s" not in numbers:
        if rule is SlaRule.NO_CHANGE:
            return "nobody asked for another number"
        reported = "what the demand needs is not known"
    else:
        reported = f"{_load(numbers)}; an engine does {_tokens(numbers['engine_tokens_per_s'])}{_bound(numbers)}: "
        reported += f"{numbers['engines']:g} wanted"
    if rule is SlaRule.MIN_ENDPOINT:
        return f"{reported}, but there are never fewer than {numbers['workers_min']:g}"
    if rule is SlaRule.MAX_STEP:
        return f"{reported}, {numbers['workers']:g} there, but one step is at most {numbers['max_step']:g}"
    if rule is SlaRule.MAX_GPU_BUDGET:
        return f"{reported}, but both roles share {numbers['max_gpu_budget']:g} GPUs"
    if rule is SlaRule.OVERRIDDEN:
        return f"{reported}, but a plugin asked for {numbers['workers_wanted']:g}"
    return f"{reported}, {'as many' if rule is SlaRule.NO_CHANGE else format(numbers['workers'], 'g')} there"


def _load(numbers: Mapping[str, float]) -> str:
    """`7,200 requests of 3,000 tokens in 180 s × 0.4 (TTFT measured / expected): 48,000 tokens/s`"""
    prefill = "p_correction" in numbers
    length = numbers["next_isl" if prefill else "next_osl"]
    reported = (
        f"{numbers['next_num_req']:,.6g} requests of {length:,.6g} tokens in {numbers['adjustment_interval_s']:g} s"
    )
    if prefill and numbers["p_correction"] < 1:
        reported += f" × {numbers['p_correction']:.3g} (TTFT measured / expected)"
    return f"{reported}: {_tokens(numbers['load_tokens_per_s'])}"


def _bound(numbers: Mapping[str, float]) -> str:
    """Under which target a decode engine does that."""
    if "d_correction" not in numbers:
        return ""
    reported = f" within ITL {numbers['itl_ms']:g} ms"
    if numbers["d_correction"] != 1:
        reported += f" / {numbers['d_correction']:.3g} (measured / expected)"
    return f"{reported} at {numbers['context_length']:,.6g} tokens"


def _tokens(value: float) -> str:
    return f"{value:,.0f} tokens/s"


# --- counterfactuals
# The nearest change of one number that would have decided otherwise, each proved by judging again.
#
# Candidates are `next_num_req` (the forecast), `max_gpu_budget`, `min_endpoint` and `max_step`. *Nearest* is the
# smallest
# change relative to the larger of both values, as for the load planner. With `needed` the component's step is `step`;
# one
# short of it (the next float, or one less of what is counted) it is still what was decided.

_LOOK_AT = 16
"""So many changes of either role are looked at in each direction: one that is farther off tells nobody anything."""

_NEAR = 1e-13
"""A share of the requests: rounding moves a change by less."""

Step = Callable[[Facts], int]


def nearest(facts: Facts, index: int) -> Counterfactual | None:
    """For the side of that index. None where no single number would have changed its step."""
    side = facts.sides[index]

    def step(other: Facts) -> int:
        return judge(other)[index].target - side.capacity

    found = [*_by_requests(facts, step)]
    for name, numbers in _counts(facts).items():
        found += _by_count(facts, name, numbers, step)
    return min(found, key=_size, default=None)


def _size(other: Counterfactual) -> float:
    return abs(other.needed - other.value) / max(abs(other.needed), abs(other.value))


def _by_requests(facts: Facts, step: Step) -> Iterator[Counterfactual]:
    """Fewer, and more. Between two of the `_edges` every number of requests needs the same engines."""
    now = step(facts)
    for edges in (_edges(facts, -1), _edges(facts, +1)):
        before = facts.next_num_req
        for at in edges:
            other = step(facts._replace(next_num_req=at))
            if other != now:
                yield _exactly(facts, before, at, now, step)
                break
            before = at


def _edges(facts: Facts, direction: int) -> list[float]:
    """Numbers of requests, going away from the forecast, with one change of one role's engines between two of them."""
    changes = set()
    for side in facts.sides:
        if side.need is None or side.wanted is not None:
            continue
        engine = side.need.requests_per_engine(facts.interval_s)
        first = math.floor(facts.next_num_req / engine) + (direction > 0)
        changes |= {engine * (first + direction * n) for n in range(_LOOK_AT)}
    ahead = (count for count in changes if count >= 0 and (count - facts.next_num_req) * direction >= 0)
    away = sorted(ahead, reverse=direction < 0)
    between = [(a + b) / 2 for a, b in pairwise(away)]
    return [*between, 0.0] if direction < 0 else between


def _exactly(facts: Facts, same: float, different: float, now: int, step: Step) -> Counterfactual:
    """The float at which the step changes, between one where it is the same and one where it is not.

    Halving the whole distance takes some fifty judgements. Mostly the change is where one role needs another engine,
    so the few floats around those points come first."""
    for side in facts.sides:
        if side.need is None or side.wanted is not None:
            continue
        edge = side.need.edge((same + different) / 2, facts.interval_s)
        low, high = sorted((same, different))
        near = [edge * (1 - _NEAR), edge * (1 + _NEAR)]
        if not (low < near[0] and near[1] < high):
            continue
        before, after = near if same < different else reversed(near)
        if step(facts._replace(next_num_req=before)) == now != step(facts._replace(next_num_req=after)):
            same, different = before, after
            break
    while (middle := same + (different - same) / 2) not in (same, different):
        if step(facts._replace(next_num_req=middle)) == now:
            same = middle
        else:
            different = middle
    return Counterfactual("next_num_req", facts.next_num_req, different, step(facts._replace(next_num_req=different)))


Directions = tuple[Iterable[int], Iterable[int]]


def _counts(facts: Facts) -> dict[str, Directions]:
    """The whole numbers that may matter, upwards and downwards: beyond the least that does not bind, none does."""
    wanted = [max(v.engines, facts.floor(s), s.capacity) for s, v in zip(facts.sides, judge(facts), strict=True)]
    gpus = sum(count * side.gpus_per_worker for count, side in zip(wanted, facts.sides, strict=True))
    farthest = max(abs(v.engines - s.capacity) for s, v in zip(facts.sides, judge(facts), strict=True))
    limits = {"max_gpu_budget": gpus, "min_endpoint": max(wanted) + 1, "max_step": farthest}
    values = {name: getattr(facts, name) for name in limits}
    return {
        name: (range(values[name] + 1, min(limit, values[name] + _LOOK_AT) + 1), _down(min(values[name], limit)))
        for name, limit in limits.items()
    }


def _down(value: int) -> range:
    return range(value - 1, max(0, value - _LOOK_AT), -1)


def _by_count(facts: Facts, name: str, numbers: Directions, step: Step) -> Iterator[Counterfactual]:
    """The first number in each direction that changes the step."""
    value, now = getattr(facts, name), step(facts)
    for direction in numbers:
        for number in direction:
            if (other := step(_with(facts, name, number))) != now:
                yield Counterfactual(name, value, number, other)
                break


def _with(facts: Facts, name: str, number: int) -> Facts:
    changed: dict[str, Any] = {name: number}
    return facts._replace(**changed)
