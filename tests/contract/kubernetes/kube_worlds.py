"""An API server to talk to: the fake, or a real one (`tests/kube/build.sh` builds it, `DYN_KUBE_BIN` says where)."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dynamo_local.kubernetes.api import Transport
from tests.drivers.kube_server import RealKube
from tests.fakes.kubernetes.api_server import Kube, Rule
from tests.tools.dynamos_files import dynamos_file

CRDS = tuple(
    f"nvidia.com_{plural}.json"
    for plural in ("dynamographdeployments", "dynamographdeploymentscalingadapters", "dynamoworkermetadatas")
)
WHICH = ["fake", pytest.param("real", marks=pytest.mark.full)]
NAMESPACE = "default"
MANIFEST = Path(__file__).parents[3] / "examples/kubernetes/planner.yaml"


def planner_rules() -> frozenset[Rule]:
    """Each right of the Role in the planner's manifest."""
    role = next(one for one in yaml.safe_load_all(MANIFEST.read_text()) if one["kind"] == "Role")
    return frozenset(
        (resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]
    )


class FakeWorld:
    """A server of our own."""

    def __init__(self) -> None:
        self.kube = Kube(("v1beta1",))
        self.admin: Transport = self.kube.client()

    async def somebody(self, rules: frozenset[Rule]) -> Transport:
        return self.kube.client(rules)

    async def stranger(self) -> Transport:
        return self.kube.client(known=False)


class RealWorld:
    """A kube-apiserver with Dynamo's CRDs."""

    def __init__(self, server: RealKube) -> None:
        self.server = server
        self.admin: Transport = server.client()

    async def somebody(self, rules: frozenset[Rule]) -> Transport:
        return await self.server.account(rules)

    async def stranger(self) -> Transport:
        return self.server.client(token="none")


World = FakeWorld | RealWorld


@pytest.fixture(scope="session")
def real_kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealKube]:
    """Runs for the session; Dynamo's CRDs are in it, stored as v1beta1."""
    yield from _started(tmp_path_factory.mktemp("kube"), stored_as_v1beta1)


@pytest.fixture(scope="session")
def old_kube(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealKube]:
    yield from _started(tmp_path_factory.mktemp("old"), with_v1alpha1_alone)


def _started(where: Path, made: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[RealKube]:
    folder = os.environ.get("DYN_KUBE_BIN")
    if not folder:
        pytest.skip("no kube-apiserver: tests/kube/build.sh FOLDER builds it, and DYN_KUBE_BIN=FOLDER names it")
    crds = [made(json.loads(dynamos_file(name).read_text())) for name in CRDS]
    server = RealKube(Path(folder), where)
    try:
        server.start()
        server.install(crds)
        yield server
    finally:
        server.stop()


def stored_as_v1beta1(crd: dict[str, Any]) -> dict[str, Any]:
    """Without the operator, which converts, the other version would lose its spec."""
    for version in crd["spec"]["versions"]:
        version["storage"] = version is crd["spec"]["versions"][-1]
    return crd


def with_v1alpha1_alone(crd: dict[str, Any]) -> dict[str, Any]:
    crd["spec"]["versions"] = [one for one in crd["spec"]["versions"] if one["name"] == "v1alpha1"]
    for version in crd["spec"]["versions"]:
        version["storage"] = True
    crd["spec"].pop("conversion", None)
    return crd


@pytest.fixture(params=WHICH)
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    if request.param == "fake":
        yield FakeWorld()
        return
    server: RealKube = request.getfixturevalue("real_kube")
    found = RealWorld(server)
    yield found
    await server.emptied()
