"""The connector on a graph with an operator: what is written, in which order, and what is left alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dynamo_local.core.types import Role
from dynamo_local.kubernetes.connector import GraphUnfit
from dynamo_local.kubernetes.graph import Requirements
from dynamo_local.planner.connectors import Committed, Refused
from tests.fakes.kubernetes.graphs import DECODE, PREFILL, alpha, beta
from tests.fakes.kubernetes.planned import planned
from tests.fakes.planner.planner_loop import on_virtual_time


def patches(requests: list[tuple[str, str, Any]]) -> list[Any]:
    """What was written of graph and scales by anybody, status left out."""
    return [body for method, path, body in requests if method == "PATCH" and not path.endswith("/status")]


@on_virtual_time
async def test_both_roles_are_one_write_which_the_operator_carries_out() -> None:
    await both_are_one_write(beta())


@on_virtual_time
async def test_both_roles_are_one_write_in_v1alpha1_too() -> None:
    await both_are_one_write(alpha())


async def both_are_one_write(graph: dict[str, Any]) -> None:
    """From 1P1D to 3P4D."""
    async with planned(graph) as world:
        world.kube.requests.clear()
        answer = await world.connector.set_component_replicas({PREFILL: 3, DECODE: 4})
        assert isinstance(answer, Committed)
        assert world.asked() == {PREFILL: 3, DECODE: 4}
        (patch,) = patches(world.kube.requests)
        assert [each["op"] for each in patch].count("replace") == 2
        assert patch[0]["path"] == "/metadata/resourceVersion"
        pools = world.connector.worker_pools()
        assert (pools.decode.capacity, pools.decode.ready, pools.gpus_spoken_for) == (4, 1, 7)
        await world.settled()
        pools = world.connector.worker_pools()
        assert (pools.prefill and pools.prefill.ready, pools.decode.ready, pools.adjusting) == (3, 4, False)


@on_virtual_time
async def test_a_graph_that_is_not_ready_is_a_refusal_and_no_success() -> None:
    """lesson: ai-dynamo #10525, a skip that was reported as success."""
    async with planned(beta(), start_s=5.0) as world:
        await world.connector.set_component_replicas({DECODE: 2})
        await world.until(lambda: world.graph["status"]["observedGeneration"] == 2)
        world.connector.worker_pools()
        answer = await world.connector.set_component_replicas({DECODE: 3})
        assert isinstance(answer, Refused)
        assert (answer.code, answer.retryable) == ("not_ready", True)
        assert world.asked()[DECODE] == 2


@on_virtual_time
async def test_pending_pods_hold_up_no_scale_down() -> None:
    """lesson: ai-dynamo #14251. Pods without a device pend for ever: they may be taken away at any time, and after a
    while they are no reason to wait."""
    async with planned(beta(), devices=2) as world:
        await world.connector.set_component_replicas({DECODE: 3})
        await world.until(lambda: world.graph["status"]["observedGeneration"] == 2)
        await world.connector.look()
        assert world.connector.worker_pools().adjusting
        await world.clock.sleep_until(world.clock.now_s() + 130.0)
        pools = world.connector.worker_pools()
        assert (pools.adjusting, pools.decode.waiting) == (False, 2)
        answer = await world.connector.set_component_replicas({PREFILL: 1, DECODE: 1})
        assert isinstance(answer, Committed)
        await world.settled()
        assert world.asked() == {PREFILL: 1, DECODE: 1}


@on_virtual_time
async def test_a_component_that_does_not_get_ready_lets_the_other_one_shrink() -> None:
    async with planned(beta(1, 3)) as world:
        world.operator.broken.add(PREFILL)
        await world.until(lambda: world.graph["status"]["state"] == "pending")
        await world.connector.look()
        pools = world.connector.worker_pools()
        assert (pools.prefill and pools.prefill.ready, pools.decode.ready) == (0, 3)
        answer = await world.connector.set_component_replicas({PREFILL: 2})
        assert isinstance(answer, Refused)
        assert answer.code == "not_ready"
        assert isinstance(await world.connector.set_component_replicas({DECODE: 1}), Committed)
        assert world.asked() == {PREFILL: 1, DECODE: 1}


