"""How long starts and drains really took, and what follows for intervals and leads."""

from __future__ import annotations

import pytest

from dynamo_local.core.fleet.lifecycle import Transition, TransitionKind
from dynamo_local.core.types import WorkerState
from dynamo_local.planner.policies.protocol import adapted_interval_s, steps_ahead
from dynamo_local.planner.scaling_times import ScalingTimes
from dynamo_local.planner.values import WorkerPools
from tests.fakes.arbiter.fleet_views import worker
from tests.fakes.planner.observations import DECODE, worker_pools


class Story:
    """Transitions of one decode worker, each so many seconds after the one before."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.times = ScalingTimes(lambda: self.now_s)

    def tell(self, *steps: tuple[float, str]) -> WorkerPools:
        before = WorkerState.PENDING
        for after_s, state in steps:
            self.now_s += after_s
            after = WorkerState(state)
            self.times.on_transition(
                worker(1, "ready"),
                Transition("dynamo_W", DECODE, before, after, TransitionKind.SPAWN_REQUESTED, "test"),
            )
            before = after
        return self.times.reported(worker_pools(1, 1))


def test_a_start_is_from_the_spawn_until_it_serves_and_a_drain_until_it_is_gone() -> None:
    pools = Story().tell((0, "starting"), (30, "ready"), (500, "draining"), (12, "exited"))
    assert (pools.decode.start_up_s, pools.decode.drain_s) == (30, 12)
    assert pools.prefill is not None
    assert (pools.prefill.start_up_s, pools.prefill.drain_s) == (None, None)


def test_a_drain_past_its_deadline_counts_whole() -> None:
    pools = Story().tell((0, "starting"), (30, "ready"), (9, "draining"), (60, "drain_timed_out"), (2, "exited"))
    assert pools.decode.drain_s == 62


@pytest.mark.parametrize(
    "steps",
    [
        [(0, "starting"), (5, "crashed"), (1, "backing_off")],
        [(0, "starting"), (5, "draining"), (1, "exited")],
        [(0, "ready"), (5, "draining"), (1, "ready")],
    ],
)
def test_what_did_not_come_to_its_end_says_nothing(steps: list[tuple[float, str]]) -> None:
    decode = Story().tell(*steps).decode
    assert (decode.start_up_s, decode.drain_s) == (None, None)


def test_the_median_of_the_last_ones_counts() -> None:
    story = Story()
    for seconds in (300.0, 10.0, 20.0, 30.0, 40.0, 50.0):
        pools = story.tell((0, "starting"), (seconds, "ready"), (1, "exited"))
    assert pools.decode.start_up_s == 30.0


def test_intervals_and_leads_follow_the_slower_role() -> None:
    nothing = worker_pools(1, 1)
    assert (adapted_interval_s(10.0, nothing), steps_ahead(10.0, nothing)) == (10.0, 1)
    seen = Story().tell((0, "starting"), (25, "ready"), (1, "draining"), (40, "exited"))
    assert (adapted_interval_s(10.0, seen), adapted_interval_s(60.0, seen)) == (40.0, 60.0)
    assert (steps_ahead(10.0, seen), steps_ahead(25.0, seen), steps_ahead(60.0, seen)) == (4, 2, 2)
