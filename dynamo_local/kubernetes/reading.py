"""A DynamoGraphDeployment as the planner sees it. Pure: documents to values.

Roles: a component's type says it (v1beta1 `type: prefill`, v1alpha1 `subComponentType: prefill`), else its command
(`--disaggregation-mode prefill`), else its name. A single worker without any of these is aggregated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dynamo_local.core.types import Role
from dynamo_local.kubernetes import graph as values
from dynamo_local.kubernetes.graph import Counts, Seen
from dynamo_local.kubernetes.model import (
    GPU_RESOURCE,
    Component,
    ComponentStatus,
    ComponentType,
    Container,
    Graph,
    GraphV1Beta1,
    ModelRef,
    Multinode,
    PodSpec,
    Quantity,
    Service,
    ServiceResources,
    mode_of,
    option,
    read_graph,
)

WORKERS = frozenset({"worker", "prefill", "decode"})
MODEL_OPTIONS = ("--served-model-name", "--model", "--model-path", "--model-name")


def read_seen(raw: Mapping[str, Any]) -> Seen:
    """The graph of this document. Raises `WrongKind` and pydantic's `ValidationError`."""
    graph = read_graph(raw)
    meta, status = graph.metadata, graph.status
    rolling = None if status is None else status.rolling_update
    return Seen(
        name=meta.name or "",
        api_version=graph.api_version,
        resource_version=meta.resource_version or "",
        generation=meta.generation or 0,
        observed=None if status is None else status.observed_generation,
        state="" if status is None else str(status.state),
        components=_with_roles(_components(graph)),
        rolling=rolling is not None and rolling.phase in ("Pending", "InProgress"),
        deleting=meta.deletion_timestamp is not None,
        trouble="" if status is None else _trouble(status.conditions or ()),
    )


def _trouble(conditions: Iterable[Any]) -> str:
    unready = (one for one in conditions if one.type == "Ready" and one.status != "True")
    return next(((one.message or one.reason or "") for one in unready), "")


def _components(graph: Graph) -> tuple[values.GraphComponent, ...]:
    if isinstance(graph, GraphV1Beta1):
        counts = (graph.status and graph.status.components) or {}
        return tuple(_component(n, one, counts.get(one.name)) for n, one in enumerate(graph.spec.components))
    told = (graph.status and graph.status.services) or {}
    return tuple(_service(name, one, told.get(name)) for name, one in graph.spec.services.items())


def _component(n: int, one: Component, status: ComponentStatus | None) -> values.GraphComponent:
    pod = None if one.pod_template is None else one.pod_template.spec
    gpus, claims = _gpus_of_pod(pod)
    words = _words(one.main)
    return values.GraphComponent(
        name=one.name,
        pointer=f"/spec/components/{n}",
        listed=True,
        kind=str(one.type or ""),
        role=None,
        replicas=one.replicas,
        by_adapter=one.scaling_adapter is not None,
        gpus=_per_replica(gpus, one.multinode, status),
        claims=claims,
        model=_model(words, one.model_ref),
        vllm="dynamo.vllm" in words,
        disaggregation=mode_of(words),
        counts=_counts(status),
    )


def _service(name: str, one: Service, status: ComponentStatus | None) -> values.GraphComponent:
    gpus, claims = _gpus_of_service(one.resources)
    if gpus is None:
        main = () if one.main is None else (one.main,)
        gpus = _gpus_of_containers((*main, *(() if one.extra_pod_spec is None else one.extra_pod_spec.containers)))
    words = _words(one.main)
    return values.GraphComponent(
        name=name,
        pointer=f"/spec/services/{name.replace('~', '~0').replace('/', '~1')}",
        listed=False,
        kind=one.sub_component_type or one.component_type or "",
        role=None,
        replicas=one.replicas,
        by_adapter=one.scaling_adapter is not None and bool(one.scaling_adapter.enabled),
        gpus=_per_replica(gpus, one.multinode, status),
        claims=claims or bool(one.extra_pod_spec and getattr(one.extra_pod_spec, "resourceClaims", None)),
        model=_model(words, one.model_ref),
        vllm="dynamo.vllm" in words,
        disaggregation=mode_of(words),
        counts=_counts(status),
    )


