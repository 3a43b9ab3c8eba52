"""The arbiter asks workers with a long start what they wait for."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_local.arbiter.links import Links
from dynamo_local.arbiter.notes import StartWatch
from dynamo_local.arbiter.status import worker_status
from dynamo_local.arbiter.worker_requests import WorkerAsks
from dynamo_local.core.types import WorkerState
from dynamo_local.errors import NoWorkers
from tests.fakes.arbiter.effects import FakeEffects, shell_of
from tests.fakes.arbiter.fleet_views import fleet, name, put
from tests.fakes.arbiter.hand_clock import HandClock


async def test_only_those_that_are_starting_are_asked_and_their_answer_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """A worker that does not listen yet has nothing to tell, and one that is ready nothing to wait for."""
    asked: list[str] = []

    silent = {name(1)}

    async def control(self: WorkerAsks, worker: str, op: str, **args: Any) -> dict[str, Any]:
        asked.append(worker)
        if worker in silent:
            raise NoWorkers("nobody")
        return {"waiting_for": "a model"}

    monkeypatch.setattr(WorkerAsks, "control", control)
    clock = HandClock()
    controller = shell_of(fleet("starting", "starting", "ready"), FakeEffects(answers={}), clock)
    clock.at_s = max(worker.since_s for worker in controller.fleet.workers.values())
    watch = StartWatch("dynamo", controller, Links("dynamo", "01J"), clock)
    await watch.look()
    assert (asked, watch.waits_for) == ([], {})  # a short start has nothing to tell
    clock.at_s += 5.0
    await watch.look()
    assert sorted(asked) == [name(0), name(1)]
    assert watch.waits_for == {name(0): "a model"}
    told = worker_status(controller.fleet.workers[name(0)], controller.fleet, tmp_path, 5.0, watch.waits_for[name(0)])
    assert told["reason"] == "waits for a model"
    silent.add(name(0))
    await watch.look()
    assert watch.waits_for == {name(0): "a model"}  # it ends just now, or is busy
    controller.fleet = put(controller.fleet, name(0), state=WorkerState.START_TIMED_OUT)
    await watch.look()
    assert watch.waits_for == {name(0): "a model"}  # the report of its failure comes later, and quotes it
    controller.fleet = put(controller.fleet, name(0), state=WorkerState.BACKING_OFF)
    await watch.look()
    assert watch.waits_for == {}
    ready = worker_status(controller.fleet.workers[name(2)], controller.fleet, tmp_path, 5.0, "its registration")
    assert ready["reason"] is None
