"""The virtual connector against Dynamo's own code: its planner's side drives our arbiter, its client answers ours."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.clock import AsyncioClock
from dynamo_local.components.commands import dynamo_1x_env
from dynamo_local.planner.connectors import VirtualConnector, VirtualKeys, Written
from dynamo_local.transport.etcd import EtcdStore
from tests.drivers.scaled import names, settled
from tests.drivers.servers import RealEtcd
from tests.dynamo1x.dynamo_graphs import graph, instances, listed, load

pytestmark = [pytest.mark.infra, pytest.mark.timeout(300)]

SIDE = Path(__file__).with_name("virtual_side.py")
LINE_S = 90.0


@asynccontextmanager
async def side(*words: str, etcd: Mapping[str, str]) -> AsyncIterator[Process]:
    """One side of the connector in a process of its own, with no more of our environment than it needs."""
    env = {**etcd, **dynamo_1x_env.environment({}, etcd), "PATH": "/usr/bin:/bin", "DYN_LOG": "warn"}
    process = await asyncio.create_subprocess_exec(sys.executable, str(SIDE), *words, env=env, stdin=PIPE, stdout=PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def line(process: Process) -> dict[str, Any]:
    assert process.stdout is not None
    async with asyncio.timeout(LINE_S):
        raw = await process.stdout.readline()
    assert raw, f"it ended with {await process.wait()}"
    found: dict[str, Any] = json.loads(raw)
    return found


async def go_on(process: Process) -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n")
    await process.stdin.drain()


@pytest.mark.full
@pytest.mark.parametrize("through", ["coordinator", "connector"])
async def test_dynamos_planner_drives_its_own_workers_through_our_arbiter(through: str) -> None:
    with graph("agg", "--follow", "virtual").started() as served:
        await listed(served)
        etcd = served.environment()
        async with load(served) as found, side(through, served.namespace, "3", "1", etcd=etcd) as planner:
            for number, target in enumerate((3, 1)):
                assert await line(planner) == {"decided": target, "decision_id": number}
                assert await line(planner) == {"done": target, "decision_id": number}
                assert len(names(served, "Mocker")) == len(instances(served)) == target
                await found.more(60)
                await go_on(planner)
            assert await asyncio.wait_for(planner.wait(), 30.0) == 0
        found.check(120)
        await settled(served)
        assert served.status()["follow"]["scaled_decision_id"] == 1


@pytest.mark.full
async def test_dynamos_planner_moves_both_roles_through_our_arbiter() -> None:
    with graph("disagg", "--follow", "virtual").started() as served:
        await listed(served)
        etcd = served.environment()
        async with load(served) as found, side("connector", served.namespace, "2:2", "1:1", etcd=etcd) as planner:
            for number, target in enumerate((2, 1)):
                assert await line(planner) == {"decided": target, "decision_id": number}
                assert await line(planner) == {"done": target, "decision_id": number}
                assert len(instances(served)) == len(instances(served, "prefill")) == target
                assert len(names(served, "Decode")) == len(names(served, "Prefill")) == target
                await found.more(20)
                await go_on(planner)
            assert await asyncio.wait_for(planner.wait(), 30.0) == 0
        found.check(40)


@pytest.mark.full
async def test_dynamos_own_client_acknowledges_our_planners_decisions(etcd_server: RealEtcd, namespace: str) -> None:
    store = await EtcdStore.connect(etcd_server.endpoint)
    connector = VirtualConnector(
        VirtualKeys(store, namespace),
        AsyncioClock(),
        prefill="Prefill",
        decode="Decode",
        counts=dict,
        max_wait_s=60.0,
        blocking=True,
    )
    await connector.start()
    async with side("environment", namespace, "2", etcd=etcd_server.env) as environment:
        assert await line(environment) == {"waits": True}
        for number, decode in enumerate((3, 1)):
            written = await connector.set_component_replicas({"Prefill": 2, "Decode": decode})
            assert await line(environment) == {"decision_id": number, "prefill": 2, "decode": decode}
            assert written == Written(number, acknowledged=True)
        assert await asyncio.wait_for(environment.wait(), 30.0) == 0
    await connector.close()
    await store.close()
