"""`scale`, `drain` and `drain --cancel`: what is decided, and what is refused with which words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynamo_local.core.fleet import step as machine
from dynamo_local.core.fleet.events import Change, Scale, VictimPolicy, parse_target
from dynamo_local.core.fleet.fleet import Fleet, RestartPlan
from dynamo_local.core.fleet.moves import Move
from dynamo_local.core.fleet.moves import MoveKind as M
from dynamo_local.errors import (
    BadTarget,
    BeingRestarted,
    LastReadyWorker,
    NotEnoughGpus,
    TooManyWorkers,
    UnknownWorker,
    WorkerFaulted,
)
from tests.fakes.arbiter.decided import Decided, cancelled, drained, scaled_to
from tests.fakes.arbiter.fleet_views import DECODE, FRONTEND, PREFILL, fleet, load, name, on_ledger, worker


def scale(view: Fleet, text: str, component: str = "VllmWorker", **more: Any) -> Decided:
    """`dynamo scale <component> <text>`"""
    return scaled_to(view, component, parse_target(text), **more)


def scaled(view: Fleet, text: str, now_s: float, **more: Any) -> Fleet:
    """The fleet after `dynamo scale VllmWorker <text>`."""
    order = Scale(stimulus_id="t", component="VllmWorker", target=parse_target(text), **more)
    return machine.step(view, order, now_s)[0]


def brief(moves: tuple[Move, ...]) -> list[tuple[str, str]]:
    """Kind and worker of each."""
    return [(str(each.kind), each.name.removeprefix("dynamo_")) for each in moves]


# --- the number --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("+1", Change(1, relative=True)),
        ("-2", Change(-2, relative=True)),
        ("=3", Change(3, relative=False)),
        ("3", Change(3, relative=False)),
        ("0", Change(0, relative=False)),
        (" +64 ", Change(64, relative=True)),
    ],
)
def test_a_target_is_read(text: str, expected: Change) -> None:
    assert parse_target(text) == expected


@pytest.mark.parametrize("text", ["", "+", "x", "1.5", "+-1", "--1", "+ 1", "0x3", "٣", "+0", "-0", "=-1", "99999"])
def test_a_target_that_is_no_number_is_refused_with_itself(text: str) -> None:
    with pytest.raises(BadTarget) as refused:
        parse_target(text)
    assert repr(text) in str(refused.value)


def test_a_change_reads_as_it_was_written() -> None:
    assert [str(parse_target(text)) for text in ("+1", "-1", "=3", "3")] == ["+1", "-1", "=3", "=3"]


# --- more --------------------------------------------------------------------------------------


def test_one_more_takes_the_lowest_free_name() -> None:
    assert scale(fleet("ready", None, "ready"), "+1").or_raise() == (
        Move(M.SPAWN, name(1), "scale +1", component="VllmWorker", n=1),
    )


def test_the_first_worker_of_a_component_gets_the_bare_name() -> None:
    assert brief(scale(fleet(), "+2").or_raise()) == [("spawn", "VllmWorker"), ("spawn", "VllmWorker_1")]


def test_the_template_comes_back_under_its_name() -> None:
    assert brief(scale(fleet("exited"), "+1").or_raise()) == [("spawn", "VllmWorker")]
    assert brief(scale(fleet("exited", "ready"), "+1").or_raise()) == [("spawn", "VllmWorker")]


def test_a_suffixed_entry_on_its_way_out_keeps_its_name() -> None:
    assert brief(scale(fleet("ready", "exited"), "+1").or_raise()) == [("spawn", "VllmWorker_2")]


def test_each_worker_asks_for_its_own_devices() -> None:
    """A worker of two GPUs gets two when it is added."""
    templates = (replace(DECODE, gpus_per_worker=2),)
    then = scaled(fleet("ready", templates=templates), "+1", 0.0)
    assert len(then.worker(name(1)).gpus) == 2


def test_a_sibling_that_drains_is_taken_back_before_anything_is_started() -> None:
    assert brief(scale(fleet("ready", "draining", gpus=2), "+1").or_raise()) == [("cancel_drain", "VllmWorker_1")]


def test_the_drain_that_began_last_is_taken_back_first() -> None:
    view = fleet("ready", worker(1, "draining", since_s=5.0), worker(2, "draining", since_s=3.0))
    assert brief(scale(view, "+1").or_raise()) == [("cancel_drain", "VllmWorker_1")]
    assert brief(scale(view, "+3").or_raise()) == [
        ("cancel_drain", "VllmWorker_1"),
        ("cancel_drain", "VllmWorker_2"),
        ("spawn", "VllmWorker_3"),
    ]


def test_drains_that_cannot_be_taken_back_are_let_go() -> None:
    for sibling in (worker(1, "draining", served=False), worker(1, "drain_timed_out")):
        assert brief(scale(fleet("ready", sibling), "+1").or_raise()) == [("spawn", "VllmWorker_2")]
    returning = fleet("ready", "draining/returning")
    assert brief(scale(returning, "+1").or_raise()) == [("spawn", "VllmWorker_2")]
    assert scale(returning, "=2").or_raise() == ()


@pytest.mark.parametrize(
    "state",
    ["pending", "starting", "crashed", "start_timed_out", "backing_off", "draining/restarting", "exited/restarting"],
)
def test_capacity_on_its_way_counts(state: str) -> None:
    """A worker that loads, or comes back, is not asked for again."""
    assert scale(fleet("ready", state), "=2").or_raise() == ()


@pytest.mark.parametrize("state", ["draining", "drain_timed_out", "exited", "faulted", "crashed/leaving"])
def test_what_leaves_or_is_faulted_is_no_capacity(state: str) -> None:
    assert len(scale(fleet("ready", state), "=2").or_raise()) == 1


def test_a_person_clears_a_fault_by_asking_for_more() -> None:
    assert brief(scale(fleet("ready", "faulted"), "+2").or_raise()) == [
        ("spawn", "VllmWorker_1"),
        ("spawn", "VllmWorker_2"),
    ]


def test_a_planner_does_not_clear_a_fault() -> None:
    """It would restart a broken worker for ever; the refusal says who must look, and how."""
    view = fleet("ready", worker(1, "faulted", reason="5 failures"))
    decision = scale(view, "+1", by_person=False)
    assert decision.moves == ()
    assert isinstance(decision.refused, WorkerFaulted)
    assert "5 failures" in str(decision.refused)
    assert f"dynamo restart {name(1)}" in str(decision.refused)


def test_a_planner_may_still_take_a_drain_back_beside_a_fault() -> None:
    view = fleet("ready", "faulted", "draining")
    assert brief(scale(view, "+1", by_person=False).or_raise()) == [("cancel_drain", "VllmWorker_2")]


def test_a_class_bounds_its_workers() -> None:
    view = on_ledger([worker(0, "ready", FRONTEND)], 1)
    assert isinstance(scale(view, "+1", "Frontend").refused, TooManyWorkers)


def test_an_unknown_component_is_refused_with_those_there_are() -> None:
    decision = scale(fleet(), "+1", "VlmWorker")
    assert isinstance(decision.refused, UnknownWorker)
    assert "VllmWorker" in str(decision.refused)
    with pytest.raises(UnknownWorker):
        decision.or_raise()


# --- GPUs --------------------------------------------------------------------------------------


def test_too_few_gpus_are_refused_with_their_holders() -> None:
    decision = scale(fleet("ready", gpus=2), "+2")
    assert decision.moves == ()
    assert isinstance(decision.refused, NotEnoughGpus)
    assert "2 needed, 1 of 2 free" in str(decision.refused)
    assert f"is held by {name()}" in str(decision.refused)


@pytest.mark.parametrize("state", ["pending", "backing_off", "exited/restarting"])
def test_a_device_is_kept_for_a_worker_on_its_way(state: str) -> None:
    decision = scale(fleet("ready", state, gpus=2), "+1", wait_for_gpus=True)
    assert isinstance(decision.refused, NotEnoughGpus)
    assert f"1 free kept for {name(1)}" in str(decision.refused)


def test_devices_of_leaving_workers_are_not_free_but_named() -> None:
    view = on_ledger([worker(0, "ready"), worker(0, "draining", PREFILL)], 2)
    decision = scale(view, "+1")
    assert isinstance(decision.refused, NotEnoughGpus)
    assert "1 of them come back when the workers that leave are gone" in str(decision.refused)


def test_one_may_wait_for_devices_of_leaving_workers() -> None:
    view = on_ledger([worker(0, "ready"), worker(0, "ready", PREFILL), worker(1, "draining", PREFILL)], 4)
    first, second = scale(view, "+2", wait_for_gpus=True).or_raise()
    assert first.kind is M.SPAWN
    assert second.kind is M.SPAWN
    assert (first.waits, second.waits) == (False, True)
    assert scale(view, "+3", wait_for_gpus=True).refused is not None


def test_a_drain_taken_back_cancels_who_waits_for_its_devices() -> None:
    """Else an entry would wait for ever."""
    view = on_ledger(
        [worker(0, "ready"), worker(1, "pending"), worker(0, "ready", PREFILL), worker(1, "draining", PREFILL)], 3
    )
    expected = [("cancel_drain", "PrefillWorker_1"), ("take_back", "VllmWorker_1")]
    assert brief(scale(view, "+1", "PrefillWorker").or_raise()) == expected
    assert brief(cancelled(view, name(1, "PrefillWorker")).or_raise()) == expected


def test_the_only_worker_of_a_component_goes_on_waiting() -> None:
    view = on_ledger([worker(0, "pending"), worker(0, "ready", PREFILL), worker(1, "draining", PREFILL)], 2)
    assert brief(scale(view, "+1", "PrefillWorker").or_raise()) == [("cancel_drain", "PrefillWorker_1")]


def test_the_template_counts_a_device_once() -> None:
    bare = worker(0, "exited", gpus=("x",))
    assert brief(scale(fleet(bare, gpus=1), "+1").or_raise()) == [("spawn", "VllmWorker")]
    assert scale(fleet(bare, gpus=1), "+2", wait_for_gpus=True).refused is not None


def test_the_template_does_not_take_what_another_waits_for() -> None:
    bare = worker(0, "exited", PREFILL, gpus=("x",))
    view = on_ledger([worker(0, "ready"), worker(1, "pending"), bare], 2)
    decision = scale(view, "+1", "PrefillWorker", wait_for_gpus=True)
    assert isinstance(decision.refused, NotEnoughGpus)
    assert "1 that an earlier process still holds are kept for others that wait" in str(decision.refused)


# --- fewer -------------------------------------------------------------------------------------


def test_the_highest_suffix_goes_first_and_the_bare_one_last() -> None:
    view = fleet("ready", "ready", "ready")
    assert brief(scale(view, "-2").or_raise()) == [("drain", "VllmWorker_2"), ("drain", "VllmWorker_1")]


def test_what_still_starts_is_taken_back_before_anything_drains() -> None:
    view = fleet("ready", "ready", "starting", "pending", "backing_off")
    assert brief(scale(view, "-4").or_raise()) == [
        ("take_back", "VllmWorker_4"),
        ("take_back", "VllmWorker_3"),
        ("take_back", "VllmWorker_2"),
        ("drain", "VllmWorker_1"),
    ]


def test_a_worker_that_is_called_back_is_drained_again() -> None:
    assert brief(scale(fleet("ready", "draining/returning"), "-1").or_raise()) == [("drain", "VllmWorker_1")]


@pytest.mark.parametrize("state", ["drain_timed_out/returning", "exited/returning"])
def test_a_worker_that_was_called_back_too_late_is_not_drained_again(state: str) -> None:
    assert brief(scale(fleet("ready", state), "-1").or_raise()) == [("take_back", "VllmWorker_1")]


def test_a_restart_is_called_off_before_a_ready_worker_goes() -> None:
    view = fleet("ready", "draining/restarting", "ready")
    assert brief(scale(view, "-1").or_raise()) == [("take_back", "VllmWorker_1")]


@pytest.mark.parametrize("text", ["-2", "=0", "0"])
def test_the_last_ready_worker_is_kept(text: str) -> None:
    decision = scale(fleet("ready", "ready"), text)
    assert decision.moves == ()
    assert isinstance(decision.refused, LastReadyWorker)
    for part in (name(), "last ready worker of VllmWorker (decode)", "dynamo scale VllmWorker +1", "--force"):
        assert part in str(decision.refused)


def test_a_worker_that_starts_does_not_stand_in_for_a_ready_one() -> None:
    decision = drained(fleet("ready", "starting"), name())
    assert isinstance(decision.refused, LastReadyWorker)
    assert f"wait until {name(1)} (starting) is ready" in str(decision.refused)


def test_a_draining_worker_does_not_stand_in_for_a_ready_one() -> None:
    assert isinstance(scale(fleet("ready", "draining"), "-1").refused, LastReadyWorker)


def test_another_component_of_the_role_does_not_stand_in() -> None:
    other = replace(DECODE, component="OtherWorker")
    view = on_ledger([worker(0, "ready"), worker(0, "ready", other)], 2, (DECODE, other))
    assert isinstance(scale(view, "-1").refused, LastReadyWorker)


def test_the_only_worker_on_its_way_is_kept_too() -> None:
    assert isinstance(scale(fleet("starting"), "-1").refused, LastReadyWorker)
    assert brief(scale(fleet("starting", "starting"), "-1").or_raise()) == [("take_back", "VllmWorker_1")]


def test_force_takes_the_last_one() -> None:
    view = fleet("ready")
    decision = scale(view, "=0", force=True)
    assert brief(decision.or_raise()) == [("drain", "VllmWorker")]
    assert brief(scale(scaled(view, "=0", 1.0, force=True), "+1").or_raise()) == [("cancel_drain", "VllmWorker")]


def test_more_than_there_are_cannot_be_taken() -> None:
    decision = scale(fleet("ready", "draining", "faulted"), "-2", force=True)
    assert isinstance(decision.refused, BadTarget)
    assert "it has 1 " in str(decision.refused)


def test_a_policy_chooses_among_ready_workers() -> None:
    view = fleet(worker(0, "ready", load=load(5)), worker(1, "ready", load=load(50)))
    decision = scale(view, "-1", victim_policy=VictimPolicy.LEAST_LOADED)
    assert brief(decision.or_raise()) == [("drain", "VllmWorker")]


def test_nothing_is_decided_where_it_is_so_already() -> None:
    assert scale(fleet("ready", "starting", "draining"), "=2") == Decided()


def test_a_planner_takes_nobody_from_a_component_that_is_restarted() -> None:
    """It would count a worker and its substitute as two; a person may, and more are welcome."""
    view = replace(fleet("ready", "starting"), restarts=(RestartPlan("apply:1", ((name(), 1),)),))
    assert isinstance(scale(view, "-1", by_person=False).refused, BeingRestarted)
    assert brief(scale(view, "-1").or_raise()) == [("take_back", "VllmWorker_1")]
    assert brief(scale(view, "+1", by_person=False).or_raise()) == [("spawn", "VllmWorker_2")]
