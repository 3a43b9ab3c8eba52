"""The SLA planner sizes both roles at the end of each interval. It takes the traffic of the window and its forecast. So
many prefill and decode workers as the profile says that the next window needs.

The rules, in prose:

* A decision is due at `began + n × adjustment_interval`: absolute times, so that ticks and windows do not drift.
* Unknown values change nothing: without the number of requests, or without a forecast, both roles are held. A
  window without requests is known: it counts as 0, with the prompt and answer lengths of before. Before the first
  request there are no lengths, and nothing is planned.
* A window that was longer or shorter than the interval counts by its rate.
* Correction factors compare what was measured with what the profile expects (`sizing`). A window that says nothing
  about one leaves it as it was.
* Nothing blocks: workers that start or drain are counted, and the next decision is made when it is due. A decision of
  another environment is waited for (`WorkerPools.pending`), until it is acknowledged or given up. The forecast of
  meanwhile is then decided at once, and not lost for an interval.
* Floors and budget are applied to what the pipeline has merged (`bounds`), also where a plugin asked for it.
* An ITL target that not even a single request keeps gets one request for each engine: a stricter target never gives
  fewer workers.
* Somebody who scales by hand begins the interval anew; what was learned stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.types import Missing
from dynamo_local.planner.policies import sla_sizing as words
from dynamo_local.planner.policies.protocol import adapted_interval_s, holding, steps_ahead
from dynamo_local.planner.policies.sla_sizing import (
    Corrections,
    DecodeModel,
    Facts,
    Need,
    PrefillModel,
    Side,
    SlaRule,
    Verdict,
    complete,
    corrected,
    decode_need,
    judge,
    known,
    nearest,
    prefill_need,
)
from dynamo_local.planner.predictors import forecast_task, windows_max
from dynamo_local.planner.values import (
    ComponentTarget,
    Decision,
    Forecasts,
    ForecastTask,
    Needs,
    Observation,
    Override,
    PolicyStatus,
    Pool,
    Prediction,
    Proposal,
    Reading,
    Reason,
    Series,
    Traffic,
    Window,
    WorkerPools,
)

PLUGIN_ID, PRIORITY = "builtin_sla_propose", 20
_SLACK_S = 1e-3
"""A observation is at the interval's end within this (rounding, a timer that fires early)."""


@dataclass(frozen=True, slots=True)
class Sizing:
    """The inputs of this tick's proposal: the expected window and both roles' needs; `wanted` are the engines."""

    num_req: float
    isl: float
    osl: float
    factors: Corrections
    prefill: Need
    decode: Need
    wanted: tuple[int, int]


@dataclass(frozen=True, slots=True)
class SlaState:
    """`began_s` and `due_s` are of the interval that is under way. `held`: why this tick plans nothing, and in which
    words; None where it does. `waiting` is the prediction of a decision that waits for an acknowledgement, which is
    looked for again at `again_s`. `decided` is when the last decision's interval began, with its reading."""

    began_s: float
    due_s: float
    series: Series
    corrections: Corrections = Corrections()  # noqa: RUF009 - frozen
    held: tuple[SlaRule, str] | None = None
    sizing: Sizing | None = None
    waiting: Prediction | None = None
    again_s: float = math.inf
    decided: tuple[float, tuple[Reading, ...]] = (0.0, ())


