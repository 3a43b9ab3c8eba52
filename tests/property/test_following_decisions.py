"""Whatever stands in etcd and however the fleet is: a follower acknowledges only what is so, and gets there."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dynamo_local.core.virtual import (
    DECISION_ID,
    NUM_DECODE_WORKERS,
    NUM_PREFILL_WORKERS,
    SCALED_DECISION_ID,
    KeysState,
    PlannerDecision,
    Stored,
    encode,
    read,
)
from dynamo_local.planner.following import Next, Phase, next_step
from dynamo_local.planner.values import Pool, WorkerPools

NAMES = (NUM_PREFILL_WORKERS, NUM_DECODE_WORKERS, DECISION_ID, SCALED_DECISION_ID)
COUNTS = st.integers(0, 4)
NUMBERS = st.integers(-1, 4)

values = st.one_of(NUMBERS.map(encode), st.binary(max_size=6))
stores = st.dictionaries(st.sampled_from(NAMES), st.builds(Stored, values, st.integers(1, 9)))
pools = st.builds(Pool, st.just(""), st.just(1), ready=COUNTS, coming=COUNTS, routed=COUNTS)


@st.composite
def fleets(draw: st.DrawFn) -> WorkerPools:
    prefill = replace(draw(pools), component="P") if draw(st.booleans()) else None
    return WorkerPools(prefill, replace(draw(pools), component="D"))


def is_so(decision: PlannerDecision, fleet: WorkerPools) -> bool:
    wanted = {"P": decision.num_prefill_workers, "D": decision.num_decode_workers}
    found = {pool.component: pool for pool in fleet.all}
    return all(
        number == -1
        or (name not in found and number == 0)
        or (name in found and found[name] == replace(found[name], ready=number, coming=0, routed=0))
        for name, number in wanted.items()
    )


@given(stores, fleets(), st.none() | st.builds(Next, st.sampled_from(Phase), st.builds(PlannerDecision, NUMBERS)))
def test_what_is_not_so_is_never_acknowledged(stored: dict[str, Stored], fleet: WorkerPools, last: Next | None) -> None:
    told = read(stored)
    step = next_step(told, fleet, last)
    if step.acknowledge:
        assert is_so(step.decision, fleet)
        assert step.decision.decision_id == told.decision.decision_id >= 0
        assert not told.faults
    if told.faults or told.acknowledged:
        assert (step.steps, step.acknowledge) == ((), False)
    assert step.acknowledge or step.phase is Phase.DONE or step.reason, "who waits says for what"


@given(fleets(), NUMBERS, NUMBERS)
def test_it_gets_there_and_says_so_once(fleet: WorkerPools, prefill: int, decode: int) -> None:
    """Where there is room: each step is carried out, then what is on its way arrives, and what leaves is gone."""
    told = KeysState(PlannerDecision(prefill, decode, 0))
    last = None
    for _ in range(4):
        last = step = next_step(told, fleet, last)
        if step.phase is Phase.REFUSED:
            assert fleet.prefill is None
            assert prefill > 0
            return
        if step.acknowledge:
            assert is_so(told.decision, fleet)
            assert next_step(replace(told, scaled_decision_id=0), fleet, step).steps == ()
            return
        for component, target in step.steps:
            fleet = _changed(fleet, component, ready=target, coming=0, routed=0)
        for pool in fleet.all:
            fleet = _changed(fleet, pool.component, ready=pool.capacity, coming=0, routed=0)
    raise AssertionError((fleet, last))


def _changed(fleet: WorkerPools, component: str, **counts: int) -> WorkerPools:
    def of(pool: Pool) -> Pool:
        return replace(pool, **counts) if pool.component == component else pool

    return WorkerPools(None if fleet.prefill is None else of(fleet.prefill), of(fleet.decode))
