"""The arbiter's own effects, on a simulated host: what they do where something fails, hangs or comes late."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.arbiter.arbiter_effects import START_DEADLINE_S
from dynamo_local.core.fleet import effects as ins
from dynamo_local.core.fleet import events as st
from dynamo_local.core.types import WorkerState
from dynamo_local.errors import GpuError
from tests.contract.effects_worlds import HostWorld, change, on_a_loop
from tests.fakes.arbiter.fleet_views import name

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[tuple[Run, HostWorld]]:
    with on_a_loop("host", tmp_path / "gpus") as (runner, world):
        assert isinstance(world, HostWorld)
        yield runner.run, world


def test_a_full_disk_stops_nobody(host: tuple[Run, HostWorld]) -> None:
    """It is told; the worker is started all the same, and the file is written when there is room."""
    run, world = host

    async def test() -> None:
        world.world.file.full = True
        world.controller.feed(change(1))
        await world.advance(5.0)
        assert world.controller.fleet.workers[name(1)].ready
        assert any("No space left" in line for line in world.world.story)
        world.world.file.full = False
        await world.advance(5.0)
        assert world.committed(name(1)) == "ready"

    run(test())


def test_where_nobody_can_tell_it_has_crashed(host: tuple[Run, HostWorld]) -> None:
    run, world = host
    (process,) = [each for each in world.world.living() if each.name == name()]

    async def test() -> None:
        world.world.etcd.available = False
        world.world.exits(process, 0)
        await world.advance(4.0)
        assert world.controller.fleet.workers[name()].ready, "etcd is still asked"
        await world.advance(2.0)
        assert world.controller.fleet.workers[name()].state is WorkerState.BACKING_OFF
        world.world.etcd.available = True
        await world.advance(15.0)
        assert world.controller.fleet.workers[name()].ready

    run(test())


def test_a_driver_that_fails_is_seen_as_stale_and_not_as_a_host_without_gpus(host: tuple[Run, HostWorld]) -> None:
    run, world = host
    devices = world.controller.fleet.gpus.devices

    def fails() -> Any:
        raise GpuError("the driver was reset")

    async def test() -> None:
        world.world.gpus.sample = fails  # type: ignore[method-assign]
        heard: list[st.Event | None] = []
        world.effects.begin(ins.LookAtGpus(), None, heard.append)
        await world.advance(1.0)
        (seen,) = heard
        assert isinstance(seen, st.GpusSeen)
        assert "the driver was reset" in (seen.stale or "")
        world.controller.feed(seen)
        assert (world.controller.fleet.gpus.devices, world.controller.fleet.gpus.taken) == (devices, {})

    run(test())


def test_a_start_that_fails_as_nobody_thought_of_is_a_refused_start(host: tuple[Run, HostWorld]) -> None:
    """Seen: the supervisor's `KeyError` for a name that it still has. The worker would have been starting for ever."""
    run, world = host
    world.world.refusals.append(KeyError(name(1)))  # type: ignore[arg-type]

    async def test() -> None:
        world.controller.feed(change(1))
        await world.advance(0.5)
        assert world.controller.fleet.workers[name(1)].state is WorkerState.BACKING_OFF
        await world.advance(10.0)
        assert world.controller.fleet.workers[name(1)].ready

    run(test())
    assert any("Spawn failed: KeyError" in line for line in world.world.story)
    world.arbiter.failure = None  # the simulation takes any "arbiter: " that is told for a defect


def test_a_start_that_does_not_return_is_refused_and_what_appears_late_is_ended(host: tuple[Run, HostWorld]) -> None:
    """The worker would have been starting for ever. It is tried again when nothing may appear beside it any more."""
    run, world = host
    world.world.spawn_s = 2 * START_DEADLINE_S

    async def test() -> None:
        world.controller.feed(change(1))
        await world.advance(START_DEADLINE_S + 0.5)
        worker = world.controller.fleet.workers[name(1)]
        assert (worker.state, worker.start.spawning) == (WorkerState.BACKING_OFF, False)
        assert f"its process was not there within {START_DEADLINE_S:g} s" in (worker.reason or "")
        world.world.spawn_s = 0.003
        await world.advance(START_DEADLINE_S - 2.0)
        assert world.controller.fleet.workers[name(1)].state is WorkerState.STARTING, "it waits for the first"
        await world.advance(10.0)
        assert world.controller.fleet.workers[name(1)].ready

    run(test())
    late, made = [each for each in world.world.processes.values() if each.name == name(1)]
    assert (late.alive, late.serves, made.pid) == (False, False, world.controller.fleet.workers[name(1)].pid)
    assert any("appeared more than" in line for line in world.world.story)


def test_a_start_that_never_returns_fails_again_and_again(host: tuple[Run, HostWorld]) -> None:
    run, world = host
    world.world.spawn_s = 1e9

    async def test() -> None:
        world.controller.feed(change(1))
        await world.advance(600.0)
        worker = world.controller.fleet.workers[name(1)]
        assert (worker.state, worker.gpus) == (WorkerState.FAULTED, ())
        assert "an earlier start of it had not come back" in (worker.reason or "")

    run(test())


def test_a_worker_that_answers_nonsense_past_its_deadline_is_ended(host: tuple[Run, HostWorld]) -> None:
    """What that cuts is unknown; it would have been waited for without end."""
    run, world = host

    async def nonsense(name: str, op: str, **args: Any) -> dict[str, Any]:
        return {"state": "draining"}

    async def test() -> None:
        world.effects.asks.control = nonsense  # type: ignore[method-assign]
        worker = world.controller.fleet.workers[name()]
        heard: list[st.Event | None] = []
        world.effects.begin(ins.CountRequests(name(), worker.pid or 0), worker, heard.append)
        await world.advance(1.0)
        (seen,) = heard
        assert isinstance(seen, st.RequestsCounted)
        assert not isinstance(seen.in_flight, int)

    run(test())
    world.arbiter.failure = None
