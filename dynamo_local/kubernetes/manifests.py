"""Dynamo's `DynamoGraphDeployment` (DGD): the fields that this project reads and writes, and its two versions.

v1beta1 has a list, `spec.components`. v1alpha1 has a map, `spec.services`. `read_graph` tells them apart. Fields that
are not named here are kept, so a document may be read, changed and written. `document` writes it, without unset fields.
"""

from __future__ import annotations

import enum
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator
from pydantic.alias_generators import to_camel

from dynamo_local.errors import BadInput

GROUP = "nvidia.com"
V1ALPHA1: Literal["nvidia.com/v1alpha1"] = "nvidia.com/v1alpha1"
V1BETA1: Literal["nvidia.com/v1beta1"] = "nvidia.com/v1beta1"
GRAPH_KIND: Literal["DynamoGraphDeployment"] = "DynamoGraphDeployment"
GRAPH_PLURAL = "dynamographdeployments"
ADAPTER_PLURAL = "dynamographdeploymentscalingadapters"
METADATA_PLURAL = "dynamoworkermetadatas"
"""The workers' own descriptions, if Dynamo discovers them by Kubernetes. v1alpha1 only."""
MAIN_CONTAINER = "main"
"""The container of a component's pod that the operator completes and that runs its command."""
GPU_RESOURCE = "nvidia.com/gpu"