@dataclass(frozen=True, slots=True)
class SlaPolicy:
    """`planner.policies.protocol.Policy` of `SlaState`. `warmup` are windows of a trace, as if they had been before."""

    options: PlannerConfig
    prefill: PrefillModel
    decode: DecodeModel
    warmup: tuple[Window, ...] = ()

    def first(self, now_s: float) -> SlaState:
        """The first decision is due after one whole interval."""
        interval_s = self.options.throughput_adjustment_interval_seconds
        series = Series(interval_s, windows_max=windows_max(self.options))
        return SlaState(now_s, now_s + interval_s, series.warmed_up(self.warmup))

    def taking_over(self, state: SlaState) -> SlaState:
        """The interval keeps its beginning, and what was learned stays. Counts are those of the new length."""
        interval_s = self.options.throughput_adjustment_interval_seconds
        before = state.series
        windows = tuple(replace(w, num_req=w.num_req * interval_s / before.window_s) for w in before.windows)
        series = replace(before, window_s=interval_s, windows=windows)
        return replace(state, due_s=state.began_s + interval_s, series=series)

    def next_at_s(self, state: SlaState) -> float:
        """At the interval's end, and while a decision waits."""
        return min(state.due_s, state.again_s)

    def needs(self, state: SlaState) -> Needs:
        """The traffic of the interval, at its end."""
        return Needs(traffic_window_s=state.due_s - state.began_s if state.due_s <= state.again_s else None)

    def status(self, state: SlaState) -> PolicyStatus:
        """When it decides next, and what it decided from last."""
        began_s, readings = state.decided
        return PolicyStatus(state.due_s, interval_began_s=began_s, readings=readings)

    def forecasting(self, state: SlaState, observation: Observation) -> ForecastTask | None:
        """The three series, continued to the window that is planned for."""
        state = self._observed(state, observation)
        if state.held is not None or not self._due(state, observation):
            return None
        return forecast_task(self.options, state.series, self._lead_windows(observation))

    def predicted(
        self, state: SlaState, observation: Observation, forecasts: Forecasts | Missing | None
    ) -> tuple[SlaState, Prediction | None]:
        """The forecast as a prediction. One that is missing, or not a number, holds this tick."""
        if not self._due(state, observation):
            return state, state.waiting
        state = replace(self._observed(state, observation), waiting=None, again_s=math.inf)
        if state.held is not None:
            return state, None
        requested = Missing("nobody was asked for a forecast") if forecasts is None else forecasts
        ahead = state.series.prediction(requested, self._lead_windows(observation))
        if isinstance(ahead, Missing):
            return replace(state, held=(SlaRule.PREDICT_FAILED, ahead.reason)), None
        # A falling trend may end below one token; there is no such prompt, and the last one's length is likelier.
        last = state.series.windows[-1]
        isl, osl = (
            value if (value := known(length)) is None or value >= 1 else before
            for length, before in ((ahead.isl, last.isl), (ahead.osl, last.osl))
        )
        return state, replace(ahead, isl=isl, osl=osl)

    def propose(
        self, state: SlaState, observation: Observation, prediction: Prediction | None
    ) -> tuple[SlaState, tuple[Proposal, ...]]:
        """The engines of both roles, before floors and budget. A plugin's prediction counts as one's own."""
        if not self._due(state, observation) and state.waiting is None:
            return state, ()
        pools, ahead = observation.pools, complete(prediction)
        state = replace(state, sizing=None)
        if pools.prefill is None:
            return replace(state, held=(SlaRule.DISAGGREGATED_ONLY, NEEDS_PREFILL)), ()
        if observation.blind is not None:
            return replace(state, held=(SlaRule.NO_TRAFFIC_DATA, observation.blind)), ()
        if pools.pending:
            return replace(state, held=(SlaRule.SCALING_IN_PROGRESS, NOT_ACKNOWLEDGED), waiting=prediction), ()
        if ahead is None:
            return replace(state, held=state.held or (SlaRule.PREDICT_FAILED, "there is no forecast")), ()
        sizing = self._sizing(ahead, state.corrections, pools.prefill, pools.decode)
        p, d = sizing.wanted
        targets = (ComponentTarget("prefill", p), ComponentTarget("decode", d))
        said = f"{p} prefill and {d} decode workers for {sizing.num_req:g} requests"
        return replace(state, held=None, sizing=sizing), (Proposal(PLUGIN_ID, PRIORITY, Override(targets, said)),)

    def settle(
        self, state: SlaState, observation: Observation, targets: tuple[ComponentTarget, ...]
    ) -> tuple[SlaState, Decision | None]:
        """Within floors, step and budget; the next interval begins where this one ended."""
        due, pools = self._due(state, observation), observation.pools
        if not due and state.waiting is None:
            return state, None
        after = replace(state, held=None, sizing=None, decided=(state.began_s, (observation.reading,)))
        if due:
            began_s = self._grid(state, observation.at_s)
            after = replace(after, began_s=began_s, due_s=began_s + self._interval_s(pools))
        if pools.prefill is None or observation.blind is not None or pools.pending or not targets:
            again_s = math.inf if state.waiting is None else observation.at_s + self.options.metric_pulling_interval
            after = replace(after, again_s=again_s)
            held = state.held or (SlaRule.OVERRIDDEN, "a plugin rejected what was proposed")
            return after, holding(observation, held, after.due_s) if due else None
        after = replace(after, waiting=None, again_s=math.inf)
        facts = self._facts(state.sizing, pools.prefill, pools.decode, targets)
        verdicts = judge(facts)
        reasons = [self._reason(state, facts, index, verdict) for index, verdict in enumerate(verdicts)]
        return after, Decision(
            now_s=observation.at_s,
            targets={side.component: verdict.target for side, verdict in zip(facts.sides, verdicts, strict=True)},
            reasons=tuple(sorted(reasons, key=lambda reason: reason.step >= 0)),
            next_tick_at=after.due_s,
            notes=tuple(_notes(facts)),
        )

    def manual(self, state: SlaState, now_s: float) -> SlaState:
        """A whole interval from now on."""
        due_s = now_s + self.options.throughput_adjustment_interval_seconds
        return replace(state, began_s=now_s, due_s=due_s, waiting=None, again_s=math.inf)

    # --- inside --------------------------------------------------------------------------------

    def _due(self, state: SlaState, observation: Observation) -> bool:
        return observation.at_s >= state.due_s - _SLACK_S

    def _interval_s(self, pools: WorkerPools) -> float:
        interval_s = self.options.throughput_adjustment_interval_seconds
        return adapted_interval_s(interval_s, pools) if self.options.adaptive_intervals else interval_s

    def _lead_windows(self, observation: Observation) -> int:
        """The window that is planned for: the next one, or (adaptive) the first that a new worker sees whole."""
        return (
            steps_ahead(self.options.throughput_adjustment_interval_seconds, observation.pools)
            if self.options.adaptive_intervals
            else 1
        )

    def _grid(self, state: SlaState, now_s: float) -> float:
        """Where the interval that is under way now began; those that were missed in a sleep are left out."""
        interval_s = state.due_s - state.began_s
        return state.due_s + interval_s * max(0, math.floor((now_s - state.due_s + _SLACK_S) / interval_s))

    def _observed(self, state: SlaState, observation: Observation) -> SlaState:
        """With this window in the history, and the factors after it; or with the reason why there is nothing new."""
        traffic = observation.traffic
        if not isinstance(traffic, Traffic):
            why = traffic.reason if isinstance(traffic, Missing) else "nobody was asked"
            return replace(state, held=(SlaRule.NO_TRAFFIC_DATA, why), sizing=None)
        num_req = known(traffic.num_req)
        if num_req is None or traffic.duration_s <= 0:
            why = traffic.num_req.reason if isinstance(traffic.num_req, Missing) else f"{traffic.num_req} requests"
            return replace(state, held=(SlaRule.NO_TRAFFIC_DATA, why), sizing=None)
        series = state.series.after(traffic)
        factors = corrected(state.corrections, traffic, observation.pools.decode.ready, self.prefill, self.decode)
        nobody = (SlaRule.NO_TRAFFIC_DATA, NOBODY_YET)
        return replace(state, series=series, corrections=factors, held=None if series.known else nobody, sizing=None)

    def _sizing(self, ahead: tuple[float, float, float], factors: Corrections, prefill: Pool, decode: Pool) -> Sizing:
        (num_req, isl, osl), options = ahead, self.options
        if options.no_correction:
            factors = Corrections()
        of_prefill = prefill_need(isl, factors.prefill, options.ttft_ms, prefill.gpus_per_worker, self.prefill)
        of_decode = decode_need(isl + osl / 2, osl, factors.decode, options.itl_ms, decode.gpus_per_worker, self.decode)
        interval_s = options.throughput_adjustment_interval_seconds
        wanted = (of_prefill.engines(num_req, interval_s), of_decode.engines(num_req, interval_s))
        return Sizing(num_req, isl, osl, factors, of_prefill, of_decode, wanted)

    def _facts(self, sizing: Sizing | None, prefill: Pool, decode: Pool, targets: tuple[ComponentTarget, ...]) -> Facts:
        """A target that is not the formula's is a plugin's."""
        merged = {target.sub_component_type: target.replicas for target in targets}

        def side(pool: Pool, role: str, need: Need | None, wanted: int | None) -> Side:
            requested = merged.get(role, wanted)
            if sizing is None and requested == pool.ready:  # the number from which others reckon, and nobody's wish
                requested = None
            return Side(
                pool.component, pool.capacity, pool.gpus_per_worker, need, None if requested == wanted else requested
            )

        if sizing is None:
            sides = (side(prefill, "prefill", None, None), side(decode, "decode", None, None))
        else:
            sides = (
                side(prefill, "prefill", sizing.prefill, sizing.wanted[0]),
                side(decode, "decode", sizing.decode, sizing.wanted[1]),
            )
        options = self.options
        return Facts(
            sides,
            0.0 if sizing is None else sizing.num_req,
            options.throughput_adjustment_interval_seconds,
            options.min_endpoint,
            options.min_gpu_budget,
            options.max_gpu_budget,
            options.max_throughput_scaling_replicas,
        )

    def _reason(self, state: SlaState, facts: Facts, index: int, verdict: Verdict) -> Reason:
        side = facts.sides[index]
        numbers: dict[str, float] = {
            "workers_wanted": verdict.engines,
            "workers": side.capacity,
            "workers_min": facts.floor(side),
            "gpus_per_worker": side.gpus_per_worker,
            "max_gpu_budget": facts.max_gpu_budget,
            "max_step": facts.max_step,
        }
        if state.sizing is not None and side.need is not None:
            numbers |= self._sized(state.sizing, side.need, index)
        step = verdict.target - side.capacity
        why = words.why(verdict.rule, numbers)
        return Reason(side.component, step, verdict.rule, numbers, nearest(facts, index), why=why)

    def _sized(self, sizing: Sizing, need: Need, index: int) -> dict[str, float]:
        """The numbers from which the engines were computed."""
        interval_s = self.options.throughput_adjustment_interval_seconds
        numbers = {
            "next_num_req": sizing.num_req,
            "next_isl": sizing.isl,
            "next_osl": sizing.osl,
            "adjustment_interval_s": interval_s,
            "load_tokens_per_s": need.load(sizing.num_req, interval_s),
            "engine_tokens_per_s": need.engine_tokens_per_s,
            "engines": sizing.wanted[index],
            "expected_ms": need.expected_ms,
            "extrapolated": float(need.extrapolated),
            "attainable": float(need.attainable),
        }
        if index == 0:
            return numbers | {"p_correction": sizing.factors.prefill, "ttft_ms": self.options.ttft_ms}
        return numbers | {
            "d_correction": sizing.factors.decode,
            "itl_ms": self.options.itl_ms,
            "corrected_itl_ms": need.target_ms,
            "context_length": sizing.isl + sizing.osl / 2,
        }


NEEDS_PREFILL = "the policy sla is for graphs with prefill workers of their own; throughput-load plans this one"
NOT_ACKNOWLEDGED = "the environment has not acknowledged the last decision yet"
NOBODY_YET = "no request has come yet whose length is known"


def _notes(facts: Facts) -> list[str]:
    """Notes on the numbers, for people."""
    notes = []
    for side, what in zip(facts.sides, ("TTFT", "ITL"), strict=True):
        need = side.need
        if need is not None and not need.attainable:
            notes.append(
                f"{side.component}: no engine keeps the {what} of {need.target_ms:.4g} ms that is wanted: "
                f"a request that is alone gets {need.expected_ms:.4g} ms"
            )
        if need is not None and need.extrapolated:
            notes.append(f"{side.component}: nothing like what is expected was profiled; its capacity is extrapolated")
    return notes
