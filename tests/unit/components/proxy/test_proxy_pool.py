"""Servers of one model in more than one section are one pool."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynamo_local.components.dispatcher import Dispatcher
from dynamo_local.components.models_view import ModelCard, ModelsView
from dynamo_local.components.proxy.pool import ModelDispatchers, MultiComponentClient
from dynamo_local.core.routing.choice import RoundRobin
from dynamo_local.errors import NoWorkers, WorkerLost
from dynamo_local.ports import KeyValue, PutEvent, SnapshotEvent
from tests.fakes.data_plane.endpoints import FakeEndpointClient


async def handle(payload: Any, _context: Any) -> Any:
    return payload


def joined(*clients: FakeEndpointClient) -> MultiComponentClient:
    return MultiComponentClient(clients)


async def test_all_instances_are_candidates_and_each_is_asked_at_its_own_component() -> None:
    first, second = FakeEndpointClient({1: handle}, component="A"), FakeEndpointClient({2: handle}, component="B")
    both = joined(first, second)
    assert [instance.instance_id for instance in both.instances()] == [1, 2]
    await both.call("x", instance_id=2)
    assert (len(first.calls), len(second.calls)) == (0, 1)


async def test_in_turn_without_an_instance_and_an_error_without_any() -> None:
    first, second = FakeEndpointClient({1: handle}), FakeEndpointClient({2: handle})
    both = joined(first, second)
    for _ in range(4):
        await both.call("x")
    assert (len(first.calls), len(second.calls)) == (2, 2)
    with pytest.raises(WorkerLost):
        await both.call("x", instance_id=9)
    with pytest.raises(NoWorkers):
        await joined(FakeEndpointClient()).call("x")


async def test_others_are_seen_in_whichever_component_they_come() -> None:
    first, second = FakeEndpointClient({1: handle}), FakeEndpointClient()
    waiting = asyncio.create_task(joined(first, second).wait_for_others((1,), 5.0))
    await asyncio.sleep(0)
    second.add_instance(2, handle)
    assert [instance.instance_id for instance in await waiting] == [2]
    assert await joined(first).wait_for_others((1,), 0.01) == ()
    with pytest.raises(NoWorkers):
        await joined(FakeEndpointClient()).wait_for_instances(0.01)


async def test_a_dispatcher_is_made_once_for_the_components_that_serve_a_model() -> None:
    models = ModelsView("dynamo")
    models.apply(SnapshotEvent((), 1))
    made: list[tuple[str, ...]] = []

    async def make(components: tuple[str, ...]) -> Dispatcher:
        made.append(components)
        return Dispatcher(FakeEndpointClient(), RoundRobin(), lambda ids: {})

    def put(component: str, lease: int) -> None:
        card = ModelCard("m", component, "generate", None, 1.0)
        models.apply(PutEvent(KeyValue(f"dynamo/models/m:{lease:x}", card.encode(), lease)))

    pool = ModelDispatchers(models, make)
    assert await pool.dispatcher("m") is None
    put("B", 1)
    assert await pool.dispatcher("m") is await pool.dispatcher("m")
    put("A", 2)
    await pool.dispatcher("m")
    assert made == [("B",), ("A", "B")]
    served = models.get("m")
    assert served is not None
    assert served.max_model_len is None
