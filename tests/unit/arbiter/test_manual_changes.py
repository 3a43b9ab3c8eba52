"""A planner is told of a person's change, and of no other."""

from __future__ import annotations

import pytest

from dynamo_local.arbiter.commands import Orders
from dynamo_local.errors import DynamoError
from dynamo_local.system.gpu_pool import GpuPool
from dynamo_local.system.gpus import SimInventory
from tests.fakes.arbiter.effects import shell_of
from tests.fakes.arbiter.fleet_views import PREFILL, fleet, on_ledger, worker
from tests.simulation.world import NoLocks


@pytest.fixture
def orders() -> Orders:
    """To two ready decode workers and a ready prefill worker on eight devices."""
    workers = [*fleet("ready", "ready").workers.values(), worker(0, "ready", PREFILL)]
    pool = GpuPool("dynamo", SimInventory(8), NoLocks())  # type: ignore[arg-type]
    return Orders(shell_of(on_ledger(workers, 8)), pool.look)


@pytest.fixture
def told(orders: Orders) -> list[str]:
    """The causes of the changes that it told of."""
    causes: list[str] = []
    orders.on_manual.append(causes.append)
    return causes


async def test_scale_drain_and_restart_of_a_person_are_told(orders: Orders, told: list[str]) -> None:
    await orders.scale("VllmWorker", "+1", stimulus_id="scale:1")
    await orders.drain("dynamo_VllmWorker_1", stimulus_id="drain:1")
    await orders.restart("dynamo_VllmWorker", force=True, stimulus_id="restart:1")
    assert told == ["scale:1", "drain:1", "restart:1"]


async def test_the_planners_own_change_is_not(orders: Orders, told: list[str]) -> None:
    await orders.scale("VllmWorker", "+1", stimulus_id="planner:1", by_person=False)
    assert told == []


async def test_what_changes_nothing_or_is_refused_is_not(orders: Orders, told: list[str]) -> None:
    await orders.scale("VllmWorker", "=2", stimulus_id="scale:1")
    with pytest.raises(DynamoError):
        await orders.scale("PrefillWorker", "-1", stimulus_id="scale:2")
    assert told == []