@on_virtual_time
async def test_a_missing_adapter_is_a_refusal_and_the_graph_stays_as_it_was() -> None:
    """lesson: ai-dynamo #13538, where a missing adapter was bypassed by a write of the graph."""
    async with planned(beta(adapters=True)) as world:
        adapters = {key: one for key, one in world.kube.objects.items() if "adapter" in key[1]}
        for key in adapters:
            if DECODE.lower() in key[2]:
                del world.kube.objects[key]
        before = copy.deepcopy(world.graph["spec"])
        answer = await world.connector.set_component_replicas({DECODE: 2})
        assert isinstance(answer, Refused)
        assert answer.code == "adapter_missing"
        assert world.graph["spec"] == before


@on_virtual_time
async def test_a_swap_takes_away_first_and_ends_where_that_fails() -> None:
    """lesson: ai-dynamo #12428: half of a swap failed, and the other half exceeded the budget."""
    expected = Requirements(max_gpus=4, floors={Role.PREFILL: 1, Role.DECODE: 1}, prefill=True)
    async with planned(beta(3, 1, adapters=True), expected) as world:
        world.kube.requests.clear()
        world.operator.stopped = True

        async def first_is_lost(method: str, path: str) -> None:
            world.kube.away = method == "PATCH"

        world.kube.before = first_is_lost
        answer = await world.connector.set_component_replicas({PREFILL: 1, DECODE: 3})
        assert isinstance(answer, Refused)
        assert answer.code == "api_away"
        world.kube.before, world.kube.away = None, False
        assert patches(world.kube.requests) == []
        world.connector.worker_pools()
        answer = await world.connector.set_component_replicas({PREFILL: 1, DECODE: 3})
        assert isinstance(answer, Committed)
        assert [body["spec"]["replicas"] for body in patches(world.kube.requests)] == [1, 3]
        world.operator.stopped = False
        await world.until(lambda: world.asked() == {PREFILL: 1, DECODE: 3})
        await world.settled()


@on_virtual_time
async def test_nothing_is_asked_for_beyond_the_budget() -> None:
    """A decision that would exceed it, however it came about, is not written."""
    async with planned(beta(2, 2)) as world:
        answer = await world.connector.set_component_replicas({PREFILL: 4, DECODE: 5})
        assert isinstance(answer, Refused)
        assert answer.code == "over_budget"
        assert world.asked() == {PREFILL: 2, DECODE: 2}


@on_virtual_time
async def test_a_persons_number_is_kept_and_planned_from() -> None:
    async with planned(beta()) as world:
        world.person(DECODE, 3)
        await world.until(lambda: world.graph["status"]["observedGeneration"] == 2)
        answer = await world.connector.set_component_replicas({DECODE: 2})
        assert isinstance(answer, Refused)
        assert answer.code == "changed_by_person"
        assert world.manual == [True]
        assert world.asked()[DECODE] == 3
        await world.settled()
        assert world.connector.worker_pools().decode.capacity == 3
        assert isinstance(await world.connector.set_component_replicas({DECODE: 2}), Committed)
        assert world.manual == [True]


@on_virtual_time
async def test_a_workload_that_somebody_scaled_under_the_operator_is_told() -> None:
    """lesson: ai-dynamo #4420: the graph says one, the Deployment two, and "already at desired count"."""
    async with planned(beta()) as world:
        world.operator.stopped = True
        counts = world.graph["status"]["components"][DECODE]
        counts |= {"replicas": 2, "readyReplicas": 2, "updatedReplicas": 2}
        world.graph["metadata"]["resourceVersion"] = "999"
        await world.connector.look()
        assert any("2 replicas" in text and "asks for 1" in text for text in world.told)
        assert world.connector.worker_pools().gpus_spoken_for == 3
        world.operator.stopped = False
        await world.clock.sleep_until(world.clock.now_s() + 3.0)
        assert any("all is as asked" in text for text in world.told)


