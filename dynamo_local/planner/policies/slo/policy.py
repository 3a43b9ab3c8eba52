"""The policy `slo`: as few GPUs as keep the targets.

The rules, in prose (each was kept because the development traces want it: docs/slo.md):

* A decision is due every `adjustment_interval`; what it decides is in force at the lead of the scaling option that it
  takes.
* The rate at each lead is forecast by the best of several cheap experts, and its own errors there are the scenarios of
  what may come (`outlook`).
* Lengths and bursts of requests are those of the last minutes (`forecast`). The queueing model says which share of
  them keeps the targets with how many workers (`queueing`). It runs outside the arbiter's loop.
* The policy holds or starts a GPU if it is worth its price (`scaling_options`). The price follows the
  recorded past (`hindsight`).
* Requests that already wait too long are to be cleared within one lead time.
* The planner keeps at least the initial fleet until it could check two forecasts.
* Unknown values change nothing. Floors and budget hold also for what plugins want.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import fmean

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.types import Missing, floor_workers
from dynamo_local.planner.policies.budget import fitting
from dynamo_local.planner.policies.protocol import holding
from dynamo_local.planner.policies.slo import reasons as words
from dynamo_local.planner.policies.slo.corrections import Learning, Served, learned, with_served
from dynamo_local.planner.policies.slo.forecast import Scenario, demands
from dynamo_local.planner.policies.slo.hindsight import LASTED_SAMPLE, Hindsight, last_rate, settled
from dynamo_local.planner.policies.slo.reasons import SloRule, reasons
from dynamo_local.planner.policies.slo.scaling_options import (
    COLD_START,
    FLIP,
    INTERVAL_S,
    PART_LEAST,
    START_UP_S,
    WAKE,
    Ahead,
    Bounds,
    Fleet,
    Moment,
    borne_part,
    climbed,
    is_borne,
    overrun_yield,
    plus,
    price,
    quick,
    scaling_options_of,
    swapped,
)
from dynamo_local.planner.policies.slo.state import (
    Means,
    SloState,
    clearing,
    seen_requests,
    with_requests,
    with_scaling_options,
)
from dynamo_local.planner.policies.slo.warm_start import WarmStart
from dynamo_local.planner.queueing import EngineOptions, Passes, Shares
from dynamo_local.planner.queueing_task import Question, misses_of, on_grid, shares_of
from dynamo_local.planner.values import (
    ComponentTarget,
    Decision,
    Forecasts,
    ForecastTask,
    Needs,
    Observation,
    Override,
    PolicyStatus,
    Prediction,
    Proposal,
    Requests,
    WorkerPools,
)

PLUGIN_ID, PRIORITY = "builtin_slo_propose", 20
DEMANDS_EVERY_S = 60.0
"""Lengths and bursts are taken anew so often; earlier, whenever half as much again is known."""
DEMANDS_GROWTH = 1 / 3
FIRST_LEADS = 2.0
"""For so many start-ups there are no fewer workers than at the start."""
SLACK_S = 1e-3


@dataclass(slots=True)
class _Absorbed:
    """The last interval and the state after it: two stages of a tick ask for the same."""

    before: SloState | None = None
    observation: Observation | None = None
    after: SloState | None = None


@dataclass(frozen=True, slots=True)
class SloPolicy:
    """`planner.policies.protocol.Policy` of `SloState`. `passes` is the profile's engine; `history` has requests from
    before the planner began."""

    options: PlannerConfig
    passes: Passes
    profile: str
    start_up_s: float = START_UP_S
    speed: float = 1.0
    engine: EngineOptions = EngineOptions()  # noqa: RUF009 - frozen
    history: WarmStart | None = None
    _last: _Absorbed = field(default_factory=lambda: _Absorbed(), compare=False, repr=False)

    def first(self, now_s: float) -> SloState:
        """The first decision is due after one interval. A history is the past that ends now."""
        return self._with_history(SloState(now_s, now_s + INTERVAL_S, first_until_s=now_s), now_s)

    def taking_over(self, state: SloState) -> SloState:
        """Knowledge of the traffic stays. Results that depend on the targets are computed anew. A history is the past
        by the new targets."""
        return self._with_history(replace(state, moments=()), state.began_s)

    def _with_history(self, state: SloState, now_s: float) -> SloState:
        history = self.history
        if history is None:
            return state
        means = Means(history.rate, history.mean_gpus, history.bins)
        mean_price = price(self.options.target, self.options.cost_factor, means.rate, means.gpus)
        past = history.past.begun(now_s)
        found = past.factor(history.gpus, self.options.target, mean_price * INTERVAL_S)
        return replace(state, past=past, fixed=(), turn=None, means=means, price_factor=found)

    def next_at_s(self, state: SloState) -> float:
        """At the interval's end."""
        return state.due_s

    def needs(self, state: SloState) -> Needs:
        """The requests of the interval."""
        return Needs(traffic_window_s=INTERVAL_S, requests=True)

    def status(self, state: SloState) -> PolicyStatus:
        """When it decides next, and what it decided from last."""
        began_s, readings = state.decided
        told = () if state.ruling_past is None else reversed(state.fixed)
        fixed = next((each for each in told if each.fixed_gpu_hours), None)
        return PolicyStatus(state.due_s, interval_began_s=began_s, readings=readings, fixed_fleet=fixed)

    # --- PREDICT -------------------------------------------------------------------------------

    def forecasting(self, state: SloState, observation: Observation) -> ForecastTask | None:
        """The task for the queueing model: all scenarios of all scaling options at once."""
        if not self._due(state, observation):
            return None
        state = self._observed(state, observation)
        rates = _rates(state)
        if state.held is not None or not rates:
            return None
        return self._question(state, observation.pools, rates).task()

    def predicted(
        self, state: SloState, observation: Observation, forecasts: Forecasts | Missing | None
    ) -> tuple[SloState, Prediction | None]:
        """The demand at the lead time of the slowest scaling option, and the part that each number of workers would
        serve."""
        if not self._due(state, observation):
            return state, None
        state = self._observed(state, observation)
        rates = _rates(state)
        if state.held is not None or not rates:
            return state, None
        reported = shares_of(forecasts, len(rates), len(state.demands))
        if isinstance(reported, Missing):
            return replace(state, held=(SloRule.PREDICT_FAILED, reported.reason)), None
        state = self._with_past(state, observation.pools, forecasts)
        known = dict(zip(rates, reported, strict=True))
        newest = tuple(_moment(state, index, known) for index in range(len(state.scaling_options)))
        before = state.moments or ((),) * len(newest)
        moments = tuple(
            (*until, at_lead)[-outlook.lead_bins :]
            for until, at_lead, outlook in zip(before, newest, state.outlooks, strict=True)
        )
        state = replace(state, moments=moments, expected=newest)
        return state, self._prediction(state)

    def _with_past(self, state: SloState, pools: WorkerPools, forecasts: Forecasts | Missing | None) -> SloState:
        """With the stretch of the past that was judged, and the price that it makes."""
        past = state.past
        if past is None or past.record.asked is None:
            return state
        misses = misses_of(forecasts, self._most(pools), past.record.asked)
        if not misses:
            return state
        bounds = self.bounds(pools)
        gpus = bounds.gpus
        past = past.judged(misses[0], self._lead_bins(state, pools), INTERVAL_S, *misses[1:])
        mean_price = price(self.options.target, self.options.cost_factor, state.means.rate, state.means.gpus)
        wanted = past.factor(gpus, self.options.target, mean_price * INTERVAL_S)
        found = settled(state.price_factor, wanted, past.newest_s)
        fixed = past.fixed_fleets(gpus, bounds.max_gpus)
        turn = past.turn(gpus, bounds.max_gpus, self.options.target)
        return replace(state, past=past, fixed=fixed, turn=turn, price_factor=found)

    def _lead_bins(self, state: SloState, pools: WorkerPools) -> tuple[int, int]:
        """Intervals until a worker of each role serves, by the quickest scaling option that brings one."""
        leads = {each.name: each.lead_bins(INTERVAL_S) for each in state.scaling_options}
        found = [leads[WAKE if pool.asleep and WAKE in leads else COLD_START] for pool in pools.all]
        return found[0], found[-1]

    def _prediction(self, state: SloState) -> Prediction:
        ahead = state.demands[-1]
        num_req = state.expected[0].rate / state.part * INTERVAL_S
        isl, osl = sum(ahead.isl) / len(ahead.isl), sum(ahead.osl) / len(ahead.osl)
        return Prediction(num_req, isl, osl, source="builtin_slo_predict")

    # --- PROPOSE -------------------------------------------------------------------------------

    def propose(
        self, state: SloState, observation: Observation, prediction: Prediction | None
    ) -> tuple[SloState, tuple[Proposal, ...]]:
        """The fleet that is worth its price."""
        state = replace(state, chosen=None, ruled=None)
        if not self._due(state, observation) or state.held is not None or not state.expected:
            return state, ()
        now, bounds = _capacity(observation.pools), self.bounds(observation.pools)
        gpu_price = self.price(state, observation.pools)
        ahead = [
            Ahead(scaling_option, at_lead, until)
            for scaling_option, at_lead, until in zip(state.scaling_options, state.expected, state.moments, strict=True)
        ]
        overload = state.part > PART_LEAST and (state.part < 1 or not is_borne(now, state.expected[0], bounds))
        fleet, flips = climbed(now, ahead, quick(observation.pools, observation.reading), gpu_price, bounds)
        ruled, past = fleet, state.past
        if past is not None:
            past = past.decided(ruled, _ready(observation.pools), observation.pools.gpus_held, observation.at_s)
            rate = max(state.expected[0].rate, last_rate(state.rates))
            held = past.held(ruled, gpu_price * INTERVAL_S, bounds.gpus, rate, observation.at_s)
            if overload:
                held = (max(held[0], ruled[0]), max(held[1], ruled[1]))
            if any(each.name == FLIP for each in state.scaling_options):
                held = _kept(ruled, held, sum(now))
            fleet = filled(ruled, held, now, bounds)
            if bounds.held(fleet) < bounds.min_gpus:  # so many stay in total: the rule chooses their split
                fleet = ruled
        fleet = _not_below(self._least(state, observation, now, overload=overload), fleet, flips)
        if fleet == now and all(scaling_option.name != FLIP for scaling_option in state.scaling_options):
            fleet = swapped(
                fleet, (*state.moments[0], state.expected[0]), gpu_price, state.scaling_options[0].order_price, bounds
            )
        targets = tuple(ComponentTarget(role, _of_role(role, fleet)) for role in observation.pools.by_role)
        workers = " and ".join(f"{each.replicas} {each.sub_component_type}" for each in targets)
        said = f"{workers} workers for {state.expected[0].rate:.3g} requests/s"
        return replace(state, chosen=fleet, ruled=ruled, past=past, flips=flips), (
            Proposal(PLUGIN_ID, PRIORITY, Override(targets, said)),
        )

    def _least(self, state: SloState, observation: Observation, now: Fleet, *, overload: bool) -> Fleet:
        """No worker leaves during an overload, and for a while those of the start stay."""
        if overload:
            return now
        if state.first is None or observation.at_s >= state.first_until_s:
            return (0, 0)
        return min(state.first[0], now[0]), min(state.first[1], now[1])

    # --- settle --------------------------------------------------------------------------------

    def settle(
        self, state: SloState, observation: Observation, targets: tuple[ComponentTarget, ...]
    ) -> tuple[SloState, Decision | None]:
        """Within floors and budget; the next interval begins where this one ended."""
        if not self._due(state, observation):
            return state, None
        interval_s = INTERVAL_S
        missed = max(0, int((observation.at_s - state.due_s + SLACK_S) // interval_s))
        began_s = state.due_s + missed * interval_s
        after = replace(
            state,
            began_s=began_s,
            due_s=began_s + interval_s,
            held=None,
            decided=(state.began_s, (observation.reading,)),
        )
        # Where this policy holds for want of data a plugin may still ask for workers, as under the other policies.
        if observation.blind is not None or observation.pools.pending or not targets:
            held = state.held or (SloRule.OVERRIDDEN, "a plugin rejected what was proposed")
            return after, holding(observation, held, after.due_s)
        wanted = {target.sub_component_type: target.replicas for target in targets}
        now, bounds = _capacity(observation.pools), self.bounds(observation.pools)
        requested = (wanted.get("prefill", now[0]), wanted.get("decode", now[1]))
        fleet = within(requested, now, bounds)
        gpu_price = self.price(state, observation.pools)
        found = reasons(state, observation.pools, requested, fleet, gpu_price, bounds, self.options)
        return after, Decision(
            now_s=observation.at_s,
            targets={pool.component: _of_role(role, fleet) for role, pool in observation.pools.by_role.items()},
            reasons=tuple(sorted(found, key=lambda reason: reason.step >= 0)),
            next_tick_at=after.due_s,
            notes=words.notes(state, bounds, gpu_price),
        )

    def manual(self, state: SloState, now_s: float) -> SloState:
        """A whole interval from now on, and no fewer workers than this person wants for a while."""
        return replace(state, began_s=now_s, due_s=now_s + INTERVAL_S, first=None, first_until_s=now_s)

    # --- inside --------------------------------------------------------------------------------

    def bounds(self, pools: WorkerPools) -> Bounds:
        """Floors and budget for these workers. An aggregated graph has prefill workers of no GPU, and none of them."""
        prefill = 0 if pools.prefill is None else max(1, pools.prefill.gpus_per_worker)
        gpus = (prefill, max(1, pools.decode.gpus_per_worker))
        low = self.options
        floors = tuple(
            max(1, low.min_endpoint, floor_workers(low.min_gpu_budget, each)) if each else 0 for each in gpus
        )
        found = Bounds(gpus, (floors[0], floors[1]), low.max_gpu_budget)
        if found.fits(found.floors):
            return found
        # More than each role can have: so many are always on, and only the split is chosen.
        fewest = max(1, low.min_endpoint)
        floors = (fewest if prefill else 0, fewest)
        return replace(found, floors=floors, min_gpus=min(low.min_gpu_budget, low.max_gpu_budget))

    def price(self, state: SloState, pools: WorkerPools) -> float:
        """The price of a GPU, in requests per second."""
        options, rate, gpus = self.options, state.means.rate, max(state.means.gpus, 1.0)
        if state.expected:
            served = overrun_yield(_capacity(pools), state.expected[0], self.bounds(pools))
            rate = rate if served is None else min(rate, served * gpus)
        factor = 1.0 if state.ruling_past is None else state.price_factor
        return price(options.target, options.cost_factor, rate, gpus) * factor

    def _most(self, pools: WorkerPools) -> int:
        """Workers of a role that there could be."""
        gpus = (each for each in self.bounds(pools).gpus if each)
        return max(*_capacity(pools), self.options.max_gpu_budget // min(gpus))

    def _due(self, state: SloState, observation: Observation) -> bool:
        return observation.at_s >= state.due_s - SLACK_S

    def _observed(self, state: SloState, observation: Observation) -> SloState:
        """With this interval in the history, or with the reason why there is nothing new."""
        last = self._last
        if last.before is state and last.observation is observation and last.after is not None:
            return last.after
        after = self._taken_in(state, observation)
        last.before, last.observation, last.after = state, observation, after
        return after

    def _taken_in(self, state: SloState, observation: Observation) -> SloState:
        state = replace(state, expected=())
        pools = observation.pools
        if pools.pending:
            return replace(state, held=(SloRule.SCALING_IN_PROGRESS, words.NOT_ACKNOWLEDGED))
        seen = seen_requests(observation)
        if isinstance(seen, Missing):
            return replace(state, held=(SloRule.NO_TRAFFIC_DATA, seen.reason))
        scaling_options = scaling_options_of(pools, self.start_up_s, state.scaling_options)
        now = _capacity(pools)
        if state.first is None:
            until_s = observation.at_s + FIRST_LEADS * scaling_options[0].lead_s
            state = replace(state, first=now, first_until_s=until_s)
        if scaling_options != state.scaling_options:
            state = with_scaling_options(state, scaling_options, INTERVAL_S)
        state = with_requests(state, seen, self.bounds(pools).held(now))
        served = Served(seen.since_s, seen.at_s, *_ready(pools))
        state = self._judged(replace(state, served=with_served(state.served, served)), observation)
        state = self._with_demands(state, observation.at_s)
        state = self._recorded(state, observation, seen)
        return replace(state, held=None if state.demands else (SloRule.NO_TRAFFIC_DATA, words.NOBODY_YET))

    def _recorded(self, state: SloState, observation: Observation, seen: Requests) -> SloState:
        """With the answers in the record, and the next stretch of the past to be judged. If requests are only counted
        together, nobody knows in which bursts they came: nothing is judged."""
        if observation.requests is None:
            return state
        most = self._most(observation.pools)
        past = state.past
        past = Hindsight.of(seen.since_s, most) if past is None else past.resized(most)
        ttft_s, itl_s = self.options.ttft_ms / 1000, self.options.itl_ms / 1000
        past = replace(past, record=past.record.known(seen, INTERVAL_S).after(seen.ended, ttft_s, itl_s))
        return replace(state, past=past.asking(state.ended, observation.at_s, INTERVAL_S))

    def _judged(self, state: SloState, observation: Observation) -> SloState:
        """With what the answers say of the engines, and of what waits."""
        options = self.options
        ttft_s, itl_s = options.ttft_ms / 1000, options.itl_ms / 1000
        rate = state.rates[0] if state.rates else 0.0
        more = clearing(observation.reading, rate, ttft_s, state.scaling_options[0].lead_s)
        part = state.part
        if state.moments and state.moments[0]:
            pools = observation.pools
            part = borne_part(part, is_borne=is_borne(_capacity(pools), state.moments[0][-1], self.bounds(pools)))
        return replace(
            state,
            part=part,
            factors=learned(
                state.factors,
                state.ended,
                state.served,
                Learning(self.passes, self.engine.batched_tokens, ttft_s, itl_s, observation.pools.prefill is None),
            ),
            clearing=more,
            scenarios=tuple(
                tuple(
                    Scenario(part * (each.rate + more), each.weight, part * (each.lasting + more))
                    for each in outlook.scenarios(state.answer_s)
                )
                for outlook in state.outlooks
            ),
        )

    def _with_demands(self, state: SloState, now_s: float) -> SloState:
        known_s = len(state.rates) * INTERVAL_S
        early = now_s - state.demands_at_s >= DEMANDS_GROWTH * known_s
        age_s = now_s - state.demands_at_s
        changed = (state.factors.prefill, state.factors.decode) != (state.demands_for.prefill, state.demands_for.decode)
        if state.demands and not (early or changed or age_s >= DEMANDS_EVERY_S - SLACK_S):
            return state
        found = demands(state.began, state.ended, now_s, known_s)
        if not found:
            return state
        answer_s = fmean(each.lasted_s for each in state.ended[-LASTED_SAMPLE:])
        return replace(state, demands=found, demands_at_s=now_s, demands_for=state.factors, answer_s=answer_s)

    def _question(self, state: SloState, pools: WorkerPools, rates: tuple[float, ...]) -> Question:
        options, used = self.options, state.demands_for
        asked = None if state.past is None else state.past.record.asked
        return Question(
            self.profile,
            options.ttft_ms / 1000,
            options.itl_ms / 1000,
            self._most(pools),
            rates,
            state.demands,
            replace(
                self.engine,
                prefill_factor=used.prefill,
                decode_factor=used.decode,
                mixed=pools.prefill is None,
            ),
            self.speed,
            None if asked is None else replace(asked, decode_factor=state.factors.judged),
        )


def within(requested: Fleet, now: Fleet, bounds: Bounds) -> Fleet:
    """The wanted fleet within floors and budget. If not even the floors fit, the fleet stays as it is."""
    above = (max(requested[0], bounds.floors[0]), max(requested[1], bounds.floors[1]))
    fits = fitting(above, bounds.floors, bounds.gpus, bounds.max_gpus)
    return now if fits is None else (fits[0], fits[1])


def filled(ruled: Fleet, held: Fleet, now: Fleet, bounds: Bounds) -> Fleet:
    """The fleet that the past `held`, within floors and budget.

    The past judges each worker without regard to the budget. Beyond the budget the rule's workers come first: a cut
    in proportion would undo the rule's split in each interval.
    """
    wanted = [max(each, floor) for each, floor in zip(held, bounds.floors, strict=True)]
    both = [min(each, max(mine, floor)) for each, mine, floor in zip(wanted, ruled, bounds.floors, strict=True)]
    fleet = within((both[0], both[1]), now, bounds)
    while True:
        missing = {plus(fleet, more): wanted[role] - fleet[role] for role, more in enumerate(((1, 0), (0, 1)))}
        bigger = [each for each, count in missing.items() if count > 0 and bounds.fits(each)]
        if not bigger:
            return fleet
        fleet = max(bigger, key=missing.__getitem__)


def _rates(state: SloState) -> tuple[float, ...]:
    """The rates of all scenarios of all scaling options, on the grid, each once."""
    scenarios = [each for scenarios in state.scenarios for each in scenarios]
    return tuple(sorted({on_grid(rate) for each in scenarios for rate in (each.rate, each.lasting)}))


def _moment(state: SloState, scaling_option: int, known: dict[float, tuple[Shares, ...]]) -> Moment:
    scenarios = []
    for each in state.scenarios[scaling_option]:
        arriving, lasting = known[on_grid(each.rate)], known[on_grid(each.lasting)]
        for prompts, answers in zip(arriving, lasting, strict=True):
            shares = Shares(prompts.prefill, answers.decode)
            scenarios.append((each.weight * each.rate / len(arriving), shares))
    return Moment(tuple(scenarios))


def _kept(ruled: Fleet, held: Fleet, total: int) -> Fleet:
    """The fleet with the workers that the past holds beyond those that the rule wants, where workers change roles.

    A worker that left one role by a flip is not missing there: no more are held than the `total` that there are.
    """
    fleet = [*ruled]
    while sum(fleet) < min(sum(held), total):
        fleet[0 if held[0] - fleet[0] >= held[1] - fleet[1] else 1] += 1
    return fleet[0], fleet[1]


def _not_below(least: Fleet, fleet: Fleet, flips: int) -> Fleet:
    """At least so many, but for flips: these take from one role what the other gets."""
    return max(fleet[0], least[0] - max(0, flips)), max(fleet[1], least[1] - max(0, -flips))


def _of_role(role: str, fleet: Fleet) -> int:
    return fleet[0] if role == "prefill" else fleet[1]


def _ready(pools: WorkerPools) -> Fleet:
    return (0 if pools.prefill is None else pools.prefill.ready, pools.decode.ready)


def _capacity(pools: WorkerPools) -> Fleet:
    return (0 if pools.prefill is None else pools.prefill.capacity, pools.decode.capacity)
