"""The planner's assumptions about an API server, on the fake and on a real one."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_local.kubernetes.api import JSON_PATCH, MERGE_PATCH, Conflict, Forbidden, KubeApi, NotThere
from dynamo_local.kubernetes.graph import PatchGraph, ScaleAdapter, change
from dynamo_local.kubernetes.observation import registered
from dynamo_local.kubernetes.planner import claimed, looked
from tests.contract.kubernetes.kube_worlds import World
from tests.fakes.kubernetes.graphs import DECODE, NAME, PREFILL, adapter, beta
from tests.fakes.kubernetes.workers import BLOCK, KV_BLOCKS, NAMESPACE, worker_metadata

GRAPHS = "/apis/nvidia.com/v1beta1/namespaces/default/dynamographdeployments"
ADAPTERS = "/apis/nvidia.com/v1beta1/namespaces/default/dynamographdeploymentscalingadapters"
WORKERS = "/apis/nvidia.com/v1alpha1/namespaces/default/dynamoworkermetadatas"
GPUS = {PREFILL: 1, DECODE: 1}


async def deployed(world: World, graph: dict[str, Any] | None = None) -> KubeApi:
    answer = await world.admin.request("POST", GRAPHS, graph or beta())
    assert answer.status == 201, answer.body
    await reported(world)
    return KubeApi(world.admin, "default", NAME)


async def reported(world: World) -> None:
    graph = (await world.admin.request("GET", f"{GRAPHS}/{NAME}")).body
    status = {"state": "successful", "observedGeneration": graph["metadata"]["generation"]}
    answer = await world.admin.request("PATCH", f"{GRAPHS}/{NAME}/status", {"status": status}, content=MERGE_PATCH)
    assert answer.status == 200, answer.body


async def patch_of(api: KubeApi, targets: dict[str, int]) -> PatchGraph:
    writes = change(await api.graph(), targets, {}, GPUS, 64)
    assert isinstance(writes, tuple)
    (write,) = writes
    assert isinstance(write, PatchGraph)
    return write


async def test_a_patch_changes_both_roles_and_raises_the_generation(world: World) -> None:
    api = await deployed(world)
    before = await api.graph()
    await api.patch(await patch_of(api, {PREFILL: 3, DECODE: 4}))
    after = await api.graph()
    assert {one.name: one.replicas for one in after.planned} == {PREFILL: 3, DECODE: 4}
    assert after.generation == before.generation + 1
    assert after.observed == before.observed
    assert after.hindrance is not None


async def test_numbers_that_were_never_written_can_be_changed(world: World) -> None:
    api = await deployed(world, beta(None, None))
    await api.patch(await patch_of(api, {DECODE: 2}))
    assert (await api.graph()).decode.replicas == 2


async def test_a_patch_made_from_another_document_changes_nothing(world: World) -> None:
    api = await deployed(world)
    late = await patch_of(api, {DECODE: 5})
    await world.admin.request("PATCH", f"{GRAPHS}/{NAME}/status", {"status": {"state": "pending"}}, content=MERGE_PATCH)
    with pytest.raises(Conflict):
        await api.patch(late)
    assert (await api.graph()).decode.replicas == 1


async def test_a_patch_of_a_component_that_moved_changes_nothing(world: World) -> None:
    api = await deployed(world)
    write = await patch_of(api, {DECODE: 5})
    named = [each for each in write.operations if "resourceVersion" not in each["path"]]
    graph = dict((await world.admin.request("GET", f"{GRAPHS}/{NAME}")).body)
    graph["spec"]["components"].reverse()
    graph["spec"]["components"].insert(0, {"name": "Another", "type": "worker", "replicas": 1})
    assert (await world.admin.request("PUT", f"{GRAPHS}/{NAME}", graph)).status == 200
    with pytest.raises(Conflict, match="rejected our request"):
        await api.patch(PatchGraph(tuple(named), {}))


@pytest.mark.parametrize("value", [-1, "two"])
async def test_a_number_that_is_none_is_refused(world: World, value: Any) -> None:
    api = await deployed(world)
    operation = {"op": "replace", "path": "/spec/components/1/replicas", "value": value}
    await api.graph()
    with pytest.raises(Conflict):
        await api.patch(PatchGraph((operation,), {}))


async def test_status_and_spec_are_written_apart(world: World) -> None:
    api = await deployed(world)
    both = {"status": {"state": "failed"}, "spec": {"backendFramework": "vllm"}}
    await world.admin.request("PATCH", f"{GRAPHS}/{NAME}", both, content=MERGE_PATCH)
    seen = await api.graph()
    assert seen.state == "successful"
    await world.admin.request("PATCH", f"{GRAPHS}/{NAME}/status", both, content=MERGE_PATCH)
    after = await api.graph()
    assert (after.state, after.generation) == ("failed", seen.generation)


async def test_other_kinds_of_patch_are_refused(world: World) -> None:
    await deployed(world)
    strategic = "application/strategic-merge-patch+json"
    assert (await world.admin.request("PATCH", f"{GRAPHS}/{NAME}", {}, content=strategic)).status == 415
    assert (await world.admin.request("PATCH", f"{GRAPHS}/{NAME}", [], content=MERGE_PATCH)).status >= 400
    assert (await world.admin.request("PATCH", f"{GRAPHS}/{NAME}", [], content=JSON_PATCH)).status == 200


async def test_what_is_there_cannot_be_made_again(world: World) -> None:
    await deployed(world)
    answer = await world.admin.request("POST", GRAPHS, beta())
    assert (answer.status, answer.body["reason"]) == (409, "AlreadyExists")


async def test_a_graph_must_be_one(world: World) -> None:
    graph = beta()
    graph["spec"]["components"][0]["type"] = "backend"
    assert (await world.admin.request("POST", GRAPHS, graph)).status == 422
    twice = beta()
    twice["spec"]["components"].append(twice["spec"]["components"][0])
    assert (await world.admin.request("POST", GRAPHS, twice)).status == 422


async def test_a_graph_that_is_not_there_is_told(world: World) -> None:
    with pytest.raises(NotThere, match=NAME):
        await KubeApi(world.admin, "default", NAME).graph()


async def test_an_adapter_is_scaled_once_from_what_was_read(world: World) -> None:
    api = await deployed(world, beta(adapters=True))
    for name in (PREFILL, DECODE):
        assert (await world.admin.request("POST", ADAPTERS, adapter(name))).status == 201
    seen = await api.graph()
    assert set(seen.adapters) == {PREFILL, DECODE}
    writes = change(seen, {DECODE: 3}, {}, GPUS, 64)
    assert isinstance(writes, tuple)
    (write,) = writes
    assert isinstance(write, ScaleAdapter)
    await api.scale(write)
    assert (await api.graph()).adapters[DECODE].replicas == 3
    with pytest.raises(Conflict):
        await api.scale(write)
    gone = await world.admin.request("DELETE", f"{ADAPTERS}/{seen.adapters[DECODE].name}")
    assert gone.status == 200
    assert set((await api.graph()).adapters) == {PREFILL}
    with pytest.raises(NotThere):
        await api.scale(write)


async def test_workers_that_registered_are_listed(world: World) -> None:
    api = KubeApi(world.admin, "default", NAME)
    assert await api.worker_metadata() == ()
    for name, instance in (("decode-0", 7), ("decode-1", 8)):
        answer = await world.admin.request("POST", WORKERS, worker_metadata(name, instance))
        assert answer.status == 201, answer.body
    found = registered(await api.worker_metadata(), NAMESPACE)
    assert found.namespaces == {NAMESPACE}
    assert found.limits["backend"].max_kv_tokens == KV_BLOCKS * BLOCK


async def test_a_lease_has_one_writer(world: World) -> None:
    api = KubeApi(world.admin, "default", NAME)
    with pytest.raises(NotThere):
        await api.lease("leader")
    first = looked(await api.create_lease(claimed("leader", None, "a", 1e9)), None, 0.0)
    with pytest.raises(Conflict):
        await api.create_lease(claimed("leader", None, "b", 1e9))
    renewed = looked(await api.replace_lease(claimed("leader", first, "a", 1e9 + 2)), None, 2.0)
    with pytest.raises(Conflict):
        await api.replace_lease(claimed("leader", first, "b", 1e9 + 3))
    taken = looked(await api.replace_lease(claimed("leader", renewed, "b", 1e9 + 20)), None, 20.0)
    assert (taken.holder, taken.transitions) == ("b", 1)


async def test_whom_nobody_knows_gets_nothing(world: World) -> None:
    await deployed(world)
    with pytest.raises(Forbidden):
        await KubeApi(await world.stranger(), "default", NAME).graph()
