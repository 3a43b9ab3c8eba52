"""A planner is told of a person's change, and of no other."""

from __future__ import annotations

import pytest

from dynamo_local.arbiter.commands import Commands
from dynamo_local.core.fleet.events import Drain, Restart, Scale, parse_target
from dynamo_local.errors import DynamoError
from dynamo_local.system.gpu_pool import GpuPool
from dynamo_local.system.gpus import SimInventory
from tests.fakes.arbiter.effects import shell_of
from tests.fakes.arbiter.fleet_views import PREFILL, fleet, on_ledger, worker
from tests.simulation.world import NoLocks


@pytest.fixture
def commands(told: list[str]) -> Commands:
    """To two ready decode workers and a ready prefill worker on eight devices."""
    workers = [*fleet("ready", "ready").workers.values(), worker(0, "ready", PREFILL)]
    pool = GpuPool("dynamo", SimInventory(8), NoLocks())  # type: ignore[arg-type]
    return Commands(shell_of(on_ledger(workers, 8)), pool.look, on_manual=told.append)


@pytest.fixture
def told() -> list[str]:
    """The causes of the changes that it told of."""
    return []


async def test_scale_drain_and_restart_of_a_person_are_told(commands: Commands, told: list[str]) -> None:
    await commands.run(Scale(stimulus_id="scale:1", component="VllmWorker", target=parse_target("+1")))
    await commands.run(Drain(stimulus_id="drain:1", name="dynamo_VllmWorker_1"))
    await commands.run(Restart(stimulus_id="restart:1", name="dynamo_VllmWorker", force=True))
    assert told == ["scale:1", "drain:1", "restart:1"]


async def test_the_planners_own_change_is_not(commands: Commands, told: list[str]) -> None:
    await commands.run(
        Scale(stimulus_id="planner:1", component="VllmWorker", target=parse_target("+1"), by_person=False)
    )
    assert told == []


async def test_what_changes_nothing_or_is_refused_is_not(commands: Commands, told: list[str]) -> None:
    await commands.run(Scale(stimulus_id="scale:1", component="VllmWorker", target=parse_target("=2")))
    with pytest.raises(DynamoError):
        await commands.run(Scale(stimulus_id="scale:2", component="PrefillWorker", target=parse_target("-1")))
    assert told == []
