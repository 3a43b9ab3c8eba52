"""The planner's hands: one more, one less, and a refusal as a value."""

from __future__ import annotations

from typing import Any

from dynamo_local.core.fleet.events import Command, ScaleAll
from dynamo_local.core.types import EVERY, Actuator
from dynamo_local.errors import LastReadyWorker, NotEnoughGpus
from dynamo_local.planner.connectors import Committed, LocalConnector, Refused


class FakeScaler:
    """Records commands; answers or refuses."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome
        self.commands: list[Any] = []

    async def run(self, command: Command) -> dict[str, Any]:
        self.commands.append(command)
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return dict.fromkeys(command.targets, self.outcome) if isinstance(command, ScaleAll) else self.outcome


async def test_one_more_is_asked_for_as_a_planner_and_may_wait_for_gpus() -> None:
    """A planner never restarts a faulted worker unasked, and an up may wait for the GPU of this tick's down."""
    scaler = FakeScaler({"instructions": [{"kind": "spawn", "watcher_name": "dynamo_VllmWorker_1"}]})
    outcome = await LocalConnector(scaler.run).add_component("VllmWorker", stimulus_id="tick:7")
    assert outcome == Committed(("dynamo_VllmWorker_1",))
    [command] = scaler.commands
    assert (command.component, str(command.target), command.stimulus_id) == ("VllmWorker", "+1", "tick:7")
    assert (command.by_person, command.wait_for_gpus, command.force) == (False, True, False)


async def test_a_refusal_is_a_value_and_says_whether_to_try_again() -> None:
    """A refusal of the arbiter must not end the planner's loop."""
    last = await LocalConnector(FakeScaler(LastReadyWorker("the last one")).run).remove_component("VllmWorker")
    assert last == Refused("the last one", "last_ready_worker", retryable=False)
    full = await LocalConnector(FakeScaler(NotEnoughGpus("none free")).run).add_component("VllmWorker")
    assert isinstance(full, Refused)
    assert full.retryable


async def test_each_change_has_its_own_cause() -> None:
    scaler = FakeScaler({"instructions": []})
    connector = LocalConnector(scaler.run)
    await connector.add_component("A")
    await connector.remove_component("A")
    assert len({command.stimulus_id for command in scaler.commands}) == 2


async def test_a_whole_decision_says_which_workers_of_which_component() -> None:
    scaler = FakeScaler({"instructions": [{"watcher_name": "dynamo_X"}]})
    connector = LocalConnector(scaler.run)
    outcome = await connector.set_component_replicas({"A": 3, "B": 1}, stimulus_id="planner:7")
    assert outcome == Committed(("dynamo_X",), {"A": ("dynamo_X",), "B": ("dynamo_X",)})
    assert [command.targets for command in scaler.commands] == [{"A": 3, "B": 1}]
    refused = await LocalConnector(FakeScaler(NotEnoughGpus("none free")).run).set_component_replicas({"A": 3})
    assert refused == Refused("none free", "not_enough_gpus", retryable=True)


async def test_by_what_it_may_be_done_is_asked_at_each_step() -> None:
    """The planner's options may have changed since the last one."""
    allowed, scaler = EVERY, FakeScaler({"instructions": []})
    connector = LocalConnector(scaler.run, actuators=lambda: allowed)
    await connector.set_component_replicas({"A": 1})
    await connector.add_component("A")
    allowed = frozenset[Actuator]()
    await connector.set_component_replicas({"A": 1})
    await connector.remove_component("A")
    told = [each.actuators if isinstance(each, ScaleAll) else (each.wake, each.sleep) for each in scaler.commands]
    assert told == [EVERY, (True, True), frozenset(), (False, False)]
