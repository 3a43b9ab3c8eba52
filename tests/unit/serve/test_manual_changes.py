"""Whoever plans by itself is told of a person's change, and of no other: its own would keep it still for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from dynamo_local.clock import AsyncioClock
from dynamo_local.core.lifecycle import Registered, SpawnRequested
from dynamo_local.errors import DynamoError
from dynamo_local.serve.fleet import Fleet
from dynamo_local.serve.gpus import GpuPool
from dynamo_local.serve.inventory import SimInventory
from dynamo_local.serve.scaling import Scaler
from dynamo_local.state import State
from tests.fakes.memory_store import MemoryFile, MemoryStore
from tests.simulation.world import MemoryEvents, NoLocks, graph, planner_for


class NoDeeds:
    """Operations that do nothing: only what is decided matters here."""

    async def spawn(self, *_: Any) -> None: ...
    async def start_when_possible(self, *_: Any) -> None: ...
    async def ask_to_leave(self, *_: Any) -> None: ...
    async def bring_back(self, *_: Any) -> None: ...
    async def call_back(self, *_: Any) -> None: ...
    async def remove(self, *_: Any) -> None: ...


@pytest.fixture
async def scaler() -> AsyncIterator[Scaler]:
    """Of two ready decode workers and a ready prefill worker on eight devices; `told` are the changes it told of."""
    spec, tasks = graph(decode=2, prefill=1, big=False), set[asyncio.Task[Any]]()
    clock = AsyncioClock()
    fleet = Fleet(State(namespace="dynamo", run_id="01J"), MemoryStore(MemoryFile()), MemoryEvents(), clock)  # type: ignore[arg-type]
    await fleet.create()
    pool = GpuPool("dynamo", SimInventory(8), NoLocks())  # type: ignore[arg-type]
    pool.sample()
    planner = planner_for(spec, "01J")
    for service in spec.services:
        for n in range(service.workers):
            name = f"dynamo_{service.name}" + (f"_{n}" if n else "")
            fleet.add(planner.plan(service, name, pool.allocate(name, service.resources.gpu)))
    for event in (SpawnRequested(stimulus_id="serve"), Registered(stimulus_id="etcd:1", lease="1")):
        await fleet.apply(dict.fromkeys(fleet.workers, event))

    def background(work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.ensure_future(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    yield Scaler(fleet, pool, planner, NoDeeds(), clock, background=background, tell=lambda text: None)  # type: ignore[arg-type]
    for task in list(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def told(scaler: Scaler) -> list[str]:
    """The causes of the changes that it told of."""
    causes: list[str] = []
    scaler.on_manual = causes.append
    return causes


async def test_scale_drain_and_restart_of_a_person_are_told(scaler: Scaler, told: list[str]) -> None:
    await scaler.scale("VllmWorker", "+1", stimulus_id="scale:1")
    await scaler.drain("dynamo_VllmWorker_1", stimulus_id="drain:1")
    await scaler.restart("dynamo_VllmWorker", force=True, stimulus_id="restart:1")
    assert told == ["scale:1", "drain:1", "restart:1"]


async def test_the_planners_own_change_is_not(scaler: Scaler, told: list[str]) -> None:
    await scaler.scale("VllmWorker", "+1", stimulus_id="planner:1", by_person=False)
    assert told == []


async def test_what_changes_nothing_or_is_refused_is_not(scaler: Scaler, told: list[str]) -> None:
    await scaler.scale("VllmWorker", "=2", stimulus_id="scale:1")
    with pytest.raises(DynamoError):
        await scaler.scale("PrefillWorker", "-1", stimulus_id="scale:2")
    assert told == []
