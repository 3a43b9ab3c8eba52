"""One worker after the other: the sequence of a restart, step by step."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_local.core.fleet.events import Restart
from dynamo_local.core.fleet.fleet import Fleet, Intent, RestartPlan
from dynamo_local.core.fleet.moves import Move
from dynamo_local.core.fleet.moves import MoveKind as M
from dynamo_local.core.fleet.restarting import Done, Stopped, Wait, next_step, plan_restart
from dynamo_local.core.types import WorkerState as S
from dynamo_local.errors import LastReadyWorker, NotRestartable, UnknownWorker
from tests.fakes.arbiter.fleet_views import DECODE, FRONTEND, fleet, name, on_ledger, worker


def put(view: Fleet, n: int, **changes: Any) -> Fleet:
    """The view with that worker changed."""
    return view.with_workers({**view.workers, name(n): view.workers[name(n)].changed(**changes)})


def drained(view: Fleet, n: int) -> Fleet:
    """Its drain for a restart is committed."""
    return put(view, n, state=S.DRAINING, intent=Intent.RESTARTING)


def anew(view: Fleet, n: int, state: S = S.READY) -> Fleet:
    """Its new process is in that state."""
    return put(view, n, state=state, intent=Intent.STEADY, starts=2)


def plan(view: Fleet, target: str, **more: Any) -> RestartPlan:
    """`dynamo restart <target>`"""
    return plan_restart(view, Restart(stimulus_id="t", name=target, **more))


def served(*states: str) -> Fleet:
    """Workers that have been started once."""
    return fleet(*(worker(n, state, starts=1) for n, state in enumerate(states)))


def test_workers_are_restarted_one_after_the_other() -> None:
    view = served("ready", "ready")
    step, left = next_step(view, plan(view, "VllmWorker"))
    assert step == Move(M.DRAIN, name(1), "restart", restart=True)
    view = drained(view, 1)
    assert next_step(view, left) == (Wait(name(1), "it is draining"), left)
    view = put(view, 1, state=S.EXITED)
    assert next_step(view, left) == (Wait(name(1), "it is exited"), left)
    view = put(view, 1, state=S.PENDING, intent=Intent.STEADY)
    assert next_step(view, left) == (Wait(name(1), "it is pending"), left)
    view = anew(view, 1, S.STARTING)
    assert next_step(view, left) == (Wait(name(1), "it is starting, started anew"), left)
    step, left = next_step(anew(view, 1), left)
    assert step == Move(M.DRAIN, name(), "restart", restart=True)
    assert left.done == (name(1),)
    view = anew(anew(view, 1), 0)
    step, left = next_step(view, left)
    assert (step, left.done, left.skipped) == (Done(), (name(1), name()), ())


def test_one_worker_is_restarted_by_its_name() -> None:
    view = served("ready", "ready")
    assert plan(view, name()).todo == ((name(), 1),)


def test_the_only_worker_is_replaced_by_one_that_is_started_first() -> None:
    view = served("ready")
    step, left = next_step(view, plan(view, "VllmWorker"))
    assert step == Move(M.SPAWN, name(1), f"restart of {name()}", component="VllmWorker", n=1)
    view = fleet(worker(0, "ready", starts=1), worker(1, "starting", starts=1))
    assert next_step(view, left) == (Wait(name(1), f"it is starting, and takes the place of {name()}"), left)
    view = put(view, 1, state=S.READY)
    step, left = next_step(view, left)
    assert step == Move(M.DRAIN, name(), f"restart: {name(1)} serves in its place")
    step, left = next_step(put(view, 0, state=S.DRAINING), left)
    assert (step, left.done) == (Done(), (name(),))


def test_a_substitute_waits_for_a_gpu_that_comes_back() -> None:
    view = fleet(worker(0, "ready", starts=1), worker(1, "draining"), gpus=2)
    step, _ = next_step(view, plan(view, name()))
    assert step == Move(M.SPAWN, name(2), f"restart of {name()}", component="VllmWorker", n=2, waits=True)


@pytest.mark.parametrize(
    ("component", "gpus", "why"), [("VllmWorker", 1, "too few GPUs"), ("Frontend", 8, "its class allows 1")]
)
def test_the_only_worker_is_not_restarted_where_it_cannot_be_replaced(component: str, gpus: int, why: str) -> None:
    template = DECODE if component == "VllmWorker" else FRONTEND
    view = on_ledger([worker(0, "ready", template, starts=1)], gpus)
    with pytest.raises(LastReadyWorker, match=f"is refused: {name(0, component)} is the only worker.*{why}.*--force"):
        plan(view, component)
    made = plan(view, component, force=True)
    assert f"{name(0, component)} is the only worker of {component}" in made.warnings[0]
    assert next_step(view, made)[0] == Move(M.DRAIN, name(0, component), "restart", restart=True)


def test_no_gpu_for_a_substitute_any_more_stops_the_sequence() -> None:
    """The siblings that it was to have are gone, and somebody else took the device."""
    view = fleet(worker(0, "ready", starts=1), worker(1, "faulted", starts=1), gpus=1)
    step, _ = next_step(view, RestartPlan("t", ((name(), 1),)))
    assert isinstance(step, Stopped)
    assert "too few GPUs" in step.why


def test_a_substitute_that_is_faulted_is_taken_away_again() -> None:
    view = served("ready")
    _, left = next_step(view, plan(view, "VllmWorker"))
    view = fleet(worker(0, "ready", starts=1), worker(1, "faulted", starts=5, reason="5 failures"))
    step, left = next_step(view, left)
    assert step == Move(M.TAKE_BACK, name(1), f"restart of {name()}: 5 failures")
    assert next_step(served("ready"), left)[0] == Stopped(name(1), "5 failures")


@pytest.mark.parametrize("who", ["old", "new"])
def test_a_replacement_that_somebody_calls_off_is_skipped(who: str) -> None:
    view = served("ready")
    _, left = next_step(view, plan(view, "VllmWorker"))
    if who == "old":
        view = fleet(worker(0, "ready", starts=1), worker(1, "ready", starts=1))
        _, left = next_step(view, left)
        view = put(view, 0, state=S.DRAINING, intent=Intent.RETURNING)
    step, left = next_step(view, left)
    assert (step, left.skipped) == (Done(), (name(),))


def test_the_last_ready_worker_waits_for_a_sibling_that_comes() -> None:
    view = served("ready", "starting")
    step, _ = next_step(view, plan(view, name()))
    assert step == Wait(name(1), f"{name()} is the last ready worker until {name(1)} is ready")
    assert next_step(view, plan(view, name(), force=True))[0] == Move(M.DRAIN, name(), "restart", restart=True)


def test_what_does_not_serve_is_restarted_first() -> None:
    view = served("ready", "faulted", "ready", "backing_off")
    made = plan(view, "VllmWorker")
    assert [n for n, _ in made.todo] == [name(3), name(1), name(2), name()]
    step, made = next_step(view, made)
    assert step == Move(M.SPAWN, name(3), "restart: it was backing_off", component="VllmWorker", n=3)
    step, _ = next_step(anew(view, 3), made)
    assert step == Move(M.SPAWN, name(1), "restart: it was faulted", component="VllmWorker", n=1)


def test_a_worker_that_starts_is_started_again() -> None:
    view = served("ready", "starting")
    assert next_step(view, plan(view, name(1)))[0] == Move(M.DRAIN, name(1), "restart", restart=True)


def test_a_template_comes_back_by_name_only() -> None:
    view = served("exited", "ready")
    assert next_step(view, plan(view, name()))[0] == Move(
        M.SPAWN, name(), "restart: it was exited", component="VllmWorker"
    )
    assert plan(view, "VllmWorker").todo == ((name(1), 1),)


@pytest.mark.parametrize("begun", [False, True])
def test_the_sequence_stops_at_a_new_process_that_is_faulted(begun: bool) -> None:
    view = served("ready", "ready")
    _, left = next_step(view, plan(view, "VllmWorker"))
    view = put(view, 1, state=S.FAULTED, reason="5 failures", starts=1 if begun else 6)
    assert next_step(view, left)[0] == Stopped(name(1), "5 failures")


def test_a_new_process_that_crashes_is_waited_for() -> None:
    view = served("ready", "faulted")
    _, left = next_step(view, plan(view, name(1)))
    assert next_step(anew(view, 1, S.BACKING_OFF), left)[0] == Wait(name(1), "it is backing_off, started anew")
    assert next_step(put(view, 1, state=S.BACKING_OFF), left)[0] == Wait(name(1), "it is backing_off")


@pytest.mark.parametrize(
    "meanwhile",
    [
        {"state": S.READY},
        {"state": S.DRAINING, "intent": Intent.RETURNING},
        {"state": S.DRAINING, "intent": Intent.STEADY},
        {"state": S.EXITED, "intent": Intent.STEADY},
    ],
)
def test_a_restart_that_was_called_off_is_skipped(meanwhile: dict[str, Any]) -> None:
    view = served("ready", "ready")
    _, left = next_step(view, plan(view, "VllmWorker"))
    _, left = next_step(put(view, 1, **meanwhile), left)
    assert (left.skipped, left.todo) == ((name(1),), ((name(), 1),))


def test_a_bare_worker_that_was_scaled_away_meanwhile_does_not_come_back() -> None:
    view = served("ready", "ready")
    _, left = next_step(view, plan(view, "VllmWorker"))
    view = put(anew(view, 1), 0, state=S.EXITED)
    step, left = next_step(view, left)
    assert (step, left.skipped) == (Done(), (name(),))


def test_a_worker_that_disappeared_is_skipped() -> None:
    view = served("ready", "ready")
    made = plan(view, "VllmWorker", force=True)
    step, left = next_step(view.with_workers({name(): view.workers[name()]}), made)
    assert left.skipped == (name(1),)
    assert step == Move(M.DRAIN, name(), "restart", restart=True)


def test_a_process_that_was_replaced_meanwhile_is_done() -> None:
    view = served("ready", "ready")
    step, left = next_step(anew(view, 1), plan(view, "VllmWorker"))
    assert left.done == (name(1),)
    assert step == Move(M.DRAIN, name(), "restart", restart=True)


def test_what_leaves_for_good_is_not_restarted() -> None:
    with pytest.raises(NotRestartable, match=f"drain {name(1)} --cancel"):
        plan(served("ready", "draining"), name(1))
    with pytest.raises(NotRestartable, match=r"scale VllmWorker \+1"):
        plan(served("exited"), "VllmWorker")


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UnknownWorker, match="'Nobody'"):
        plan(served("ready"), "Nobody")
