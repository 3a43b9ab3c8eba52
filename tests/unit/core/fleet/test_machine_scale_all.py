"""The machine: several components to their numbers in one order, or nothing at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamo_local.core.fleet import effects as ins
from dynamo_local.core.fleet import events as st
from dynamo_local.core.fleet.fleet import Fleet, Worker
from dynamo_local.core.fleet.step import step
from dynamo_local.core.types import EVERY, WAKES, Actuator
from dynamo_local.errors import LastReadyWorker, NotEnoughGpus, UnknownWorker, WorkerFaulted
from tests.fakes.arbiter.fleet_views import DECODE, PREFILL, name, on_ledger, worker
from tests.fakes.arbiter.machine import Life

D, P = "VllmWorker", "PrefillWorker"


def to(actuators: frozenset[Actuator] = WAKES, **targets: int) -> st.ScaleAll:
    """A planner's decision."""
    return st.ScaleAll(stimulus_id="planner:7", targets=targets, actuators=actuators)


def both(prefill: list[str], decode: list[str], gpus: int) -> Fleet:
    """Workers of both components by their states."""
    workers: list[Worker] = [worker(n, state, PREFILL) for n, state in enumerate(prefill)]
    return on_ledger([*workers, *(worker(n, state) for n, state in enumerate(decode))], gpus)


def counts(fleet: Fleet) -> dict[str, int]:
    return {component: fleet.capacity(component) for component in (P, D)}


def test_both_components_move_in_one_commit_by_any_number() -> None:
    life = Life(both(["ready"], ["ready"] * 4, gpus=8))
    life.feed(to(PrefillWorker=4, VllmWorker=2))
    assert counts(life.fleet) == {P: 4, D: 2}
    (commit,) = [each for each in life.last if isinstance(each, ins.Commit)]
    assert set(commit.names) == {name(2), name(3), *(name(n, P) for n in (1, 2, 3))}
    assert {transition.stimulus_id for transition in commit.transitions} == {"planner:7"}


def test_a_swap_drains_first_and_the_up_waits_for_the_gpu_that_is_really_freed() -> None:
    life = Life(both(["ready"], ["ready", "ready"], gpus=3))
    done = life.feed(to(PrefillWorker=2, VllmWorker=1))
    assert not any(what.startswith("spawn") for what in done)
    assert counts(life.fleet) == {P: 2, D: 1}
    (coming,) = life.fleet.on_their_way(P)
    assert (str(coming.state), coming.gpus) == ("pending", ())
    life.gone(1)
    life.swept(1)
    assert life.gpus() != []
    assert len(life.fleet.workers[coming.name].gpus) == 1


@pytest.mark.parametrize(
    ("targets", "refusal"),
    [
        ({P: 2, D: 9}, NotEnoughGpus),
        ({P: 2, D: 0}, LastReadyWorker),
        ({P: 2, "Nobody": 1}, UnknownWorker),
    ],
)
def test_one_component_that_is_refused_leaves_the_other_as_it_is(
    targets: dict[str, int], refusal: type[Exception]
) -> None:
    before = both(["ready"], ["ready", "ready"], gpus=8)
    with pytest.raises(refusal):
        step(before, to(**targets), 100.0)
    assert counts(before) == {P: 1, D: 2}


def test_a_faulted_worker_is_not_started_again_unasked() -> None:
    with pytest.raises(WorkerFaulted):
        step(both(["ready"], ["ready", "faulted"], gpus=8), to(VllmWorker=2), 100.0)


def test_drains_are_taken_back_before_others_hope_for_their_gpus() -> None:
    """Prefill may not count on the GPU of a decode worker that stays after all; with a free one both are there."""
    with pytest.raises(NotEnoughGpus):
        step(both(["ready"], ["ready", "draining"], gpus=3), to(PrefillWorker=2, VllmWorker=2), 100.0)
    life = Life(both(["ready"], ["ready", "draining"], gpus=4))
    done = life.feed(to(PrefillWorker=2, VllmWorker=2))
    assert any("call back" in what for what in done)
    assert counts(life.fleet) == {P: 2, D: 2}