@on_virtual_time
async def test_a_write_that_meets_another_one_is_made_again_on_what_is_there() -> None:
    async with planned(beta()) as world:
        met: list[str] = []

        async def somebody_else(method: str, path: str) -> None:
            if method == "PATCH" and path.endswith("/serving") and len(met) < 2:
                met.append(path)
                world.graph["metadata"]["resourceVersion"] = str(next(world.kube.counter))

        world.operator.stopped = True
        world.kube.before = somebody_else
        assert isinstance(await world.connector.set_component_replicas({DECODE: 2}), Committed)
        assert len(met) == 2
        assert world.asked()[DECODE] == 2


@on_virtual_time
async def test_a_write_whose_answer_was_lost_is_ours_all_the_same() -> None:
    async with planned(beta()) as world:
        world.operator.stopped = True
        world.kube.lose_answers = True
        answer = await world.connector.set_component_replicas({DECODE: 2})
        assert isinstance(answer, Refused)
        assert answer.retryable
        world.kube.lose_answers = world.operator.stopped = False
        await world.settled()
        assert world.manual == []
        assert world.connector.worker_pools().decode.ready == 2


@on_virtual_time
async def test_while_the_api_server_is_away_it_holds_says_so_and_goes_on() -> None:
    async with planned(beta()) as world:
        world.kube.away = world.operator.stopped = True
        await world.clock.sleep_until(world.clock.now_s() + 15.0)
        assert "does not answer" in (world.connector.blind() or "")
        answer = await world.connector.set_component_replicas({DECODE: 2})
        assert isinstance(answer, Refused)
        world.kube.away = world.operator.stopped = False
        await world.clock.sleep_until(world.clock.now_s() + 5.0)
        assert world.connector.blind() is None
        assert isinstance(await world.connector.set_component_replicas({DECODE: 2}), Committed)


@on_virtual_time
async def test_a_deleted_graph_is_held_and_one_that_comes_back_is_planned() -> None:
    async with planned(beta()) as world:
        key = ("default", "dynamographdeployments", "serving")
        kept = world.kube.objects.pop(key)
        await world.clock.sleep_until(world.clock.now_s() + 3.0)
        assert "there is no" in (world.connector.blind() or "")
        world.kube.objects[key] = kept
        await world.clock.sleep_until(world.clock.now_s() + 3.0)
        assert world.connector.blind() is None


@on_virtual_time
async def test_during_a_rollout_nothing_is_changed_at_all() -> None:
    async with planned(beta(1, 2)) as world:
        world.operator.rollout = "InProgress"
        await world.clock.sleep_until(world.clock.now_s() + 3.0)
        assert world.connector.worker_pools().adjusting
        answer = await world.connector.set_component_replicas({DECODE: 1})
        assert isinstance(answer, Refused)
        assert "rolling update" in answer.reason
        world.operator.rollout = None
        await world.clock.sleep_until(world.clock.now_s() + 3.0)
        assert isinstance(await world.connector.set_component_replicas({DECODE: 1}), Committed)


@on_virtual_time
async def test_all_that_is_wrong_is_said_at_once() -> None:
    graph = beta()
    graph["spec"]["components"][1]["podTemplate"]["spec"]["containers"][0]["args"][3] = "another/model"
    prefill = graph["spec"]["components"][2]["podTemplate"]["spec"]["containers"][0]
    prefill["args"], prefill["resources"] = prefill["args"][:-2], {}
    with pytest.raises(GraphUnfit) as caught:
        async with planned(graph):
            raise AssertionError("not reached")
    codes = {str(fault.code) for fault in caught.value.found}
    assert codes == {"models_differ", "gpus_unknown", "not_found_as_prefill"}
    for fault in caught.value.found:
        assert fault.text in str(caught.value)
