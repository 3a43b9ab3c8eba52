"""`python -m dynamo_local.planner --environment kubernetes --config …` as a pod runs it, by the official client."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo_local.clock import AsyncioClock
from dynamo_local.planner.connectors.kubernetes.api import Transport
from tests.contract.kubernetes.kube_worlds import real_kube
from tests.drivers.kube_http import api_over_http, frontend, kubeconfig, serving
from tests.drivers.kube_server import RealKube
from tests.fakes.kubernetes.api_server import Kube
from tests.fakes.kubernetes.graphs import DECODE, NAME, PREFILL, beta
from tests.fakes.kubernetes.operator import Operator

__all__ = ["real_kube"]

GRAPHS = "/apis/nvidia.com/v1beta1/namespaces/default/dynamographdeployments"
ISL, OSL, BUSY = 2000, 400, 50.0
COMMON = {"ttft_ms": 400, "itl_ms": 12, "max_gpu_budget": 8, "environment": "kubernetes"}
THROUGHPUT_LOAD = {
    **COMMON,
    "optimization_target": "sla",
    "load_predictor": "constant",
    "throughput_adjustment_interval_seconds": 6,
    "profile_results_dir": "dynamo_H200_TP1P_TP1D",
}


@asynccontextmanager
async def planner(config: dict[str, Any], kube: Path, frontend_url: str, folder: Path, port: int) -> AsyncIterator[Any]:
    """The process, until it is told to end; it then ends with 0."""
    told = folder / "planner.yaml"
    told.write_text(json.dumps(config))
    words = (
        "--environment",
        "kubernetes",
        "--config",
        str(told),
        "--kubeconfig",
        str(kube),
        "--frontend",
        frontend_url,
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DYN_", "KUBE", "NATS"))}
    with (folder / "planner.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "dynamo_local.planner", *words),
            *("--logs", str(folder / "logs"), "--metrics-port", str(port)),
            stdout=log,
            stderr=log,
            env={**environment, "DYN_PARENT_DGD_K8S_NAME": NAME},
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        code = await asyncio.wait_for(process.wait(), 30)
        assert code == 0, (folder / "planner.log").read_text()


async def until(done: Callable[[], Any], within_s: float, folder: Path, process: Any) -> None:
    """`done` may be a coroutine function."""
    end_s = asyncio.get_running_loop().time() + within_s
    while True:
        found = done()
        if await found if asyncio.iscoroutine(found) else found:
            return
        log = folder / "planner.log"
        assert process.returncode is None, log.read_text()
        assert asyncio.get_running_loop().time() < end_s, log.read_text() if log.exists() else "no log"
        await asyncio.sleep(0.2)


async def up_and_down(admin: Transport, kube: Path, config: dict[str, Any], folder: Path, port: int) -> None:
    """From 1P1D to 3P4D and back; its metrics and its report are there."""
    assert (await admin.request("POST", GRAPHS, beta())).status == 201
    operator, now = Operator(admin, AsyncioClock(), NAME, start_s=0.5), {"rate": BUSY}
    await operator.start()

    async def asked() -> dict[str, int]:
        spec = (await admin.request("GET", f"{GRAPHS}/{NAME}")).body["spec"]
        return {one["name"]: one["replicas"] for one in spec["components"] if one["name"] != "Frontend"}

    async def is_asked(prefill: int, decode: int) -> bool:
        return await asked() == {PREFILL: prefill, DECODE: decode}

    with ExitStack() as stack:
        url = stack.enter_context(serving(frontend(lambda: now["rate"], ISL, OSL)))
        async with planner(config, kube, f"{url}/metrics", folder, port) as process:
            await until(lambda: is_asked(3, 4), 120, folder, process)
            await until(lambda: says(port, "dynamo_planner_predicted_num_decode_replicas 4.0"), 10, folder, process)
            now["rate"] = 0.2
            await until(lambda: is_asked(1, 1), 240, folder, process)
            assert operator.peak <= 8
    await operator.close()
    assert list((folder / "logs").rglob("planner_report_*.html"))
    lease = await admin.request(
        "GET", f"/apis/coordination.k8s.io/v1/namespaces/default/leases/{NAME}-dynamo-local-planner"
    )
    assert lease.body["spec"].get("holderIdentity", "") == ""


async def says(port: int, words: str) -> bool:
    """Its /metrics do."""
    return words in await asyncio.to_thread(metrics, port)


def metrics(port: int) -> str:
    """Of the planner."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
        return str(reply.read().decode())


async def test_a_planner_in_a_pod_follows_a_load_up_and_down(tmp_path: Path, unused_tcp_port_factory: Any) -> None:
    """On the fake API server."""
    kube = Kube(("v1beta1",))
    with serving(api_over_http(kube)) as url:
        config = kubeconfig(url, tmp_path / "kubeconfig")
        await up_and_down(kube.client(), config, THROUGHPUT_LOAD, tmp_path, unused_tcp_port_factory())


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_the_same_on_a_real_api_server(tmp_path: Path, real_kube: RealKube, unused_tcp_port_factory: Any) -> None:
    """Its answers, its versions, its TLS and its tokens."""
    try:
        await up_and_down(
            real_kube.client(), real_kube.kubeconfig(), THROUGHPUT_LOAD, tmp_path, unused_tcp_port_factory()
        )
    finally:
        await real_kube.emptied()
