"""One worker after the other: the sequence of a restart, step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynamo_local.core.fleet_view import Course, FleetView
from dynamo_local.core.instructions import BeginDrain, Revive
from dynamo_local.core.rolling import Done, RestartPlan, Stopped, Wait, next_step, plan_restart
from dynamo_local.core.types import WorkerState as S
from dynamo_local.errors import NotRestartable, UnknownWorker
from tests.fakes.fleet_views import fleet, name, worker


def put(view: FleetView, n: int, **changes: Any) -> FleetView:
    """The view with that worker changed."""
    return replace(view, workers=tuple(replace(w, **changes) if w.name == name(n) else w for w in view.workers))


def drained(view: FleetView, n: int) -> FleetView:
    """Its drain for a restart is committed."""
    return put(view, n, state=S.DRAINING, course=Course.RESTARTING)


def anew(view: FleetView, n: int, state: S = S.READY) -> FleetView:
    """Its new process is in that state."""
    return put(view, n, state=state, course=Course.STEADY, starts=2)


def plan(view: FleetView, target: str, **more: Any) -> RestartPlan:
    """`dynamo restart <target>`"""
    return plan_restart(view, target, stimulus_id="t", **more)


def served(*states: str) -> FleetView:
    """Workers that have been started once."""
    return fleet(*(worker(n, state, starts=1) for n, state in enumerate(states)))


def test_workers_are_restarted_one_after_the_other() -> None:
    """Drain, gone, started, ready; only then the next, the bare one last. No spare GPU is asked for."""
    view = served("ready", "ready")
    step, left = next_step(view, plan(view, "VllmWorker"))
    assert step == BeginDrain(name(1), "restart", restart=True)
    view = drained(view, 1)
    assert next_step(view, left) == (Wait(name(1), "it is draining"), left)
    view = put(view, 1, state=S.EXITED)
    assert next_step(view, left) == (Wait(name(1), "it is exited"), left)
    view = put(view, 1, state=S.PENDING, course=Course.STEADY)
    assert next_step(view, left) == (Wait(name(1), "it is pending"), left)
    view = anew(view, 1, S.STARTING)
    assert next_step(view, left) == (Wait(name(1), "it is starting, started anew"), left)
    step, left = next_step(anew(view, 1), left)
    assert step == BeginDrain(name(), "restart", restart=True)
    assert left.done == (name(1),)
    view = anew(anew(view, 1), 0)
    step, left = next_step(view, left)
    assert (step, left.done, left.skipped) == (Done(), (name(1), name()), ())


def test_one_worker_is_restarted_by_its_name() -> None:
    """Its siblings are left alone."""
    view = served("ready", "ready")
    assert plan(view, name()).todo == ((name(), 1),)


def test_the_only_worker_is_restarted_with_a_warning() -> None:
    """A restart comes back; a component of one could not be restarted otherwise."""
    view = served("ready")
    made = plan(view, "VllmWorker")
    assert f"{name()} is the only worker of VllmWorker" in made.warnings[0]
    assert next_step(view, made)[0] == BeginDrain(name(), "restart", restart=True)
    assert plan(served("ready", "ready"), name()).warnings == ()


def test_the_last_ready_worker_waits_for_a_sibling_that_comes() -> None:
    """The gap is never wider than it must be; `force` does not wait."""
    view = served("ready", "starting")
    step, _ = next_step(view, plan(view, name()))
    assert step == Wait(name(1), f"{name()} is the last ready worker until {name(1)} is ready")
    assert next_step(view, plan(view, name(), force=True))[0] == BeginDrain(name(), "restart", restart=True)


def test_what_does_not_serve_is_restarted_first() -> None:
    """A fault is cleared, a back-off skipped, before capacity goes."""
    view = served("ready", "faulted", "ready", "backing_off")
    made = plan(view, "VllmWorker")
    assert [n for n, _ in made.todo] == [name(3), name(1), name(2), name()]
    step, made = next_step(view, made)
    assert step == Revive(name(3), "VllmWorker", 1, reason="restart: it was backing_off")
    step, _ = next_step(anew(view, 3), made)
    assert step == Revive(name(1), "VllmWorker", 1, reason="restart: it was faulted")


def test_a_worker_that_starts_is_started_again() -> None:
    """It loads the old configuration."""
    view = served("ready", "starting")
    assert next_step(view, plan(view, name(1)))[0] == BeginDrain(name(1), "restart", restart=True)


def test_a_template_comes_back_by_name_only() -> None:
    """Restarting a component starts nothing that was scaled away."""
    view = served("exited", "ready")
    assert next_step(view, plan(view, name()))[0] == Revive(name(), "VllmWorker", 1, reason="restart: it was exited")
    assert plan(view, "VllmWorker").todo == ((name(1), 1),)


@pytest.mark.parametrize("begun", [False, True])
def test_the_sequence_stops_at_a_new_process_that_is_faulted(begun: bool) -> None:
    """The siblings go on serving with the old configuration."""
    view = served("ready", "ready")
    _, left = next_step(view, plan(view, "VllmWorker"))
    view = put(view, 1, state=S.FAULTED, reason="5 failures", starts=1 if begun else 6)
    assert next_step(view, left)[0] == Stopped(name(1), "5 failures")


def test_a_new_process_that_crashes_is_waited_for() -> None:
    """Its back-off is not skipped: it ends in a start or a fault."""
    view = served("ready", "faulted")
    _, left = next_step(view, plan(view, name(1)))
    assert next_step(anew(view, 1, S.BACKING_OFF), left)[0] == Wait(name(1), "it is backing_off, started anew")
    assert next_step(put(view, 1, state=S.BACKING_OFF), left)[0] == Wait(name(1), "it is backing_off")


@pytest.mark.parametrize(
    "meanwhile",
    [
        {"state": S.READY},
        {"state": S.DRAINING, "course": Course.RETURNING},
        {"state": S.DRAINING, "course": Course.STEADY},
        {"state": S.EXITED, "course": Course.STEADY},
    ],
)
def test_a_restart_that_was_called_off_is_skipped(meanwhile: dict[str, Any]) -> None:
    """A person took the drain back, or scaled the worker away: the sequence goes on with the next."""
    view = served("ready", "ready")
    _, left = next_step(view, plan(view, "VllmWorker"))
    _, left = next_step(put(view, 1, **meanwhile), left)
    assert (left.skipped, left.todo) == ((name(1),), ((name(), 1),))


def test_a_bare_worker_that_was_scaled_away_meanwhile_does_not_come_back() -> None:
    """Its template is no restart that waits."""
    view = served("ready", "ready")
    _, left = next_step(view, plan(view, "VllmWorker"))
    view = put(anew(view, 1), 0, state=S.EXITED)
    step, left = next_step(view, left)
    assert (step, left.skipped) == (Done(), (name(),))


def test_a_worker_that_disappeared_is_skipped() -> None:
    """Its entry is gone."""
    view = served("ready", "ready")
    made = plan(view, "VllmWorker")
    step, left = next_step(replace(view, workers=view.workers[:1]), made)
    assert left.skipped == (name(1),)
    assert step == BeginDrain(name(), "restart", restart=True)


def test_a_process_that_was_replaced_meanwhile_is_done() -> None:
    """It crashed by itself and came back: it has the current configuration."""
    view = served("ready", "ready")
    step, left = next_step(anew(view, 1), plan(view, "VllmWorker"))
    assert left.done == (name(1),)
    assert step == BeginDrain(name(), "restart", restart=True)


def test_what_leaves_for_good_is_not_restarted() -> None:
    """The error names both ways out."""
    with pytest.raises(NotRestartable, match=f"drain {name(1)} --cancel"):
        plan(served("ready", "draining"), name(1))
    with pytest.raises(NotRestartable, match=r"scale VllmWorker \+1"):
        plan(served("exited"), "VllmWorker")


def test_an_unknown_name_is_refused() -> None:
    """Neither a worker nor a component."""
    with pytest.raises(UnknownWorker, match="'Nobody'"):
        plan(served("ready"), "Nobody")
