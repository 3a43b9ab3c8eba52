"""What the arbiter puts right in a statefile that others write, too: a worker's own word is newer than ours."""

from __future__ import annotations

import pytest

from dynamo_local.clock import AsyncioClock
from dynamo_local.core.lifecycle import Registered, SpawnRequested
from dynamo_local.serve.fleet import Fleet
from dynamo_local.state import State
from tests.fakes.memory_store import MemoryFile, MemoryStore
from tests.simulation.world import MemoryEvents, graph, planner_for

NAME = "dynamo_VllmWorker"
OURS, OTHER = "2a", "3b"


@pytest.fixture
async def fleet() -> Fleet:
    """One ready worker under `OURS`, as the file says."""
    spec = graph(decode=1, prefill=0, big=False)
    found = Fleet(State(namespace="dynamo", run_id="01J"), MemoryStore(MemoryFile()), MemoryEvents(), AsyncioClock())  # type: ignore[arg-type]
    await found.create()
    worker = found.add(planner_for(spec, "01J").plan(spec.service("VllmWorker"), NAME, ()))
    await found.apply({NAME: SpawnRequested(stimulus_id="serve")})
    worker.pid, worker.lease = 7, OURS
    await found.apply({NAME: Registered(stimulus_id="etcd:1", lease=OURS)})
    await write(found, OURS)
    await found.heal()
    return found


async def write(fleet: Fleet, lease: str | None) -> None:
    """As the worker does, or somebody's editor."""

    def change(state: State) -> None:
        entry = state.components[NAME]
        entry.endpoints, entry.lease = [], lease

    await fleet.store.aupdate(change)


def written(fleet: Fleet) -> str | None:
    return fleet.store.read().components[NAME].lease


async def test_a_new_lease_that_the_worker_wrote_before_we_heard_of_it_stays(fleet: Fleet) -> None:
    await write(fleet, OTHER)
    await fleet.heal()
    assert written(fleet) == OTHER
    fleet.workers[NAME].lease = OTHER
    await fleet.heal()
    await fleet.heal()
    assert written(fleet) == OTHER


async def test_a_lease_of_which_nothing_is_heard_is_put_right_at_the_second_look(fleet: Fleet) -> None:
    await write(fleet, OTHER)
    await fleet.heal()
    await fleet.heal()
    assert written(fleet) == OURS


async def test_a_lease_that_is_not_there_is_put_right_at_once(fleet: Fleet) -> None:
    await write(fleet, None)
    await fleet.heal()
    assert written(fleet) == OURS
