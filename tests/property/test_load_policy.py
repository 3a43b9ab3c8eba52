"""Tests what holds of every decision of the load planner, whatever it sees."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.config.planner import PlannerConfig
from dynamo_local.core.types import Load, Missing, floor_workers
from dynamo_local.planner.policies.load import LoadPolicy
from dynamo_local.planner.values import IntervalObservation, Reading, Rule
from tests.fakes.planner.observations import DECODE, NOT_HAD, PREFILL, pool, reading, worker_pools
from tests.fakes.planner.options import load_options
from tests.fakes.planner.planner_worlds import observations, options, short_of, with_number


def steps(seen: IntervalObservation, given_options: PlannerConfig) -> dict[str, int]:
    return LoadPolicy(given_options).on_tick(seen).steps


@given(observations(), options())
def test_each_counterfactual_is_true_and_nearest_of_its_number(
    seen: IntervalObservation, given_options: PlannerConfig
) -> None:
    decision = LoadPolicy(given_options).on_tick(seen)
    for reason in decision.reasons:
        other = reason.otherwise
        if other is None:
            continue
        component = reason.component
        flipped = steps(*with_number(seen, given_options, component, other.name, other.needed))
        assert flipped[component] == other.step != reason.step
        short = short_of(other.needed, other.value)
        assert steps(*with_number(seen, given_options, component, other.name, short))[component] == reason.step


@given(observations(), options())
def test_there_is_one_for_each_step_and_each_refusal(seen: IntervalObservation, given_options: PlannerConfig) -> None:
    """Missing data leave none, nor does a world in which nothing else can be done (no budget for one more)."""
    for reason in LoadPolicy(given_options).on_tick(seen).reasons:
        if reason.rule in (Rule.SCALE_DOWN, Rule.SCALE_UP, Rule.BUDGET, Rule.GRACE):
            assert reason.otherwise is not None


@given(observations(adjusting=True), options())
def test_floor_and_budget_always_hold(seen: IntervalObservation, given_options: PlannerConfig) -> None:
    decision = LoadPolicy(given_options).on_tick(seen)
    pools = {pool.component: pool for pool in seen.pools.all}
    down = sum(pools[r.component].gpus_per_worker for r in decision.reasons if r.step < 0 and not r.deferred)
    up = [r for r in decision.reasons if r.step > 0 and r.rule is not Rule.TAKE_BACK]
    spoken_for = seen.pools.gpus_spoken_for
    now = sum(pools[r.component].gpus_per_worker for r in up if not r.deferred)
    in_the_end = sum(pools[r.component].gpus_per_worker for r in up) - down
    if now:
        assert spoken_for + now <= given_options.max_gpu_budget
    if up:
        assert spoken_for + in_the_end <= given_options.max_gpu_budget
    for reason in decision.reasons:
        capacity = pools[reason.component].capacity
        floor = floor_workers(given_options.min_gpu_budget, pools[reason.component].gpus_per_worker)
        assert decision.targets[reason.component] == capacity + reason.step
        if reason.step < 0:
            assert capacity + reason.step >= floor


def without(seen: IntervalObservation, component: str) -> IntervalObservation:

    def lost(observation: Reading) -> Reading:
        if component == PREFILL:
            return replace(observation, queue=None if observation.queue is None else NOT_HAD)
        return replace(observation, loads={worker: NOT_HAD for worker in observation.loads})

    return replace(seen, readings=tuple(lost(observation) for observation in seen.readings))


@given(observations(), options(), st.sampled_from([PREFILL, DECODE]))
def test_missing_data_never_acts(seen: IntervalObservation, given_options: PlannerConfig, component: str) -> None:
    decision = LoadPolicy(given_options).on_tick(without(seen, component))
    pools = {pool.component: pool for pool in seen.pools.all}
    for reason in decision.reasons:
        if reason.component == component and pools[component].capacity:
            assert (reason.step, reason.rule) == (0, Rule.MISSING)


@given(observations(), options(), st.floats(0, 1), st.integers(0, 20))
def test_higher_load_never_gives_fewer_workers(
    seen: IntervalObservation, given_options: PlannerConfig, more_kv: float, more_queue: int
) -> None:
    """Of a component whose own load is higher, with the same fleet and the other's load as it was."""

    def loaded(observation: Reading) -> Reading:
        return replace(
            observation,
            loads={
                worker: load
                if isinstance(load, Missing)
                else replace(load, gpu_cache_usage_perc=min(1.0, load.gpu_cache_usage_perc + more_kv))
                for worker, load in observation.loads.items()
            },
        )

    def queued(observation: Reading) -> Reading:
        queue = observation.queue
        return replace(observation, queue=queue if queue is None or isinstance(queue, Missing) else queue + more_queue)

    before = steps(seen, given_options)
    for component, change in ((DECODE, loaded), (PREFILL, queued)):
        if component in before:
            after = steps(
                replace(seen, readings=tuple(change(observation) for observation in seen.readings)), given_options
            )
            assert after[component] >= before[component]


@pytest.mark.parametrize("aggregated", [False, True])
@given(
    prefill=st.integers(1, 4),
    decode=st.integers(1, 4),
    kv_work=st.floats(0.05, 6).filter(lambda work: not 0.9 < work < 1.0),
    queue_work=st.floats(0, 5),
    given_options=st.builds(
        PlannerConfig,
        max_gpu_budget=st.integers(8, 12),
        min_gpu_budget=st.integers(1, 2),
        decode_kv_per_waiting_request=st.just(0.0),
    ),
)
def test_constant_load_settles(
    aggregated: bool, prefill: int, decode: int, kv_work: float, queue_work: float, given_options: PlannerConfig
) -> None:
    """A plant whose KV use and queue are its work, shared by its workers: after some intervals nothing moves.

    Not for a load of 0.9 to 1.0 workers: too much for one, and less than half of two. With these thresholds it swings
    between one and two (as slowly as grace lets it), and the rules say so.
    """
    now_s, p, d = 0.0, prefill, decode
    history = []
    for _ in range(24):
        queue = queue_work / p
        kv = min(1.0, kv_work / d)
        seen_fleet = worker_pools(None if aggregated else p, pool(DECODE, d, added_at_s=-1e6))
        pulls = tuple(reading(now_s + n, None if aggregated else queue, kv, d) for n in range(2))
        decision = LoadPolicy(given_options).on_tick(IntervalObservation(now_s + 30, now_s, pulls, seen_fleet))
        p, d = decision.targets.get(PREFILL, p), decision.targets[DECODE]
        now_s += 30
        history.append((p, d))
    late = set(history[16:])
    assert len(late) == 1, f"still moving: {late}"


def test_a_load_without_its_kv_use_is_missing() -> None:
    """NaN for it made all comparisons false in the predecessor."""
    pulls = (Reading(1.0, None, {"d": Load(gpu_cache_usage_perc=Missing("not told"))}),)
    decision = LoadPolicy(load_options()).on_tick(IntervalObservation(30.0, 0.0, pulls, worker_pools(None, 2)))
    assert [(reason.step, reason.rule) for reason in decision.reasons] == [(0, Rule.MISSING)]
