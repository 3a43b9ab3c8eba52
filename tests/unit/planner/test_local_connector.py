"""The planner's hands: one more, one less, and a refusal as a value."""

from __future__ import annotations

from typing import Any

from dynamo_local.core.types import EVERY, Actuator
from dynamo_local.errors import LastReadyWorker, NotEnoughGpus
from dynamo_local.planner.connectors import Committed, LocalConnector, Refused


class FakeScaler:
    """Records calls; answers or refuses."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome
        self.calls: list[tuple[str, str, dict[str, Any]]] = []

    async def scale(self, component: str, target: str, **options: Any) -> dict[str, Any]:
        self.calls.append((component, target, options))
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    async def scale_all(self, targets: Any, **options: Any) -> dict[str, dict[str, Any]]:
        return {name: await self.scale(name, f"={count}", **options) for name, count in targets.items()}


async def test_one_more_is_asked_for_as_a_planner_and_may_wait_for_gpus() -> None:
    """A planner never restarts a faulted worker unasked, and an up may wait for the GPU of this tick's down."""
    scaler = FakeScaler({"instructions": [{"kind": "spawn", "watcher_name": "dynamo_VllmWorker_1"}]})
    outcome = await LocalConnector(scaler).add_component("VllmWorker", stimulus_id="tick:7")
    assert outcome == Committed(("dynamo_VllmWorker_1",))
    [(component, target, options)] = scaler.calls
    assert (component, target) == ("VllmWorker", "+1")
    assert options["stimulus_id"] == "tick:7"
    assert options["by_person"] is False
    assert options["wait_for_gpus"] is True
    assert not options.get("force")


async def test_a_refusal_is_a_value_and_says_whether_to_try_again() -> None:
    """Lesson 15: what the arbiter refuses must not end the planner's loop."""
    last = await LocalConnector(FakeScaler(LastReadyWorker("the last one"))).remove_component("VllmWorker")
    assert last == Refused("the last one", "last_ready_worker", retryable=False)
    full = await LocalConnector(FakeScaler(NotEnoughGpus("none free"))).add_component("VllmWorker")
    assert isinstance(full, Refused)
    assert full.retryable


async def test_each_change_has_its_own_cause() -> None:
    scaler = FakeScaler({"instructions": []})
    connector = LocalConnector(scaler)
    await connector.add_component("A")
    await connector.remove_component("A")
    assert len({options["stimulus_id"] for _, _, options in scaler.calls}) == 2


async def test_a_whole_decision_says_which_workers_of_which_component() -> None:
    scaler = FakeScaler({"instructions": [{"watcher_name": "dynamo_X"}]})
    connector = LocalConnector(scaler)
    outcome = await connector.set_component_replicas({"A": 3, "B": 1}, stimulus_id="planner:7")
    assert outcome == Committed(("dynamo_X",), {"A": ("dynamo_X",), "B": ("dynamo_X",)})
    assert [(name, target) for name, target, _ in scaler.calls] == [("A", "=3"), ("B", "=1")]
    refused = await LocalConnector(FakeScaler(NotEnoughGpus("none free"))).set_component_replicas({"A": 3})
    assert refused == Refused("none free", "not_enough_gpus", retryable=True)


async def test_by_what_it_may_be_done_is_asked_at_each_step() -> None:
    """The planner's options may have changed since the last one."""
    allowed, scaler = EVERY, FakeScaler({"instructions": []})
    connector = LocalConnector(scaler, actuators=lambda: allowed)
    await connector.set_component_replicas({"A": 1})
    await connector.add_component("A")
    allowed = frozenset[Actuator]()
    await connector.set_component_replicas({"A": 1})
    await connector.remove_component("A")
    told = [options.get("actuators", (options.get("wake"), options.get("sleep"))) for _, _, options in scaler.calls]
    assert told == [EVERY, (True, True), frozenset(), (False, False)]