def test_an_entry_whose_gpus_would_not_come_any_more_refuses_the_order() -> None:
    """Prefill waits for the GPU of the draining decode worker: taking that back and keeping the entry is impossible."""
    life = Life(both(["ready"], ["ready", "ready"], gpus=3))
    life.feed(to(PrefillWorker=2, VllmWorker=1))
    with pytest.raises(NotEnoughGpus):
        life.feed(to(PrefillWorker=2, VllmWorker=2))
    assert counts(life.fleet) == {P: 2, D: 1}


def test_what_is_so_already_commits_nothing() -> None:
    life = Life(both(["ready"], ["ready"], gpus=2))
    assert life.feed(to(PrefillWorker=1, VllmWorker=1)) == []
    assert not [each for each in life.last if isinstance(each, ins.Commit)]


# --- by flips and sleeps -----------------------------------------------------------------------------


def states(life: Life) -> list[str]:
    return sorted(f"{each.component}: {each.state}" for each in life.fleet.workers.values())


def test_a_swap_is_a_flip_where_flips_are_allowed() -> None:
    life = Life(both(["ready"], ["ready", "ready"], gpus=3))
    life.feed(to(EVERY, PrefillWorker=2, VllmWorker=1))
    assert counts(life.fleet) == {P: 2, D: 1}
    assert states(life) == [f"{P}: ready", f"{D}: flipping", f"{D}: ready"]
    assert [type(each) for each in life.last if isinstance(each, ins.FlipRole | ins.Spawn)] == [ins.FlipRole]


def test_what_flips_do_not_bring_is_started_or_drained() -> None:
    life = Life(both(["ready"], ["ready"] * 2, gpus=6))
    life.feed(to(EVERY, PrefillWorker=4, VllmWorker=1))
    assert counts(life.fleet) == {P: 4, D: 1}
    assert states(life).count(f"{D}: flipping") == 1
    assert len(life.fleet.on_their_way(P)) == 3
    life = Life(both(["ready"], ["ready"] * 4, gpus=6))
    life.feed(to(EVERY, PrefillWorker=2, VllmWorker=1))
    assert (states(life).count(f"{D}: flipping"), states(life).count(f"{D}: draining")) == (1, 2)


def test_the_last_that_serves_does_not_flip_and_a_drain_is_taken_back_before_one_does() -> None:
    life = Life(both(["ready"], ["ready", "starting"], gpus=4))
    life.feed(to(EVERY, PrefillWorker=2, VllmWorker=1))
    assert f"{D}: flipping" not in states(life)
    assert counts(life.fleet) == {P: 2, D: 1}
    life = Life(both(["ready", "draining"], ["ready", "ready"], gpus=4))
    life.feed(to(EVERY, PrefillWorker=2, VllmWorker=1))
    assert f"{D}: flipping" not in states(life)
    assert counts(life.fleet) == {P: 2, D: 1}


@pytest.mark.parametrize(("kept", "after"), [(0, "draining"), (1, "falling_asleep"), (None, "draining")])
def test_who_is_given_up_sleeps_where_one_is_to_be_on_standby(kept: int | None, after: str) -> None:
    """Else another worker would be started, only to be put to sleep."""
    templates = (replace(DECODE, standby=kept), PREFILL)
    life = Life(on_ledger([worker(0, "ready"), worker(1, "ready")], 2, templates))
    life.feed(to(VllmWorker=1))
    assert str(life.fleet.workers[name(1)].state) == after
    life = Life(on_ledger([worker(0, "ready"), worker(1, "ready")], 2, templates))
    life.feed(to(frozenset(), VllmWorker=1))
    assert str(life.fleet.workers[name(1)].state) == "draining"


def test_one_that_sleeps_is_woken_for_one_more_unless_that_is_not_wanted() -> None:
    templates = (replace(DECODE, standby=0), PREFILL)
    for actuators, state, workers in ((WAKES, "waking", 2), (frozenset[Actuator](), "sleeping", 3)):
        life = Life(on_ledger([worker(0, "ready"), worker(1, "sleeping")], 3, templates))
        life.feed(to(actuators, VllmWorker=2))
        assert (str(life.fleet.workers[name(1)].state), len(life.fleet.workers)) == (state, workers)
