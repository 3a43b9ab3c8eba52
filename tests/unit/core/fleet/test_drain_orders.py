"""Drains by name, taken back by name, and what a decision sees that is made on the committed intent of another."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_local.core.fleet import step as machine
from dynamo_local.core.fleet.events import Drain, Scale, parse_target
from dynamo_local.core.fleet.fleet import Fleet
from dynamo_local.core.fleet.moves import Move
from dynamo_local.core.fleet.moves import MoveKind as M
from dynamo_local.core.types import WorkerState as S
from dynamo_local.errors import DrainNotCancellable, LastReadyWorker, UnknownWorker
from tests.fakes.arbiter.decided import Decided, cancelled, drained, scaled_to
from tests.fakes.arbiter.fleet_views import fleet, name, worker


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


# --- drains by name ----------------------------------------------------------------------------


def test_a_named_worker_is_drained() -> None:
    decision = drained(fleet("ready", "ready"), name())
    assert decision.or_raise() == (Move(M.DRAIN, name(), "drain"),)


@pytest.mark.parametrize("state", ["draining", "drain_timed_out", "exited", "crashed/leaving"])
def test_a_drain_of_what_leaves_already_does_nothing(state: str) -> None:
    assert drained(fleet("ready", state), name(1)) == Decided()


@pytest.mark.parametrize("state", ["pending", "starting", "backing_off", "crashed", "faulted", "draining/restarting"])
def test_a_drain_of_what_does_not_serve_takes_it_back(state: str) -> None:
    decision = drained(fleet("ready", state), name(1))
    assert brief(decision.or_raise()) == [("take_back", "VllmWorker_1")]


def test_the_last_ready_worker_is_drained_by_force_only() -> None:
    view = fleet("ready")
    assert isinstance(drained(view, name()).refused, LastReadyWorker)
    assert brief(drained(view, name(), force=True).or_raise()) == [("drain", "VllmWorker")]


def test_the_bare_worker_is_found_without_its_namespace() -> None:
    """`dynamo drain VllmWorker`, as `dynamo drain VllmWorker_1`."""
    moves = drained(fleet("ready", "ready"), "VllmWorker").or_raise()
    assert brief(moves) == [("drain", "VllmWorker")]


def test_an_unknown_worker_is_refused_with_those_there_are() -> None:
    for decision in (
        drained(fleet("ready"), "VllmWorker_7"),
        cancelled(fleet("ready"), "VllmWorker_7"),
    ):
        assert isinstance(decision.refused, UnknownWorker)
        assert name() in str(decision.refused)


@pytest.mark.parametrize("state", ["draining", "draining/restarting"])
def test_a_drain_is_taken_back(state: str) -> None:
    decision = cancelled(fleet("ready", state), name(1))
    assert brief(decision.or_raise()) == [("cancel_drain", "VllmWorker_1")]


@pytest.mark.parametrize("state", ["ready", "draining/returning"])
def test_taking_back_what_is_back_does_nothing(state: str) -> None:
    assert cancelled(fleet("ready", state), name(1)) == Decided()


@pytest.mark.parametrize(
    ("sibling", "why"),
    [
        (worker(1, "draining", served=False), "it was never ready"),
        (worker(1, "drain_timed_out"), "passed its deadline"),
        (worker(1, "exited"), "it is exited, not draining"),
        (worker(1, "starting"), "it is starting, not draining"),
    ],
)
def test_what_cannot_be_taken_back_says_why(sibling: object, why: str) -> None:
    refused = cancelled(fleet("ready", sibling), name(1)).refused  # type: ignore[arg-type]
    assert isinstance(refused, DrainNotCancellable)
    assert why in str(refused)
    assert name(1) in str(refused)


# --- intent ------------------------------------------------------------------------------------


def test_a_decision_on_the_committed_intent_goes_on_from_it() -> None:
    view = fleet("ready", "ready", "ready")
    twice = scaled(scaled(view, "-1", 1.0), "-1", 2.0)
    assert [w.state for w in twice.of("VllmWorker")] == [S.READY, S.DRAINING, S.DRAINING]
    assert brief(scale(twice, "+1").or_raise()) == [("cancel_drain", "VllmWorker_1")]
    assert brief(scale(scaled(twice, "+1", 3.0), "+1").or_raise()) == [("cancel_drain", "VllmWorker_2")]


def test_a_worker_that_never_was_ready_is_gone_at_once_where_it_has_no_process() -> None:
    view = fleet("faulted", "backing_off", "starting")
    for n in range(3):
        view, _, _ = machine.step(view, Drain(stimulus_id="t", name=name(n), force=True), 1.0)
    assert [(w.n, w.state) for w in view.of("VllmWorker")] == [(0, S.EXITED), (2, S.DRAINING)]
    assert not any(w.cancellable or w.counts for w in view.of("VllmWorker"))


def test_a_crashed_worker_that_is_taken_back_waits_for_its_process_to_end() -> None:
    view, _, _ = machine.step(fleet("ready", "crashed"), Drain(stimulus_id="t", name=name(1)), 1.0)
    assert [(w.state, w.counts) for w in view.of("VllmWorker")] == [(S.READY, True), (S.CRASHED, False)]


@pytest.mark.parametrize("cancel", [False, True])
def test_a_command_for_an_unknown_worker_changes_nothing(cancel: bool) -> None:
    with pytest.raises(UnknownWorker, match=name(3)):
        machine.step(fleet("ready"), Drain(stimulus_id="t", name=name(3), cancel=cancel), 1.0)
