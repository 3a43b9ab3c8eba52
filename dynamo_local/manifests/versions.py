"""Between the two versions of a graph: `spec.components` of v1beta1, `spec.services` of v1alpha1."""

from __future__ import annotations

from typing import Any

from dynamo_local.kubernetes.model import (
    GPU_RESOURCE,
    MAIN_CONTAINER,
    V1ALPHA1,
    Component,
    ComponentType,
    Container,
    EnvFrom,
    EnvVar,
    ExtraPodSpec,
    Graph,
    GraphSpecV1Alpha1,
    GraphV1Alpha1,
    GraphV1Beta1,
    NamedRef,
    PodSpec,
    PodTemplate,
    Quantity,
    Resources,
    ScalingAdapter,
    Service,
    ServiceResourceItem,
    ServiceResources,
)

SIDECAR = "frontendSidecar"
_SUB_TYPES = (ComponentType.PREFILL, ComponentType.DECODE)
_OWN_RESOURCES = {"cpu": "cpu", "memory": "memory", GPU_RESOURCE: "gpu"}


def as_v1alpha1(graph: GraphV1Beta1) -> GraphV1Alpha1:
    """The same graph with `spec.services`, for operators before 1.2. It is one that `export` has made."""
    services = {component.name: _service(component) for component in graph.spec.components}
    return GraphV1Alpha1(
        api_version=V1ALPHA1, kind=graph.kind, metadata=graph.metadata, spec=GraphSpecV1Alpha1(services=services)
    )


def components_of(graph: Graph) -> tuple[Component, ...]:
    """The components of either version, as v1beta1 has them; fields without a name here stay where they were.

    Raises pydantic's `ValidationError` for a service that could be no component.
    """
    if isinstance(graph, GraphV1Beta1):
        return tuple(graph.spec.components)
    return tuple(_component(name, service) for name, service in graph.spec.services.items())


def variables_of(graph: Graph) -> tuple[EnvVar, ...]:
    """Those of all components."""
    return tuple((graph.spec.env if isinstance(graph, GraphV1Beta1) else graph.spec.envs) or ())


def _service(component: Component) -> Service:
    service = Service(replicas=component.replicas)
    if component.type in _SUB_TYPES:
        service.component_type, service.sub_component_type = "worker", str(component.type)
    elif component.type is not None:
        service.component_type = str(component.type)
    if component.scaling_adapter is not None:
        service.scaling_adapter = ScalingAdapter(enabled=True)
    main, pod = component.main, component.pod_template.spec if component.pod_template is not None else None
    if main is None or pod is None:
        return service
    if main.resources is not None:
        service.resources = _service_resources(main.resources)
    if main.env:
        service.envs = main.env
    service.extra_pod_spec = ExtraPodSpec(
        main_container=main.model_copy(update={"name": None, "resources": None, "env": None})
    )
    for field in ("name", "resources", "env"):
        service.extra_pod_spec.main_container.model_fields_set.discard(field)  # type: ignore[union-attr]
    if pod.termination_grace_period_seconds is not None:
        service.extra_pod_spec.termination_grace_period_seconds = pod.termination_grace_period_seconds
    return service


def _service_resources(resources: Resources) -> ServiceResources:
    found = ServiceResources()
    if resources.limits is not None:
        found.limits = _item(resources.limits)
    if resources.requests is not None:
        found.requests = _item(resources.requests)
    return found


def _item(amounts: dict[str, Quantity]) -> ServiceResourceItem:
    own = {_OWN_RESOURCES[name]: str(amount) for name, amount in amounts.items() if name in _OWN_RESOURCES}
    custom = {name: str(amount) for name, amount in amounts.items() if name not in _OWN_RESOURCES}
    return ServiceResourceItem.model_validate({**own, **({"custom": custom} if custom else {})})


def _component(name: str, service: Service) -> Component:
    own: dict[str, Any] = {"name": name}
    kind = service.sub_component_type or service.component_type
    if kind in set(ComponentType):
        own["type"] = kind
    for field in ("replicas", "multinode", "model_ref"):
        if getattr(service, field) is not None:
            own[field] = getattr(service, field)
    if service.scaling_adapter is not None and service.scaling_adapter.enabled:
        own["scaling_adapter"] = ScalingAdapter()
    if service.shared_memory is not None and service.shared_memory.size is not None:
        own["shared_memory_size"] = service.shared_memory.size
    own["pod_template"] = PodTemplate(spec=_pod(service))
    rest = dict(service.model_extra or {})
    if rest.pop(SIDECAR, None) is not None:  # here a container of its own; there the name of one of the pod's
        own["frontend_sidecar"] = SIDECAR
    # A field of v1beta1 in a document of v1alpha1 means nothing there; it must be told, and not be taken for one.
    fields = {*Component.model_fields, *(field.alias for field in Component.model_fields.values())}
    return Component(**own, **{f"{key} (of v1beta1)" if key in fields else key: value for key, value in rest.items()})


def _pod(service: Service) -> PodSpec:
    given = service.extra_pod_spec or ExtraPodSpec()
    main = given.main_container or Container()
    container = main.model_copy(update={"name": MAIN_CONTAINER})
    if service.envs:
        container.env = [*(main.env or ()), *service.envs]
    if service.env_from_secret is not None:
        container.env_from = [*(main.env_from or ()), EnvFrom(secret_ref=NamedRef(name=service.env_from_secret))]
    if service.resources is not None:
        container.resources = Resources(
            limits=_amounts(service.resources.limits), requests=_amounts(service.resources.requests)
        )
    values = {name: getattr(given, name) for name in given.model_fields_set if name != "main_container"}
    return PodSpec(**{**values, "containers": [container, *given.containers]})


def _amounts(item: ServiceResourceItem | None) -> dict[str, Quantity] | None:
    if item is None:
        return None
    own = {kind: getattr(item, field) for kind, field in _OWN_RESOURCES.items()}
    found: dict[str, Quantity] = {kind: amount for kind, amount in own.items() if amount is not None}
    if item.gpu_type and GPU_RESOURCE in found:
        found[item.gpu_type] = found.pop(GPU_RESOURCE)
    return {**found, **(item.custom or {})} or None
