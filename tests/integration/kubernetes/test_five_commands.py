"""docs/kubernetes.md, "From one host to a cluster in five commands": tried with kubectl on a real API server."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dynamo_local.clock import AsyncioClock
from tests.contract.kubernetes.kube_worlds import real_kube
from tests.drivers.kube_server import RealKube
from tests.fakes.kubernetes.operator import Operator

__all__ = ["real_kube"]

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
NAME = "chat"


def commands() -> list[str]:
    """As the page has them."""
    page = (ROOT / "docs/kubernetes.md").read_text()
    section = page.split("## From one host to a cluster in five commands")[1].split("\n## ")[0]
    return [line.removeprefix("$ ") for line in section.splitlines() if line.startswith("$ ")]


async def test_a_graph_of_a_host_is_deployed_and_scaled(tmp_path: Path, real_kube: RealKube) -> None:
    """The last one, a port to the frontend's pod, needs pods: here it is only seen to name the operator's Service."""
    kubectl = Path(os.environ["DYN_KUBE_BIN"])
    if not (kubectl / "kubectl").exists():
        pytest.skip("no kubectl: tests/kube/build.sh FOLDER fetches it")
    folder = tmp_path / "graph"
    shutil.copytree(ROOT / "examples/dynamo_1x", folder)
    env = {
        **os.environ,
        "PATH": f"{kubectl}:{os.environ['PATH']}",
        "KUBECONFIG": str(real_kube.kubeconfig()),
        "HOME": str(tmp_path),
        "HF_TOKEN": "hf_secret",
    }

    async def run(command: str) -> str:
        """Raises what it says on stderr."""
        done = await asyncio.to_thread(
            subprocess.run, command, shell=True, cwd=folder, env=env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

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
            manifest = (folder / f"{NAME}.yaml").read_text()
            assert "hf_secret" not in manifest
            replicas = "-o jsonpath='{.status.components.*.readyReplicas}'"
            assert set((await run(f"kubectl get dgd {NAME} {replicas}")).split()) == {"1"}
            await run(f"kubectl delete -f {NAME}.yaml")
        finally:
            await operator.close()
            await run("kubectl delete secret --all --ignore-not-found")
