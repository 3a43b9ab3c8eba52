"""The fleet as the load planner counts it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamo_local.core.fleet.fleet import Standby
from dynamo_local.core.types import EVERY, WorkerState
from dynamo_local.errors import UnknownWorker
from dynamo_local.planner.policies.pools import pools_of
from dynamo_local.planner.values import Pool
from tests.fakes.arbiter.fleet_views import DECODE, PREFILL, name, on_ledger, worker


def decode(*states: str, **more: object) -> Pool:
    """The decode pool of workers in these states, by number."""
    view = on_ledger([worker(n, state) for n, state in enumerate(states)], 8)
    return pools_of(view, decode="VllmWorker", **more).decode  # type: ignore[arg-type]


def test_ready_coming_and_leaving_are_told_apart() -> None:
    found = decode("ready", "starting", "draining", "faulted", "draining/restarting")
    assert (found.ready, found.coming, found.waiting, found.leaving, found.cancellable) == (1, 2, 0, 1, 1)
    assert (found.gpus_held, found.gpus_leaving, found.gpus_lacking) == (4, 1, 0)
    assert (found.capacity, found.adjusting) == (3, True)


@pytest.mark.parametrize("state", ["pending", "backing_off", "crashed", "start_timed_out"])
def test_what_waits_is_capacity_but_no_adjustment(state: str) -> None:
    found = decode("ready", state)
    assert (found.capacity, found.waiting, found.adjusting) == (2, 1, False)
    assert (found.gpus_held + found.gpus_lacking, found.gpus_spoken_for) == (2, 2)


def test_a_drain_is_an_adjustment_until_it_is_out_of_routing() -> None:
    assert decode("ready", "draining", routed={name(1)}).adjusting
    assert not decode("ready", "draining", routed={name(0)}).adjusting


def test_a_drain_past_its_deadline_still_holds_its_gpu_and_cannot_be_taken_back() -> None:
    found = decode("ready", "drain_timed_out")
    assert found.cancellable == 0
    assert (found.leaving, found.adjusting) == (1, False)


def test_the_template_that_is_left_is_no_worker() -> None:
    found = decode("exited", "ready")
    assert (found.capacity, found.leaving, found.gpus_held) == (1, 0, 1)


def test_the_last_that_became_ready_begins_the_grace() -> None:
    workers = [worker(0, "ready", since_s=5.0), worker(1, "ready", since_s=9.0), worker(2, "draining", since_s=20.0)]
    assert pools_of(on_ledger(workers, 8), decode="VllmWorker").decode.added_at_s == 9.0
    assert decode("starting").added_at_s is None


def test_prefill_is_counted_where_there_is_one() -> None:
    view = on_ledger([worker(0, "ready"), worker(0, "ready", PREFILL), worker(1, "ready", PREFILL)], 8)
    both = pools_of(view, decode="VllmWorker", prefill="PrefillWorker")
    assert [(pool.component, pool.ready) for pool in both.all] == [("PrefillWorker", 2), ("VllmWorker", 1)]
    assert pools_of(view, decode="VllmWorker").prefill is None


def test_a_component_that_there_is_not_is_named() -> None:
    view = on_ledger([], 0)
    with pytest.raises(UnknownWorker, match="there is no component 'Nope'"):
        pools_of(view, decode="Nope")


@pytest.mark.parametrize("state", sorted(WorkerState))
def test_every_state_is_counted_once(state: str) -> None:
    found = decode(state)
    assert found.ready + found.coming + found.leaving <= 1


def test_one_that_changes_its_role_counts_where_it_goes_to() -> None:
    """As `Fleet.capacity` counts it: a planner that took it for a decode worker would take one away too many."""
    turning = worker(1, "flipping")
    view = on_ledger([worker(0, "ready"), turning, worker(0, "ready", PREFILL)], 4)
    pools = pools_of(view, decode="VllmWorker", prefill="PrefillWorker", actuators=EVERY)
    assert pools.prefill is not None
    assert (pools.decode.capacity, pools.prefill.capacity) == (1, 2)
    assert (pools.decode.gpus_held, pools.prefill.gpus_held) == (1, 2)
    assert pools.adjusting


def test_who_could_flip_or_be_woken_is_counted_as_far_as_that_is_allowed() -> None:
    """One of each component stays; a sleeper whose GPU somebody else holds cannot be woken."""
    templates = (replace(DECODE, standby=0), PREFILL)
    ready = [worker(n, "ready") for n in range(3)]
    view = on_ledger([*ready, worker(3, "sleeping"), worker(0, "ready", PREFILL)], 8, templates)
    pools = pools_of(view, decode="VllmWorker", prefill="PrefillWorker", actuators=EVERY)
    assert pools.prefill is not None
    assert (pools.decode.flippable, pools.prefill.flippable) == (2, 0)
    assert (pools.decode.asleep, pools.prefill.asleep) == (1, 0)
    nothing = pools_of(view, decode="VllmWorker", prefill="PrefillWorker", actuators=frozenset())
    assert (nothing.decode.flippable, nothing.decode.asleep) == (0, 0)
    (uuid,) = view.gpus.sleepers[name(3)].uuids
    taken = replace(view, gpus=view.gpus.assign("somebody", [uuid]))
    assert pools_of(taken, decode="VllmWorker", prefill="PrefillWorker", actuators=EVERY).decode.asleep == 0


def test_one_that_is_only_started_to_sleep_does_not_sleep_yet() -> None:
    """It was counted as a sleeper: `slo` went without what it would have started, and waited for a whole start."""
    templates = (replace(DECODE, standby=2), PREFILL)
    coming = replace(worker(2, "starting"), standby=Standby(wanted=True))
    asleep = replace(worker(1, "sleeping"), standby=Standby(wanted=True))
    view = on_ledger([worker(0, "ready"), asleep, coming, worker(0, "ready", PREFILL)], 8, templates)
    decode = pools_of(view, decode="VllmWorker", prefill="PrefillWorker", actuators=EVERY).decode
    assert (decode.asleep, decode.capacity) == (1, 1)
