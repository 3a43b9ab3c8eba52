"""docs/kubernetes.md, "From one host to a cluster in five commands", and the planner's manifest: with kubectl on a real
API server."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from dynamo_local.clock import AsyncioClock
from tests.contract.kubernetes.kube_worlds import MANIFEST, real_kube
from tests.drivers.kube_server import RealKube
from tests.fakes.kubernetes.graphs import adapter
from tests.fakes.kubernetes.operator import Operator
from tests.tools.free_port import free_port

__all__ = ["real_kube"]

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
NAME = "chat"
SECRET = "hf_secret"
ADAPTERS = "/apis/nvidia.com/v1beta1/namespaces/default/dynamographdeploymentscalingadapters"
ACCOUNTS = "/api/v1/namespaces/default/serviceaccounts"
Run = Callable[[str], Awaitable[str]]
"""A line of a shell, in the folder of the example; what it prints. It fails with what it says on stderr."""


def commands() -> list[str]:
    page = (ROOT / "docs/kubernetes.md").read_text()
    section = page.split("## From one host to a cluster in five commands")[1].split("\n## ")[0]
    return [line.removeprefix("$ ") for line in section.splitlines() if line.startswith("$ ")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "examples/dynamo_1x", tmp_path / "graph"))


@pytest.fixture
def run(tmp_path: Path, folder: Path, real_kube: RealKube) -> Run:
    kubectl = Path(os.environ["DYN_KUBE_BIN"])
    if not (kubectl / "kubectl").exists():
        pytest.skip("no kubectl: tests/kube/build.sh FOLDER fetches it")
    env = {
        **os.environ,
        "PATH": f"{kubectl}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "KUBECONFIG": str(real_kube.kubeconfig()),
        "HOME": str(tmp_path),
        "HF_TOKEN": SECRET,
    }

    async def said(command: str) -> str:
        done = await asyncio.to_thread(
            subprocess.run, command, shell=True, cwd=folder, env=env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    return said


async def test_a_graph_of_a_host_is_deployed_and_scaled(run: Run, folder: Path, real_kube: RealKube) -> None:
    """There are no pods here, so of the last command, which forwards a port, only the Service's name is checked."""
    export, secret, apply, wait, forward = commands()
    assert re.fullmatch(rf"kubectl port-forward service/{NAME}-frontend \d+:8000", forward)
    async with real_kube.lent():
        operator = Operator(real_kube.client(), AsyncioClock(), NAME)
        try:
            await run(export.replace("TAG", "1.2.0"))
            await run(secret)
            assert "created" in await run(apply)
            await operator.start()
            assert "condition met" in await run(wait)
            assert SECRET not in (folder / f"{NAME}.yaml").read_text()
            replicas = "-o jsonpath='{.status.components.*.readyReplicas}'"
            assert set((await run(f"kubectl get dgd {NAME} {replicas}")).split()) == {"1"}
            await run(f"kubectl delete -f {NAME}.yaml")
        finally:
            await operator.close()
            await run("kubectl delete secret --all --ignore-not-found")


async def test_what_kubectl_applies_and_gets_is_imported(run: Run, folder: Path, real_kube: RealKube) -> None:
    async with real_kube.lent():
        await run(commands()[0].replace("TAG", "1.2.0"))
        await run(f"kubectl apply -f {NAME}.yaml")
        try:
            await run(f"kubectl get dgd {NAME} -o yaml | dynamo import kubernetes - -o back.yaml")
            await run(f"dynamo import kubernetes {NAME}.yaml -o same.yaml")
        finally:
            await run(f"kubectl delete -f {NAME}.yaml")
    assert (folder / "back.yaml").read_text().splitlines()[1:] == (folder / "same.yaml").read_text().splitlines()[1:]


async def test_the_manifest_of_a_planner_is_taken_as_it_is(run: Run) -> None:
    try:
        made = await run(f"kubectl apply -f {MANIFEST}")
        assert len([line for line in made.splitlines() if line.endswith(" created")]) == 5
        probed = "-o jsonpath='{.spec.template.spec.containers[0].livenessProbe.httpGet.path}'"
        assert await run(f"kubectl get deployment dynamo-local-planner {probed}") == "/live"
    finally:
        await run(f"kubectl delete -f {MANIFEST} --ignore-not-found")


PLANNED = (
    f"{commands()[0].replace('TAG', '1.2.0')} --planner --planner-image planner:1 "
    "--Planner.policy=slo --Planner.ttft=300 --Planner.itl=20"
)


async def test_an_exported_planner_begins_by_its_own_words_and_rights(
    run: Run, folder: Path, tmp_path: Path, real_kube: RealKube
) -> None:
    admin, port = real_kube.client(), free_port()
    async with real_kube.lent():
        await run(PLANNED)
        await run(f"kubectl apply -f {NAME}.yaml")
        operator = Operator(admin, AsyncioClock(), NAME)
        try:
            *_, graph = yaml.safe_load_all((folder / f"{NAME}.yaml").read_text())
            components = {one["name"]: one for one in graph["spec"]["components"]}
            for name in ("Prefill", "Decode"):
                assert (await admin.request("POST", ADAPTERS, adapter(name, graph=NAME))).status == 201
            await operator.start()
            account = components["Planner"]["podTemplate"]["spec"]["serviceAccountName"]
            request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
            token = await admin.request("POST", f"{ACCOUNTS}/{account}/token", request)
            (main,) = components["Planner"]["podTemplate"]["spec"]["containers"]
            there = ["--graph", NAME, "--kubeconfig", str(real_kube.kubeconfig(token.body["status"]["token"]))]
            own = ["--logs", str(tmp_path / "logs"), "--metrics-port", "0", "--system-port", str(port)]
            log, words = tmp_path / "planner.log", [*main["command"][1:], *main["args"], *there, *own]
            async with process([sys.executable, *words], log):
                await until(lambda: "leads" in log.read_text() and f"planning {NAME}" in log.read_text(), log.read_text)
        finally:
            await operator.close()
            await run(f"kubectl delete -f {NAME}.yaml")


@asynccontextmanager
async def process(words: list[str], log: Path) -> AsyncIterator[None]:
    with log.open("ab") as into:
        running = await asyncio.create_subprocess_exec(*words, stdout=into, stderr=into)
    try:
        yield
    finally:
        running.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(running.wait(), 60) == 0, log.read_text()


async def until(done: Callable[[], bool], what: Callable[[], str]) -> None:
    end_s = asyncio.get_running_loop().time() + 60.0
    while not done():
        assert asyncio.get_running_loop().time() < end_s, what()
        await asyncio.sleep(0.2)
