"""A planner's process as a pod runs it, by the official client: policies, outages, conflicts, deaths, pending pods."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.kubernetes.api import Transport
from tests.contract.kubernetes.kube_worlds import old_kube, real_kube
from tests.drivers.kube_http import api_over_http, kubeconfig, serving
from tests.drivers.kube_server import RealKube
from tests.drivers.pod_planner import BUSY, IDLE, Cluster, cluster
from tests.drivers.prometheus import RealPrometheus
from tests.fakes.kubernetes.api_server import Kube
from tests.fakes.kubernetes.graphs import NAME, alpha, beta
from tests.integration.kubernetes.real_clusters import real_cluster

pytestmark = pytest.mark.timeout(900)

__all__ = ["old_kube", "real_kube"]

BUDGET = 8
COMMON = {"ttft_ms": 400, "itl_ms": 12, "max_gpu_budget": BUDGET, "environment": "kubernetes"}
PROFILED = {
    **COMMON,
    "load_predictor": "constant",
    "throughput_adjustment_interval_seconds": 6,
    "profile_results_dir": "dynamo_H200_TP1P_TP1D",
}
LOADS = {"slo": (32.0, (2500, 350))}
"""Requests per second and lengths, where 3P4D is what they need."""
POLICIES: dict[str, dict[str, Any]] = {
    "throughput-load": {**PROFILED, "optimization_target": "sla"},
    "sla": {**PROFILED, "policy": "sla"},
    "slo": {**COMMON, "policy": "slo"},
}


@contextmanager
def fake(folder: Path) -> Iterator[tuple[Transport, Path]]:
    kube = Kube(("v1beta1",))
    with serving(api_over_http(kube)) as url:
        yield kube.client(), kubeconfig(url, folder / "kubeconfig")


async def up_and_down(here: Cluster, config: dict[str, Any]) -> None:
    """From 1P1D to 3P4D and back; its probes, its metrics and its report are there, and its lease is given back."""
    async with here.planner(config) as planner:
        await here.until_asked(3, 4)
        assert await planner.status("/live") == await planner.status("/health") == 200
        await here.until(lambda: planner.says("dynamo_planner_predicted_num_decode_replicas 4.0"))
        here.rate = IDLE
        await here.until_asked(1, 1, 400)
        assert here.operator.peak <= BUDGET
    assert list((here.folder / "a/logs").rglob("planner_report_*.html"))
    where = f"/apis/coordination.k8s.io/v1/namespaces/default/leases/{NAME}-dynamo-local-planner"
    lease = await here.admin.request("GET", where)
    assert lease.body["spec"].get("holderIdentity", "") == ""


@pytest.mark.full
async def test_a_planner_in_a_pod_follows_a_load_up_and_down(tmp_path: Path) -> None:
    with fake(tmp_path) as (admin, config):
        async with cluster(admin, config, tmp_path) as here:
            await up_and_down(here, POLICIES["throughput-load"])


@pytest.mark.full
@pytest.mark.parametrize("policy", POLICIES)
async def test_each_policy_does_on_a_real_api_server(policy: str, tmp_path: Path, real_kube: RealKube) -> None:
    async with real_cluster(real_kube, tmp_path) as here:
        here.rate, here.lengths = LOADS.get(policy, (here.rate, here.lengths))
        await up_and_down(here, POLICIES[policy])


@pytest.mark.full
async def test_the_requests_may_be_counted_by_prometheus(tmp_path: Path, real_kube: RealKube) -> None:
    async with real_cluster(real_kube, tmp_path) as here:
        (tmp_path / "prometheus").mkdir()
        server = RealPrometheus(tmp_path / "prometheus", here.url.removeprefix("http://"))
        here.url = "http://127.0.0.1:1"
        try:
            await asyncio.to_thread(server.start)
            await up_and_down(here, {**POLICIES["throughput-load"], "metric_pulling_prometheus_endpoint": server.url})
        finally:
            await asyncio.to_thread(server.stop)


@pytest.mark.full
async def test_a_cluster_that_has_only_the_older_version_is_planned_too(tmp_path: Path, old_kube: RealKube) -> None:
    async with real_cluster(old_kube, tmp_path, alpha()) as here:
        await up_and_down(here, POLICIES["throughput-load"])


@pytest.mark.full
async def test_adapters_are_scaled_and_nothing_is_written_past_them(tmp_path: Path, real_kube: RealKube) -> None:
    graph = beta(adapters=True)
    async with real_cluster(real_kube, tmp_path, graph) as here:
        await up_and_down(here, POLICIES["throughput-load"])
        managers = {
            manager["manager"]
            for manager in (await here.graph())["metadata"].get("managedFields", ())
            if "f:replicas" in str(manager.get("fieldsV1", {}).get("f:spec"))
        }
        for name in ("prefill", "decode"):
            where = here.graphs.replace("dynamographdeployments", "dynamographdeploymentscalingadapters")
            scale = await here.admin.request("GET", f"{where}/{NAME}-vllm{name}worker/scale")
            assert scale.body["spec"]["replicas"] == 1
        assert len(managers) <= 1, "the operator's stand-in alone writes numbers into the graph"


CONFIG = POLICIES["throughput-load"]


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
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


@pytest.mark.full
async def test_pods_that_pend_do_not_keep_a_graph_large(real_kube: RealKube, tmp_path: Path) -> None:
    async with real_cluster(real_kube, tmp_path, devices=4) as here, here.planner(CONFIG):
        await here.until_asked(3, 4)

        async def pend() -> bool:
            status = (await here.graph())["status"]
            return status["state"] == "pending" and here.operator.peak == 4

        await here.until(pend)
        here.rate = IDLE
        await here.until_asked(1, 1, 500)
