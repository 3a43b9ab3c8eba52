"""A planner's process on a real API server: outages, conflicts, graphs that go, planners that die, pods that pend."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.core.passes import ForwardPass
from dynamo_local.planner.connectors.kubernetes.api import MERGE_PATCH
from dynamo_local.runtime.nats import connect_nats
from dynamo_local.runtime.passes import event_plane
from dynamo_local.runtime.passes.fpm import encode_pass
from tests.contract.kubernetes.kube_worlds import real_kube
from tests.drivers.kube_server import RealKube
from tests.drivers.pod_planner import BUSY, IDLE, Cluster, cluster
from tests.drivers.servers import RealNats
from tests.fakes.kubernetes.graphs import DECODE, NAME, PREFILL, beta
from tests.fakes.kubernetes.workers import BLOCK, KV_BLOCKS, NAMESPACE, told_pass, worker_metadata
from tests.integration.kubernetes.test_planner_in_a_pod import POLICIES

__all__ = ["real_kube"]

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

CONFIG = POLICIES["throughput-load"]


@asynccontextmanager
async def busy(server: RealKube, folder: Path, **operator: Any) -> AsyncIterator[Cluster]:
    """Many requests from the first moment on."""
    async with server.lent(), cluster(server.client(), server.kubeconfig(), folder, **operator) as here:
        yield here


async def test_an_api_server_that_is_away_and_one_that_hangs_are_waited_for(
    real_kube: RealKube, tmp_path: Path
) -> None:
    """It holds and says so; its pod stays alive and healthy; and it goes on from what is there."""
    async with busy(real_kube, tmp_path) as here, here.planner(CONFIG) as planner:
        await here.until_asked(3, 4)
        await asyncio.to_thread(real_kube.stop)

        async def holds() -> bool:
            return "planner: holds:" in planner.log

        await here.until(holds)
        here.rate = IDLE
        assert await planner.status("/live") == await planner.status("/health") == 200
        await asyncio.to_thread(real_kube.start)
        await here.until_asked(1, 1, 400)
        before = planner.log.count("planner: holds:")
        real_kube.hang(True)

        async def holds_again() -> bool:
            return planner.log.count("planner: holds:") > before

        try:
            await here.until(holds_again)
        finally:
            real_kube.hang(False)
        here.rate = BUSY
        await here.until_asked(3, 4)
        assert here.operator.peak <= 8


async def test_writes_of_others_cost_a_try_and_nothing_else(real_kube: RealKube, tmp_path: Path) -> None:
    """Somebody writes an annotation as fast as the server takes it: every patch may meet another version."""
    async with busy(real_kube, tmp_path) as here:
        numbers = itertools.count(1)

        async def writes() -> None:
            while True:
                note = {"metadata": {"annotations": {"n": str(next(numbers))}}}
                await here.admin.request("PATCH", f"{here.graphs}/{NAME}", note, content=MERGE_PATCH)

        writing = asyncio.ensure_future(writes())
        try:
            async with here.planner(CONFIG):
                await here.until_asked(3, 4)
                here.rate = IDLE
                await here.until_asked(1, 1, 400)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
        assert next(numbers) > 50
        assert here.operator.history[0] == here.operator.history[-1]


async def test_a_graph_that_is_deleted_is_planned_again_when_it_is_back(real_kube: RealKube, tmp_path: Path) -> None:
    async with busy(real_kube, tmp_path) as here, here.planner(CONFIG) as planner:
        await here.until_asked(3, 4)
        assert (await here.admin.request("DELETE", f"{here.graphs}/{NAME}")).status == 200

        async def missed() -> bool:
            return "there is no dynamographdeployments/serving" in planner.log

        await here.until(missed)
        assert await planner.status("/health") == 200
        await here.made(beta())
        await here.until_asked(3, 4)


async def test_a_planner_that_is_killed_is_followed_by_the_other_one(real_kube: RealKube, tmp_path: Path) -> None:
    """Its lease expires. The one that is started in its place waits for its turn, and changes nothing."""
    async with busy(real_kube, tmp_path) as here, here.planner(CONFIG, "b") as first:
        await here.until_asked(3, 4)
        async with here.planner(CONFIG, "c") as second:

            async def observes() -> bool:
                return "planning serving" in second.log

            await here.until(observes)
            assert "this planner leads" not in second.log
            here.planners.remove(first)
            first.process.send_signal(signal.SIGKILL)
            await first.process.wait()
            here.rate = IDLE
            await here.until_asked(1, 1, 400)
            assert "this planner leads" in second.log
            async with here.planner(CONFIG, "d") as third:

                async def waits() -> bool:
                    return "planning serving" in third.log

                await here.until(waits)
                assert "this planner leads" not in third.log


async def test_pods_that_pend_do_not_keep_a_graph_large(real_kube: RealKube, tmp_path: Path) -> None:
    """There are four devices: three pods pend for ever. They are taken away as soon as they are too many."""
    async with busy(real_kube, tmp_path, devices=4) as here, here.planner(CONFIG):
        await here.until_asked(3, 4)

        async def pend() -> bool:
            status = (await here.graph())["status"]
            return status["state"] == "pending" and here.operator.peak == 4

        await here.until(pend)
        here.rate = IDLE
        await here.until_asked(1, 1, 500)


async def test_the_policy_load_hears_the_engines_over_nats(
    real_kube: RealKube, own_nats: RealNats, tmp_path: Path
) -> None:
    """Passes as Dynamo's workers send them, the limits from their cards; some are those of a rolling update."""
    policy = {"policy": "load", "max_gpu_budget": 6, "adjustment_interval": 5, "metric_pulling_interval": 1}
    hashed = f"{NAMESPACE}-0a1b2c3d"
    nats = await connect_nats(own_nats.url, own_nats.access)
    full = {"kv": 0.95, "waits": 9}

    async def sends(here: Cluster) -> None:
        for number in itertools.count(1):
            asked = await here.asked()
            for role, component, name in (("prefill", "prefill", PREFILL), ("decode", "backend", DECODE)):
                for worker in range(asked.get(name, 0)):
                    number_of = 100 * (role == "decode") + worker
                    kv = round(full["kv"] * KV_BLOCKS * BLOCK) if role == "decode" else 0
                    waits = int(full["waits"]) if role == "prefill" else 0
                    told = told_pass(str(number_of), 0.0, number=number, kv=kv, running=1, waits=waits)
                    await nats.publish(event_plane.subject(hashed, component), sealed(told, number))
            await asyncio.sleep(0.5)

    async with busy(real_kube, tmp_path) as here:
        for name, component in (("d", "backend"), ("p", "prefill")):
            where = "/apis/nvidia.com/v1alpha1/namespaces/default/dynamoworkermetadatas"
            metadata = worker_metadata(name, 7, component, namespace=hashed)
            assert (await here.admin.request("POST", where, metadata)).status == 201
        sending = asyncio.ensure_future(sends(here))
        try:
            async with here.planner(policy, **own_nats.env):
                await here.until_asked(3, 3)
                full |= {"kv": 0.01, "waits": 0}
                await here.until_asked(1, 1, 400)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            await nats.close()


def sealed(told: ForwardPass, number: int) -> bytes:
    """In the envelope of Dynamo's event plane."""
    return event_plane.seal(encode_pass(told), publisher_id=7, sequence=number, wall_s=0.0)