ComponentName = Annotated[
    str, StringConstraints(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?$")
]
Replicas = Annotated[int, Field(ge=0, le=2**31 - 1)]
Quantity = int | str
"""`1`, `"500m"`, `"2Gi"`."""


class ComponentType(StrEnum):
    """A component's purpose (v1beta1: `type`)."""

    FRONTEND = "frontend"
    WORKER = "worker"
    PREFILL = "prefill"
    DECODE = "decode"
    PLANNER = "planner"
    EPP = "epp"


class GraphState(StrEnum):
    """`status.state` of a graph."""

    INITIALIZING = "initializing"
    PENDING = "pending"
    SUCCESSFUL = "successful"
    FAILED = "failed"


class Model(BaseModel):
    """Fields in Python names, with camel case in a document. Unknown fields are kept."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="allow")


def document(model: Model) -> dict[str, Any]:
    """The document form: only fields that were set, in the spelling of Kubernetes."""
    return model.model_dump(mode="json", by_alias=True, exclude_unset=True)


class Metadata(Model):
    """An object's metadata. The server fills in all but the first four."""

    name: str | None = None
    namespace: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    uid: str | None = None
    resource_version: str | None = None
    generation: int | None = None
    deletion_timestamp: str | None = None


class Condition(Model):
    """One of `status.conditions`."""

    type: str
    status: str
    reason: str | None = None
    message: str | None = None
    observed_generation: int | None = None


class KeyRef(Model):
    """A key of a Secret or ConfigMap."""

    name: str = ""
    key: str
    optional: bool | None = None


class ValueFrom(Model):
    """The source of a variable's value."""

    secret_key_ref: KeyRef | None = None
    config_map_key_ref: KeyRef | None = None


class EnvVar(Model):
    """A variable of a container."""

    name: str
    value: str | None = None
    value_from: ValueFrom | None = None


class NamedRef(Model):
    """A whole Secret or ConfigMap."""

    name: str = ""
    optional: bool | None = None


class EnvFrom(Model):
    """All keys of a Secret or ConfigMap as variables."""

    prefix: str | None = None
    secret_ref: NamedRef | None = None
    config_map_ref: NamedRef | None = None


class Resources(Model):
    """A container's resources, as Kubernetes has them: `limits: {nvidia.com/gpu: "1"}`."""

    limits: dict[str, Quantity] | None = None
    requests: dict[str, Quantity] | None = None


class Container(Model):
    """One process of a pod. In v1alpha1 the main one has no name."""

    name: str | None = None
    image: str | None = None
    command: list[str] | None = None
    args: list[str] | None = None
    env: list[EnvVar] | None = None
    env_from: list[EnvFrom] | None = None
    resources: Resources | None = None


class PodSpec(Model):
    """The processes of a pod."""

    containers: list[Container] = []
    service_account_name: str | None = None
    termination_grace_period_seconds: int | None = None


class PodTemplate(Model):
    """The pods of a v1beta1 component."""

    metadata: Metadata | None = None
    spec: PodSpec | None = None


class Multinode(Model):
    """One replica spans this many nodes, with the resources of a pod on each."""

    node_count: Annotated[int, Field(ge=2)] = 2


class ModelRef(Model):
    """The model that a component serves."""

    name: Annotated[str, Field(min_length=1)]
    revision: str | None = None


class ScalingAdapter(Model):
    """Its presence (v1beta1), or `enabled` (v1alpha1), makes the operator create an adapter for the component."""

    enabled: bool | None = None


class Component(Model):
    """One of `spec.components` of v1beta1."""

    name: ComponentName
    type: ComponentType | None = None
    replicas: Replicas | None = None
    pod_template: PodTemplate | None = None
    model_ref: ModelRef | None = None
    multinode: Multinode | None = None
    scaling_adapter: ScalingAdapter | None = None
    shared_memory_size: Quantity | None = None
    frontend_sidecar: str | None = None
    global_dynamo_namespace: bool | None = None

    @property
    def main(self) -> Container | None:
        """The container that runs the component's command."""
        spec = None if self.pod_template is None else self.pod_template.spec
        return None if spec is None else next((one for one in spec.containers if one.name == MAIN_CONTAINER), None)


class GraphSpec(Model):
    """`spec` of v1beta1."""

    annotations: dict[str, str] | None = None
    labels: dict[str, str] | None = None
    backend_framework: Literal["sglang", "vllm", "trtllm"] | None = None
    env: list[EnvVar] | None = None
    components: Annotated[list[Component], Field(max_length=25)] = []

    @field_validator("components")
    @classmethod
    def _unique(cls, components: list[Component]) -> list[Component]:
        counts = Counter(component.name.lower() for component in components)
        twice = sorted({one.name for one in components if counts[one.name.lower()] > 1})
        if twice:
            raise ValueError(f"component names must be unique, whatever their case: {', '.join(twice)}")
        if sum(component.type is ComponentType.EPP for component in components) > 1:
            raise ValueError("at most one component may have type epp")
        return components


class ComponentStatus(Model):
    """The operator's status of one component: in `status.components`, or in `status.services` of v1alpha1.

    `ready_replicas` and `available_replicas` are missing if the kind of workload does not count them. Operators that
    know the devices of a replica, also by resource claims (DRA), say so in `gpus_per_replica`.
    """

    component_kind: str | None = None
    replicas: Replicas = 0
    updated_replicas: Replicas = 0
    ready_replicas: Replicas | None = None
    available_replicas: Replicas | None = None
    gpus_per_replica: Replicas | None = None


class RollingUpdate(Model):
    """A rollout of new worker pods beside the old ones."""

    phase: Literal["Pending", "InProgress", "Completed", "Failed", ""] | None = None


class GraphStatus(Model):
    """`status`, which only the operator writes."""

    state: GraphState = GraphState.INITIALIZING
    observed_generation: int | None = None
    conditions: list[Condition] | None = None
    components: dict[str, ComponentStatus] | None = None
    rolling_update: RollingUpdate | None = None


class GraphV1Beta1(Model):
    """A DynamoGraphDeployment with `spec.components`."""

    api_version: Literal["nvidia.com/v1beta1"] = V1BETA1
    kind: Literal["DynamoGraphDeployment"] = GRAPH_KIND
    metadata: Metadata = Field(default_factory=Metadata)
    spec: GraphSpec = Field(default_factory=GraphSpec)
    status: GraphStatus | None = None


class ServiceResourceItem(Model):
    """`limits` or `requests` of a service."""

    cpu: str | None = None
    memory: str | None = None
    gpu: str | None = None
    gpu_type: str | None = None
    custom: dict[str, str] | None = None


class ServiceResources(Model):
    """A service's resources, named differently from those of a container."""

    limits: ServiceResourceItem | None = None
    requests: ServiceResourceItem | None = None


class ExtraPodSpec(PodSpec):
    """The pods of a service: a pod's spec, with its main container apart."""

    main_container: Container | None = None


class SharedMemory(Model):
    """Size of /dev/shm."""

    disabled: bool | None = None
    size: Quantity | None = None


class Service(Model):
    """One of `spec.services` of v1alpha1."""

    component_type: str | None = None
    sub_component_type: str | None = None
    service_name: str | None = None
    dynamo_namespace: str | None = None
    global_dynamo_namespace: bool | None = None
    replicas: Replicas | None = None
    resources: ServiceResources | None = None
    envs: list[EnvVar] | None = None
    env_from_secret: str | None = None
    extra_pod_spec: ExtraPodSpec | None = None
    model_ref: ModelRef | None = None
    multinode: Multinode | None = None
    scaling_adapter: ScalingAdapter | None = None
    shared_memory: SharedMemory | None = None

    @property
    def main(self) -> Container | None:
        """The container that runs the service's command."""
        return None if self.extra_pod_spec is None else self.extra_pod_spec.main_container


class GraphSpecV1Alpha1(Model):
    """`spec` of v1alpha1."""

    annotations: dict[str, str] | None = None
    labels: dict[str, str] | None = None
    backend_framework: Literal["sglang", "vllm", "trtllm"] | None = None
    envs: list[EnvVar] | None = None
    services: dict[str, Service] = {}


class GraphStatusV1Alpha1(Model):
    """`status` of v1alpha1."""

    state: GraphState = GraphState.INITIALIZING
    observed_generation: int | None = None
    conditions: list[Condition] | None = None
    services: dict[str, ComponentStatus] | None = None
    rolling_update: RollingUpdate | None = None


class GraphV1Alpha1(Model):
    """A DynamoGraphDeployment with `spec.services`."""

    api_version: Literal["nvidia.com/v1alpha1"] = V1ALPHA1
    kind: Literal["DynamoGraphDeployment"] = GRAPH_KIND
    metadata: Metadata = Field(default_factory=Metadata)
    spec: GraphSpecV1Alpha1 = Field(default_factory=GraphSpecV1Alpha1)
    status: GraphStatusV1Alpha1 | None = None


Graph = GraphV1Beta1 | GraphV1Alpha1


class WrongKind(ValueError):
    """The document is no DynamoGraphDeployment, or has an unknown version."""


def read_graph(raw: Mapping[str, Any]) -> Graph:
    """The graph of this document. Raises `WrongKind`, and pydantic's `ValidationError`, which names the fields."""
    kind, version = raw.get("kind"), raw.get("apiVersion")
    if kind != GRAPH_KIND:
        raise WrongKind(f"kind is {kind!r}, not {GRAPH_KIND!r}")
    if version == V1BETA1:
        return GraphV1Beta1.model_validate(raw)
    if version == V1ALPHA1:
        return GraphV1Alpha1.model_validate(raw)
    raise WrongKind(f"apiVersion is {version!r}; known are {V1BETA1!r} and {V1ALPHA1!r}")


def adapter_name(graph: str, component: str) -> str:
    """The operator's name of a component's adapter, in lower case."""
    return f"{graph}-{component.lower()}"


MODE = "--disaggregation-mode"
OLD_MODES = {"--is-prefill-worker": "prefill", "--is-decode-worker": "decode"}
"""Before 1.1. Some versions take both."""
MODELS = ("--model", "--model-path")
WORKERS = ("dynamo.vllm", "dynamo.mocker", "dynamo.sglang", "dynamo.trtllm")
FRONTEND = "dynamo.frontend"
_PYTHON = re.compile(r"(?:.*/)?python(?:3(?:\.\d+)?)?")


def is_python(program: str) -> bool:
    """`python`, `python3`, `/opt/venv/bin/python3.12`."""
    return _PYTHON.fullmatch(program) is not None


def module_of(words: Sequence[str]) -> str | None:
    """`dynamo.vllm` for `python3 -m dynamo.vllm …`. None for another program."""
    if len(words) >= 3 and is_python(words[0]) and words[1] == "-m":
        return words[2]
    return None


def option(words: Sequence[str], *names: str) -> str | None:
    """The value of the last of these options, as one word (`--a=b`) or as two."""
    value = None
    for at, word in enumerate(words):
        name, equals, rest = word.partition("=")
        if name in names:
            value = rest if equals else words[at + 1] if at + 1 < len(words) else None
    return value


def mode_of(words: Sequence[str]) -> str | None:
    """The mode in the command: `prefill`, `decode`, `agg`, … None without one."""
    return option(words, MODE) or next((mode for flag, mode in OLD_MODES.items() if flag in words), None)


def without(words: Sequence[str], *names: str) -> tuple[str, ...]:
    """The words without these options and their values."""
    kept: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in names:
            skip = True
        elif word.partition("=")[0] not in names:
            kept.append(word)
    return tuple(kept)


def without_env(words: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """`env A=b program …` as the program's words, and the variables before them."""
    if words[0].rpartition("/")[2] != "env":
        return tuple(words), {}
    set_here = tuple(itertools.takewhile(lambda word: "=" in word, words[1:]))
    rest = tuple(words[1 + len(set_here) :])
    if not rest or rest[0].startswith("-"):  # `env -u NAME …`: only env knows its own options
        return tuple(words), {}
    return rest, {name: value for name, _, value in (word.partition("=") for word in set_here)}


SIDECAR = "frontendSidecar"
_SUB_TYPES = (ComponentType.PREFILL, ComponentType.DECODE)
_OWN_RESOURCES = {"cpu": "cpu", "memory": "memory", GPU_RESOURCE: "gpu"}


def as_v1alpha1(graph: GraphV1Beta1) -> GraphV1Alpha1:
    """The same graph with `spec.services`, for operators before 1.2. `export` has made it."""
    services = {component.name: _service(component) for component in graph.spec.components}
    return GraphV1Alpha1(
        api_version=V1ALPHA1, kind=graph.kind, metadata=graph.metadata, spec=GraphSpecV1Alpha1(services=services)
    )


def components_of(graph: Graph) -> tuple[Component, ...]:
    """The components of either version, in the form of v1beta1. Unnamed fields stay in their place.

    Raises pydantic's `ValidationError` for a service that could be no component.
    """
    if isinstance(graph, GraphV1Beta1):
        return tuple(graph.spec.components)
    return tuple(_component(name, service) for name, service in graph.spec.services.items())


def variables_of(graph: Graph) -> tuple[EnvVar, ...]:
    """The environment of all components."""
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
    if (
        rest.pop(SIDECAR, None) is not None
    ):  # a container of its own here, the name of one of the pod's containers there
        own["frontend_sidecar"] = SIDECAR
    # A field of v1beta1 has no meaning in a document of v1alpha1. It must be reported, not read.
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


# Every export and import lists what does not carry over unchanged.


class Kind(enum.StrEnum):
    """The kind of a note."""

    LEFT_OUT = "left out"
    CHANGED = "changed"
    SECRET = "secret"


class Note(NamedTuple):
    """One line of the list. `where` names the place in the input: `Decode.ServiceArgs.standby`."""

    kind: Kind
    where: str
    text: str


class NotCarried(BadInput):
    """The graph cannot be carried over. The message has every reason."""

    code = "not_carried"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why one part, and with it the whole, cannot be carried over."""

    where: str
    reason: str


def refuse(source: str, refusals: Sequence[Refusal]) -> None:
    """Raise `NotCarried` with all reasons, if there are any."""
    if refusals:
        raise NotCarried("\n".join(f"{source}: {refusal.where}: {refusal.reason}" for refusal in refusals))


def left_out(where: str, reasons: Mapping[str, str], keys: Iterable[str], otherwise: str) -> tuple[Note, ...]:
    """A note for each of these keys, with its own reason or the common one."""
    return tuple(Note(Kind.LEFT_OUT, f"{where}.{key}", reasons.get(key, otherwise)) for key in keys)


def unread(model: BaseModel, known: Iterable[str]) -> tuple[str, ...]:
    """Fields of the document that nobody here reads, in its own spelling."""
    fields = type(model).model_fields
    spelt = {name: fields[name].alias or name if name in fields else name for name in model.model_fields_set}
    empty: tuple[object, ...] = (None, [], {}, "")
    given = {name: text for name, text in spelt.items() if getattr(model, name) not in empty}
    return tuple(sorted(text for name, text in given.items() if name not in set(known)))


# Dynamo's admission webhook checks more than the schema, and its planner must find the workers. With Grove the operator
# joins the graph's name and a component's name in the names of pods, which have 45 characters for both. It shortens a
# longer graph's name (Dynamo PR #12047). Readers that look for the pods by the graph's name then do not find them, so
# this is a fault here.

NAMES_MAX = 45
COMPONENTS_MAX = 25
LEADER = "-ldr"
"""The longer of the two endings that pods of one replica on several nodes get."""
GRAPH_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
PLANNED = (ComponentType.WORKER, ComponentType.PREFILL, ComponentType.DECODE)


def faults(name: str, components: Sequence[Component]) -> tuple[str, ...]:
    """The faults that the webhook or the planner would find in a graph of this name. Empty if all is well."""
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
    """Characters that the names of graph and component take in the names of pods."""
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
    if component.type is ComponentType.PREFILL and mode_of(words) != "prefill":  # Dynamo #13238
        found.append(
            f"{component.name}: its type is prefill, but its command has no {MODE} prefill: it would register as a "
            "decode worker, and no planner would find it"
        )
    if planned and component.type in PLANNED and component.scaling_adapter is None:  # Dynamo #6491
        found.append(f"{component.name}: there is a planner, but no scaling adapter for it to act on")
    return found
