"""The Role of examples/kubernetes/planner.yaml: it suffices, and without any one of its verbs something is refused."""

from __future__ import annotations

import pytest

from dynamo_local.clock import AsyncioClock
from dynamo_local.core.types import Role
from dynamo_local.errors import DynamoError
from dynamo_local.kubernetes.api import Forbidden, KubeApi, Transport
from dynamo_local.kubernetes.connector import GraphUnfit, KubernetesConnector
from dynamo_local.kubernetes.graph import Requirements
from dynamo_local.kubernetes.planner import Election
from dynamo_local.planner.connectors import Committed
from tests.contract.kubernetes.kube_worlds import World, planner_rules
from tests.contract.kubernetes.test_api_server import ADAPTERS, deployed
from tests.fakes.kubernetes.api_server import Rule
from tests.fakes.kubernetes.graphs import DECODE, NAME, PREFILL, adapter, beta

EXPECTED = Requirements(max_gpus=8, floors={}, gpus={Role.PREFILL: None, Role.DECODE: None}, prefill=True)


async def life(client: Transport) -> None:
    """All that a planner does: it checks the graph, leads, scales by the graph and by an adapter, renews, and leaves.

    Raises what it is refused."""
    api, clock = KubeApi(client, "default", NAME), AsyncioClock()
    connector, election = KubernetesConnector(api, clock, EXPECTED), Election(api, clock, "leader", "me")
    try:
        await connector.start()
        await election.start()
        connector.worker_pools()
        done = await connector.set_component_replicas({PREFILL: 2, DECODE: 2})
        if not isinstance(done, Committed):
            raise Forbidden(f"{done.code}: {done.reason}")
        await election.renew()
        await api.worker_metadata()
    finally:
        await election.close()
        await connector.close()


async def graph_with_one_adapter(world: World) -> None:
    graph = beta()
    graph["spec"]["components"][1]["scalingAdapter"] = {}
    await deployed(world, graph)
    assert (await world.admin.request("POST", ADAPTERS, adapter(DECODE))).status == 201


async def test_the_role_suffices(world: World) -> None:
    await graph_with_one_adapter(world)
    await life(await world.somebody(planner_rules()))
    seen = await KubeApi(world.admin, "default", NAME).graph()
    assert {one.name: seen.wanted(one) for one in seen.planned} == {PREFILL: 2, DECODE: 2}


@pytest.mark.parametrize("missing", sorted(planner_rules()), ids=":".join)
async def test_without_a_verb_something_is_refused(world: World, missing: Rule) -> None:
    await graph_with_one_adapter(world)
    with pytest.raises(DynamoError) as caught:
        await life(await world.somebody(planner_rules() - {missing}))
    assert not isinstance(caught.value, GraphUnfit)
    resource, verb = missing
    assert "forbidden" in str(caught.value)
    assert resource.partition("/")[0] in str(caught.value)
    assert verb in str(caught.value)
