"""The arbiter stood still: whatever it hears first afterwards, nobody is to blame for time in which nobody was asked.

On real processes: `integration/faults/test_faults_stopped_arbiter.py`. Here, the order in which things are heard.
"""

from __future__ import annotations

import pytest

from dynamo_local.arbiter.controller import FleetController
from dynamo_local.core.fleet.events import LoadsHeard, Tick
from dynamo_local.core.fleet.fleet import Fleet, Health, Process, Template, Worker
from dynamo_local.core.types import Role, WorkerState
from tests.fakes.arbiter.effects import shell_of
from tests.fakes.arbiter.hand_clock import HandClock

NAME = "dynamo_W"
BOUND_S = 2.0
STOPPED_S = 45.0


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


def _controller(
    clock: HandClock, state: WorkerState = WorkerState.READY, due_s: float | None = None
) -> FleetController:
    """A controller with one worker that has just answered, and a pulse."""
    worker = Worker(
        NAME,
        "W",
        Role.OTHER,
        0,
        state,
        process=Process(7, 1.0, 0.0, 0.0),
        health=Health(heard_s=clock.at_s, served=True),
        due_s=due_s,
    )
    fleet = Fleet("dynamo", (Template("W", Role.OTHER),), {NAME: worker}, health_bound_s=BOUND_S, infra_ok=True)
    controller = shell_of(fleet, clock=clock)
    controller.pulse()
    _nobody_answers(controller)
    return controller


def _nobody_answers(controller: FleetController) -> None:
    controller.feed(LoadsHeard(stimulus_id="sample", loads={}))


def _state(controller: FleetController) -> WorkerState:
    return controller.fleet.workers[NAME].state


def test_a_sample_that_was_under_way_when_the_arbiter_was_stopped_is_held_against_nobody(clock: HandClock) -> None:
    """It ends, without an answer, before the pulse can say that there was a stop; the bound is shorter than what is
    counted between two samples at most."""
    controller = _controller(clock)
    clock.at_s += STOPPED_S
    _nobody_answers(controller)
    assert _state(controller) is WorkerState.READY


def test_a_worker_that_stays_silent_after_the_stop_is_hung_once_the_bound_has_passed(clock: HandClock) -> None:
    controller = _controller(clock)
    clock.at_s += STOPPED_S
    controller.pulse()
    silent_s = 0
    while _state(controller) is WorkerState.READY:
        clock.at_s += 1.0
        controller.pulse()
        _nobody_answers(controller)
        silent_s += 1
    assert _state(controller) is WorkerState.CRASHED
    assert BOUND_S < silent_s <= BOUND_S + 2


def test_a_deadline_that_passed_while_the_arbiter_stood_still_is_put_off_by_that_time(clock: HandClock) -> None:
    """A start deadline: what became of the start could not be seen. Whoever feeds the tick, it is too early."""
    controller = _controller(clock, WorkerState.STARTING, due_s=clock.at_s + 10.0)
    clock.at_s += STOPPED_S
    controller.feed(Tick())
    assert _state(controller) is WorkerState.STARTING
    assert controller.fleet.workers[NAME].due_s == pytest.approx(clock.at_s + 10.0)