# --- roles -----------------------------------------------------------------------------------------


def _with_roles(components: tuple[values.GraphComponent, ...]) -> tuple[values.GraphComponent, ...]:
    workers = [one for one in components if one.kind in WORKERS]
    alone = len(workers) == 1
    return tuple(replace(one, role=_role(one, alone)) if one in workers else one for one in components)


def _role(one: values.GraphComponent, alone: bool) -> Role | None:
    said = one.kind if one.kind != ComponentType.WORKER else one.disaggregation or ""
    name = one.name.lower()
    if said == "prefill" or (not _said_role(said) and "prefill" in name):
        return Role.PREFILL
    if alone and said != "decode":
        return Role.AGGREGATED
    if said == "decode" or "decode" in name or not alone:
        return Role.DECODE
    return Role.AGGREGATED


def _said_role(word: str) -> bool:
    """Whether a word names one of the two roles."""
    return word in ("prefill", "decode")


# --- commands --------------------------------------------------------------------------------------


def _words(main: Container | None) -> tuple[str, ...]:
    """The command, also where it is one string for a shell."""
    if main is None:
        return ()
    return tuple(part for word in (*(main.command or ()), *(main.args or ())) for part in word.split())


def _model(words: Sequence[str], named: ModelRef | None) -> str | None:
    given = (option(words, name) for name in MODEL_OPTIONS)
    return next(filter(None, given), None if named is None else named.name)


# --- GPUs ------------------------------------------------------------------------------------------


def _per_replica(gpus: int | None, multinode: Multinode | None, status: ComponentStatus | None) -> int | None:
    """What the operator says counts for more: it knows resource claims, too."""
    if status is not None and status.gpus_per_replica is not None:
        return status.gpus_per_replica
    return None if gpus is None else gpus * (1 if multinode is None else multinode.node_count)


def _gpus_of_pod(pod: PodSpec | None) -> tuple[int | None, bool]:
    if pod is None:
        return None, False
    return _gpus_of_containers(pod.containers), bool(getattr(pod, "resourceClaims", None))


def _gpus_of_containers(containers: Iterable[Container]) -> int | None:
    found = [
        number
        for container in containers
        if container.resources is not None
        for number in (_gpus({**(container.resources.requests or {}), **(container.resources.limits or {})}),)
        if number is not None
    ]
    return sum(found) if found else None


def _gpus(resources: Mapping[str, Quantity]) -> int | None:
    """Of NVIDIA's device plugin: whole ones, and those of its slices (`nvidia.com/mig-1g.10gb`)."""
    found = [_whole(many) for name, many in resources.items() if name == GPU_RESOURCE or _is_slice(name)]
    known = [number for number in found if number is not None]
    return sum(known) if known else None


def _is_slice(name: str) -> bool:
    return name.startswith("nvidia.com/mig-")


def _gpus_of_service(resources: ServiceResources | None) -> tuple[int | None, bool]:
    if resources is None:
        return None, False
    claims = bool(getattr(resources, "claims", None))
    for item in (resources.limits, resources.requests):
        if item is None:
            continue
        if (number := _whole(item.gpu)) is not None:
            return number, claims
        if (number := _gpus(item.custom or {})) is not None:
            return number, claims
    return None, claims


def _whole(many: Quantity | None) -> int | None:
    """A number of devices; None for what is none."""
    try:
        return None if many is None else int(many)
    except ValueError:
        return None


def _counts(status: ComponentStatus | None) -> Counts | None:
    if status is None:
        return None
    ready = status.ready_replicas if status.ready_replicas is not None else status.available_replicas
    return Counts(status.replicas, status.updated_replicas, ready)
