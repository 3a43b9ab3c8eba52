"""Between the two versions of a graph: `spec.components` of v1beta1, `spec.services` of v1alpha1."""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import BaseModel

from dynamo_local.errors import BadInput
from dynamo_local.kubernetes.model import (
    GPU_RESOURCE,
    MAIN_CONTAINER,
    MODE,
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
    mode_of,
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


# --- notes
# What does not carry over as it is: told for every export and import, so that nothing is lost unseen.


class Kind(enum.StrEnum):
    """What became of it."""

    LEFT_OUT = "left out"
    CHANGED = "changed"
    SECRET = "secret"


class Note(NamedTuple):
    """One line of the list. `where` names the place in what was read: `Decode.ServiceArgs.standby`."""

    kind: Kind
    where: str
    text: str


class NotCarried(BadInput):
    """It cannot be carried over at all; the message has every reason."""

    code = "not_carried"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why one part cannot be carried over, and with it the whole."""

    where: str
    reason: str


def refuse(source: str, refusals: Sequence[Refusal]) -> None:
    """Raise `NotCarried` with all reasons, if there are any."""
    if refusals:
        raise NotCarried("\n".join(f"{source}: {refusal.where}: {refusal.reason}" for refusal in refusals))


def left_out(where: str, reasons: Mapping[str, str], keys: Iterable[str], otherwise: str) -> tuple[Note, ...]:
    """A note for each of these keys, with its own reason or this one."""
    return tuple(Note(Kind.LEFT_OUT, f"{where}.{key}", reasons.get(key, otherwise)) for key in keys)


def unread(model: BaseModel, known: Iterable[str]) -> tuple[str, ...]:
    """Fields that the document gives and nobody here reads, as they are spelt there."""
    fields = type(model).model_fields
    spelt = {name: fields[name].alias or name if name in fields else name for name in model.model_fields_set}
    empty: tuple[object, ...] = (None, [], {}, "")
    given = {name: text for name, text in spelt.items() if getattr(model, name) not in empty}
    return tuple(sorted(text for name, text in given.items() if name not in set(known)))


# --- rules
# What Dynamo's admission webhook asks of a graph beyond its schema, and what its planner needs to find the workers.
#
# Names: with Grove, the operator joins the graph's name and a component's to the names of pods, of which 45
# characters
# may be these. It shortens a graph's name that is too long (PR #12047), and whoever looks for the pods by the name of
# the
# graph no longer finds them; here that is a fault.

NAMES_MAX = 45
COMPONENTS_MAX = 25
LEADER = "-ldr"
"""The longer of the two endings that pods of one replica on several nodes get."""
GRAPH_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
PLANNED = (ComponentType.WORKER, ComponentType.PREFILL, ComponentType.DECODE)


def faults(name: str, components: Sequence[Component]) -> tuple[str, ...]:
    """What the webhook or the planner would refuse of a graph of this name, in words; empty if all is well."""
    found = []
    if not GRAPH_NAME.fullmatch(name):
        found.append(
            f"the graph's name {name!r} must begin with a small letter, and have small letters, digits and '-' only, "
            "at most 63; give another one with --name"
        )
    if not components:
        found.append("a graph must have at least one component")
    if len(components) > COMPONENTS_MAX:
        found.append(f"a graph has at most {COMPONENTS_MAX} components, not {len(components)}")
    counts = Counter(component.name.lower() for component in components)
    found += [
        f"two components are named {key!r}, whatever their case; rename one" for key, n in counts.items() if n > 1
    ]
    planned = any(component.type is ComponentType.PLANNER for component in components)
    for component in components:
        found += _of_component(name, component, planned=planned)
    return tuple(found)


def combined_length(name: str, component: Component) -> int:
    """Characters that the graph's and the component's name take in the names of pods."""
    own = len(component.name)
    return len(name) + own + (own + len(LEADER) if component.multinode is not None else 0)


def _of_component(name: str, component: Component, *, planned: bool) -> list[str]:
    found = []
    length = combined_length(name, component)
    if length > NAMES_MAX:
        found.append(
            f"{component.name}: its name and the graph's take {length} characters in the names of pods, and at most "
            f"{NAMES_MAX} may; shorten {component.name!r}, or the graph's name {name!r} (--name)"
        )
    main = component.main
    words = [] if main is None else [*(main.command or ()), *(main.args or ())]
    if component.type is ComponentType.PREFILL and mode_of(words) != "prefill":  # #13238
        found.append(
            f"{component.name}: its type is prefill, but its command has no {MODE} prefill: it would register as a "
            "decode worker, and no planner would find it"
        )
    if planned and component.type in PLANNED and component.scaling_adapter is None:  # #6491
        found.append(f"{component.name}: there is a planner, but no scaling adapter for it to act on")
    return found
