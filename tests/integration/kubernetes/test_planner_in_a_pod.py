"""`python -m dynamo_local.planner --environment kubernetes --config …` as a pod runs it, by the official client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.kubernetes.api import Transport
from tests.contract.kubernetes.kube_worlds import old_kube, real_kube
from tests.drivers.kube_http import api_over_http, kubeconfig, serving
from tests.drivers.kube_server import RealKube
from tests.drivers.pod_planner import IDLE, Cluster, cluster
from tests.drivers.prometheus import RealPrometheus
from tests.fakes.kubernetes.api_server import Kube
from tests.fakes.kubernetes.graphs import NAME, alpha, beta
from tests.integration.kubernetes.real_clusters import real_cluster

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


@pytest.mark.timeout(600)
async def test_a_planner_in_a_pod_follows_a_load_up_and_down(tmp_path: Path) -> None:
    with fake(tmp_path) as (admin, config):
        async with cluster(admin, config, tmp_path) as here:
            await up_and_down(here, POLICIES["throughput-load"])


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", POLICIES)
async def test_each_policy_does_on_a_real_api_server(policy: str, tmp_path: Path, real_kube: RealKube) -> None:
    async with real_cluster(real_kube, tmp_path) as here:
        here.rate, here.lengths = LOADS.get(policy, (here.rate, here.lengths))
        await up_and_down(here, POLICIES[policy])


@pytest.mark.full
@pytest.mark.timeout(900)
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
@pytest.mark.timeout(900)
async def test_a_cluster_that_has_only_the_older_version_is_planned_too(tmp_path: Path, old_kube: RealKube) -> None:
    async with real_cluster(old_kube, tmp_path, alpha()) as here:
        await up_and_down(here, POLICIES["throughput-load"])


@pytest.mark.full
@pytest.mark.timeout(900)
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
