"""A planner's process on a real API server: outages, conflicts, graphs that go, planners that die, pods that pend."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from dynamo_local.kubernetes.api import MERGE_PATCH
from dynamo_local.planner.records.ticks import tick_log_path
from tests.contract.kubernetes.kube_worlds import real_kube
from tests.drivers.kube_server import RealKube
from tests.drivers.pod_planner import BUSY, IDLE, PlannerProcess
from tests.fakes.kubernetes.graphs import DECODE, NAME, PREFILL, beta
from tests.integration.kubernetes.real_clusters import real_cluster
from tests.integration.kubernetes.test_planner_in_a_pod import POLICIES

__all__ = ["real_kube"]

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

CONFIG = POLICIES["throughput-load"]
TICKS = 3
"""One in six seconds."""


async def test_an_api_server_that_is_away_and_one_that_hangs_are_waited_for(
    real_kube: RealKube, tmp_path: Path
) -> None:
    async with real_cluster(real_kube, tmp_path) as here, here.planner(CONFIG) as planner:
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


async def test_during_a_rollout_and_after_a_failure_nothing_is_changed(real_kube: RealKube, tmp_path: Path) -> None:
    async with real_cluster(real_kube, tmp_path) as here:
        here.operator.rollout = "InProgress"
        async with here.planner(CONFIG) as planner:
            await here.until(ticked(planner, TICKS))
            assert await here.asked() == {PREFILL: 1, DECODE: 1}
            here.operator.rollout = None
            await here.until_asked(3, 4)
            here.operator.failed, here.rate = True, IDLE
            await here.until(ticked(planner, TICKS))
            assert await here.asked() == {PREFILL: 3, DECODE: 4}
            here.operator.failed = False
            await here.until_asked(1, 1, 400)


async def test_writes_of_others_cost_a_try_and_nothing_else(real_kube: RealKube, tmp_path: Path) -> None:
    async with real_cluster(real_kube, tmp_path) as here:
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
    async with real_cluster(real_kube, tmp_path) as here, here.planner(CONFIG) as planner:
        await here.until_asked(3, 4)
        assert (await here.admin.request("DELETE", f"{here.graphs}/{NAME}")).status == 200

        async def missed() -> bool:
            return "there is no dynamographdeployments/serving" in planner.log

        await here.until(missed)
        assert await planner.status("/health") == 200
        await here.made(beta())
        await here.until_asked(3, 4)


async def test_a_planner_that_is_killed_is_followed_by_the_other_one(real_kube: RealKube, tmp_path: Path) -> None:
    async with real_cluster(real_kube, tmp_path) as here, here.planner(CONFIG, "b") as first:
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
    async with real_cluster(real_kube, tmp_path, devices=4) as here, here.planner(CONFIG):
        await here.until_asked(3, 4)

        async def pend() -> bool:
            status = (await here.graph())["status"]
            return status["state"] == "pending" and here.operator.peak == 4

        await here.until(pend)
        here.rate = IDLE
        await here.until_asked(1, 1, 500)


def ticked(planner: PlannerProcess, times: int) -> Callable[[], Awaitable[bool]]:
    """Whether it has looked and thought so many times since now."""
    path = tick_log_path(planner.folder / "logs")

    def ticks() -> int:
        return len(path.read_text().splitlines()) if path.exists() else 0

    first = ticks()

    async def enough() -> bool:
        return ticks() >= first + times

    return enough
