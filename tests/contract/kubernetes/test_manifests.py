"""Exported manifests are what a real API server with Dynamo's CRDs takes: in both versions, and nothing is pruned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dynamo_local.kubernetes.export import ExportRequest
from dynamo_local.kubernetes.manifests import as_v1alpha1, document
from tests.contract.kubernetes.kube_worlds import old_kube, real_kube
from tests.drivers.kube_server import RealKube
from tests.tools.clean_imports import clean_imports
from tests.unit.kubernetes.manifests.carried import EXAMPLES, PLANNED, WISH, exported

__all__ = ["old_kube", "real_kube"]

pytestmark = pytest.mark.full

CARRIED = {
    "dynamo_1x/agg.yaml": None,
    "dynamo_1x/disagg.yaml": None,
    "dynamo_1x/vllm_disagg.yaml": None,
    "vllm_serve/agg.yaml": None,
    "vllm_serve/disagg.yaml": None,
    "llm/configs/llama-3.1-8b-agg.yaml": "graphs.agg:Frontend",
    "llm/configs/llama-3.1-8b-disagg.yaml": "graphs.disagg:Frontend",
    "llm/configs/qwen3-32b-agg.yaml": "graphs.agg:Frontend",
    "llm/configs/qwen3-32b-disagg.yaml": "graphs.disagg:Frontend",
}
"""Every example that has a form on Kubernetes."""
PLURALS = {
    "DynamoGraphDeployment": "dynamographdeployments",
    "ServiceAccount": "serviceaccounts",
    "Role": "roles",
    "RoleBinding": "rolebindings",
}


@pytest.fixture(autouse=True)
def _clean_imports() -> Iterator[None]:
    with clean_imports():
        yield


async def applied(server: RealKube, manifest: dict[str, Any]) -> dict[str, Any]:
    base = "/api" if manifest["apiVersion"] == "v1" else "/apis"
    where = f"{base}/{manifest['apiVersion']}/namespaces/default/{PLURALS[manifest['kind']]}?dryRun=All"
    answer = await server.client().request("POST", where, manifest)
    assert answer.status == 201, answer.body.get("message")
    return dict(answer.body)


def lost(sent: Any, kept: Any, where: str = "") -> list[str]:
    """Fields that were sent, and are not kept as they were."""
    if isinstance(sent, dict) and isinstance(kept, dict):
        return [each for key in sent for each in lost(sent[key], kept.get(key), f"{where}.{key}")]
    if isinstance(sent, list) and isinstance(kept, list) and len(sent) == len(kept):
        return [each for n, one in enumerate(sent) for each in lost(one, kept[n], f"{where}[{n}]")]
    return [] if sent == kept else [where]


@pytest.mark.parametrize("wish", [WISH, PLANNED], ids=["alone", "planned"])
@pytest.mark.parametrize("file", CARRIED)
async def test_what_is_exported_is_taken_whole(
    file: str, wish: ExportRequest, real_kube: RealKube, old_kube: RealKube
) -> None:
    found = exported((EXAMPLES / file).read_text(), wish, target=CARRIED[file])
    for manifest in (document(found.graph), *found.beside):
        assert lost(manifest, await applied(real_kube, manifest)) == []
    older = document(as_v1alpha1(found.graph))
    assert lost(older, await applied(old_kube, older)) == []


async def test_a_field_that_dynamo_does_not_have_is_noticed(real_kube: RealKube) -> None:
    """Without this, the test above would pass for anything: the server drops unknown fields."""
    broken = document(exported((EXAMPLES / "dynamo_1x/agg.yaml").read_text()).graph)
    broken["spec"]["components"][0]["podTemplates"] = {"a": 1}
    assert lost(broken, await applied(real_kube, broken)) == [".spec.components[0].podTemplates"]


async def test_a_planners_account_may_do_what_its_role_says(real_kube: RealKube) -> None:
    found = exported((EXAMPLES / "dynamo_1x/disagg.yaml").read_text(), PLANNED)
    _, role, _ = found.beside
    rules = frozenset((what, verb) for rule in role["rules"] for what in rule["resources"] for verb in rule["verbs"])
    await real_kube.account(rules)
