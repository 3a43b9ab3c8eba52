"""The machine: several components to their numbers in one order, or nothing at all."""

from __future__ import annotations

import pytest

from dynamo_local.core.life import instructions as ins
from dynamo_local.core.life import stimuli as st
from dynamo_local.core.life.fleet import Fleet, Worker
from dynamo_local.core.life.machine import step
from dynamo_local.errors import LastReadyWorker, NotEnoughGpus, UnknownWorker, WorkerFaulted
from tests.fakes.arbiter.fleet_views import PREFILL, name, on_ledger, worker
from tests.fakes.arbiter.machine import Life

D, P = "VllmWorker", "PrefillWorker"


def to(**targets: int) -> st.ScaleAll:
    """A planner's decision."""
    return st.ScaleAll(stimulus_id="planner:7", targets=targets)


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
    assert {transition.event.stimulus_id for transition in commit.transitions} == {"planner:7"}


def test_a_swap_drains_first_and_the_up_waits_for_the_gpu_that_is_really_freed() -> None:
    """However the targets are ordered."""
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
