"""The planner of a host as a component of the graph: the same policy and options, in a pod of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dynamo_local.config.planner.options import BY_TARGETS, chosen_policy
from dynamo_local.kubernetes.model import (
    MAIN_CONTAINER,
    Component,
    ComponentType,
    Container,
    PodSpec,
    PodTemplate,
)
from dynamo_local.manifests.notes import Kind, Note, left_out

NAME = "Planner"
RIGHTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("nvidia.com", "dynamographdeployments", ("get", "patch")),
    ("nvidia.com", "dynamographdeploymentscalingadapters/scale", ("get", "patch")),
    ("nvidia.com", "dynamoworkermetadatas", ("list",)),
    ("coordination.k8s.io", "leases", ("get", "create", "update")),
)
"""The least that suffices; the service account that the operator gives a planner has no leases, and may not read an
adapter's scale."""
MODULE = "dynamo_local.planner"
_HERE = "of a planner in the arbiter of one host"
_REASONS = {
    "enabled": "the planner's pod is there, or it is not (--no-planner)",
    "environment": "it is kubernetes there",
    "namespace": "the operator names the namespace",
    "actuators": "on Kubernetes workers are only started and ended",
    "log_dir": "a pod's folder goes with it; mount a volume for it",
}


def planner_component(
    section: Mapping[str, Any], image: str, frontend: str | None, account: str
) -> tuple[Component, tuple[Note, ...]]:
    """The component, and which options have no place there. The section is valid, its keys have underscores.

    `frontend` is the name of the Service whose /metrics tell the traffic, `account` that of `rights`.
    """
    unread = [key for key in section if key in _REASONS or key.startswith("virtual_")]
    notes = left_out(NAME, _REASONS, unread, _HERE)
    kept = {key: value for key, value in section.items() if key not in unread}
    if chosen_policy(section) == BY_TARGETS:
        kept.setdefault("policy", BY_TARGETS)  # a pod to which none is named plans as Dynamo does
    profile = kept.get("profile_results_dir")
    if isinstance(profile, str) and "/" in profile:
        text = f"{profile} is a folder of this host: mount it into the planner's pod"
        notes = (*notes, Note(Kind.CHANGED, f"{NAME}.profile_results_dir", text))
    container = Container(
        name=MAIN_CONTAINER,
        image=image,
        command=["python3", "-m", MODULE],
        args=["--environment", "kubernetes", "--config", json.dumps(kept), *_traffic(frontend)],
    )
    template = PodTemplate(spec=PodSpec(containers=[container], service_account_name=account))
    return Component(name=NAME, type=ComponentType.PLANNER, replicas=1, pod_template=template), notes


def rights(account: str) -> tuple[dict[str, Any], ...]:
    """A service account that may do what a planner does, and nothing else."""
    name = {"metadata": {"name": account}}
    group = "rbac.authorization.k8s.io"
    rules = [{"apiGroups": [api], "resources": [what], "verbs": list(verbs)} for api, what, verbs in RIGHTS]
    role = {"apiVersion": f"{group}/v1", "kind": "Role", **name, "rules": rules}
    binding = {
        "apiVersion": f"{group}/v1",
        "kind": "RoleBinding",
        **name,
        "roleRef": {"apiGroup": group, "kind": "Role", "name": account},
        "subjects": [{"kind": "ServiceAccount", "name": account}],
    }
    return {"apiVersion": "v1", "kind": "ServiceAccount", **name}, role, binding


def _traffic(frontend: str | None) -> list[str]:
    return [] if frontend is None else ["--frontend", f"http://{frontend}:8000/metrics"]
