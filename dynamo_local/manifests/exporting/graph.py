"""A resolved graph as one `DynamoGraphDeployment`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from dynamo_local.config import Config
from dynamo_local.config.loading import HOST, PLANNER
from dynamo_local.core.life.roles import ROLES
from dynamo_local.core.types import GraphSpec, Role, ServiceSpec
from dynamo_local.kubernetes.model import (
    GRAPH_KIND,
    MAIN_CONTAINER,
    V1BETA1,
    Component,
    ComponentType,
    Container,
    EnvVar,
    GraphV1Beta1,
    Metadata,
    PodSpec,
    PodTemplate,
    ScalingAdapter,
)
from dynamo_local.kubernetes.model import (
    GraphSpec as KubernetesSpec,
)
from dynamo_local.kubernetes.program import module_of
from dynamo_local.manifests.exporting.environment import NIXL_HOST, POD_IP, field_variable, pod_variables
from dynamo_local.manifests.exporting.planner import planner_component, rights
from dynamo_local.manifests.exporting.processes import NoProcess, process_of
from dynamo_local.manifests.exporting.resources import container_resources
from dynamo_local.manifests.exporting.words import PodProcess, model_note, pod_process, split, with_mode
from dynamo_local.manifests.notes import Kind, Note, Refusal, left_out, refuse
from dynamo_local.manifests.rules import PLANNED, faults
from dynamo_local.sdk.loader import LoadedGraph
from dynamo_local.sdk.settings import validate_section

TYPES = {
    Role.FRONTEND: ComponentType.FRONTEND,
    Role.PREFILL: ComponentType.PREFILL,
    Role.DECODE: ComponentType.DECODE,
    Role.AGGREGATED: ComponentType.WORKER,
}
_HOST_ONLY = "of this host: its devices, servers and processes"
_NO_SUCH = "there is nothing like it on Kubernetes"
_ARGS = {
    "start_deadline_s": "the operator's startup probe bounds a start",
    "standby": "there are no sleeping workers on Kubernetes",
    "flippable": "workers keep their roles on Kubernetes",
}


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line adds. `planner_image` is None where no planner is wanted."""

    name: str
    image: str
    secret: str
    planner_image: str | None = None


@dataclass(frozen=True, slots=True)
class Exported:
    """The manifest, and what of the configuration does not stand in it as it was."""

    graph: GraphV1Beta1
    notes: tuple[Note, ...]
    beside: tuple[dict[str, Any], ...] = ()
    """Objects that the graph needs: the planner's service account and its rights."""

    def secret_keys(self, secret: str) -> tuple[str, ...]:
        """The keys that are read from this Secret."""
        mains = [component.main for component in self.graph.spec.components]
        variables = [variable for main in mains if main is not None for variable in main.env or ()]
        refs = [variable.value_from.secret_key_ref for variable in variables if variable.value_from is not None]
        return tuple(dict.fromkeys(ref.key for ref in refs if ref is not None and ref.name == secret))


@dataclass(frozen=True, slots=True)
class _Part:
    component: Component | None
    notes: tuple[Note, ...] = ()
    refusal: Refusal | None = None


def graph_name(namespace: str) -> str:
    """The graph's name where nobody gave one: its namespace here, in the letters that names have there."""
    return re.sub(r"[^a-z0-9]+", "-", namespace.lower()).strip("-")


def export(loaded: LoadedGraph, spec: GraphSpec, config: Config, wish: Wish) -> Exported:
    """The manifest of the graph. Raises `NotCarried` with everything that stands against it."""
    router = _router(spec)
    parts = [_part(service, _settings(loaded, service, config), router, config, wish) for service in spec.components]
    refusals = [part.refusal for part in parts if part.refusal is not None]
    components = [part.component for part in parts if part.component is not None]
    notes = [note for part in parts for note in part.notes]
    if wish.planner_image is not None:
        planner, told = planner_component(
            config.service(PLANNER), wish.planner_image, _frontend_service(wish.name, components), _account(wish)
        )
        for component in components:
            if component.type in PLANNED:
                component.scaling_adapter = ScalingAdapter()
        components.append(planner)
        notes += told
    elif PLANNER in config.sections and PLANNER not in loaded.services:
        notes.append(Note(Kind.LEFT_OUT, PLANNER, "no planner was asked for"))
    notes += left_out(HOST, {}, config.sections.get(HOST, {}), _HOST_ONLY)
    refusals += [Refusal(wish.name, fault) for fault in faults(wish.name, components)] if not refusals else []
    refuse(config.source, refusals)
    graph = GraphV1Beta1(
        api_version=V1BETA1,
        kind=GRAPH_KIND,
        metadata=Metadata(name=wish.name),
        spec=KubernetesSpec(components=components),
    )
    beside = () if wish.planner_image is None else rights(_account(wish))
    return Exported(graph, tuple(dict.fromkeys(notes)), beside)


def _account(wish: Wish) -> str:
    return f"{wish.name}-planner"


def _frontend_service(name: str, components: list[Component]) -> str | None:
    """The operator's Service of the frontend; None where there is none."""
    frontends = [component.name for component in components if component.type is ComponentType.FRONTEND]
    return f"{name}-{frontends[0].lower()}" if frontends else None


def _settings(loaded: LoadedGraph, service: ServiceSpec, config: Config) -> Any:
    model = loaded.services[service.name].config_model
    return None if model is None else validate_section(model, f"{config.source}: {service.name}", service.config)


def _part(service: ServiceSpec, settings: Any, router: str | None, config: Config, wish: Wish) -> _Part:
    process = process_of(service, settings, router)
    if isinstance(process, NoProcess):
        if process.refuses:
            return _Part(None, refusal=Refusal(service.name, process.reason))
        return _Part(None, (Note(Kind.LEFT_OUT, service.name, process.reason),))
    notes = [*process.notes, *left_out(f"{service.name}.ServiceArgs", _ARGS, _unread_args(service), _NO_SUCH)]
    if ROLES[service.role].computes:
        words, told, why = with_mode(process.words, service.role, service.name)
        if why is not None:
            return _Part(None, refusal=Refusal(service.name, why))
        process = replace(process, words=words)
        notes += [*told, *model_note(process.model, f"{service.name}.model")]
    elif service.role not in TYPES:
        reason = "neither a frontend nor a worker: the operator has no such component"
        return _Part(None, (Note(Kind.LEFT_OUT, service.name, reason),))
    pod = pod_process(process, service.name, wish.secret)
    variables, told_env = pod_variables(service.envs, f"{service.name}.ServiceArgs.envs", wish.secret)
    name = service.name.replace("_", "-").strip("-")
    if name != service.name:
        notes.append(Note(Kind.CHANGED, service.name, f"named {name!r}: a component's name has no '_' there"))
    return _Part(_component(name, service, pod, variables, wish), (*notes, *pod.notes, *told_env))


def _unread_args(service: ServiceSpec) -> list[str]:
    given = {
        "start_deadline_s": service.start_deadline_s is not None,
        "standby": service.standby is not None,
        "flippable": not service.flippable,
    }
    return [name for name, there in given.items() if there]


def _router(spec: GraphSpec) -> str | None:
    """How this graph's own Processor or Router picks workers; None where nothing says so."""
    for service in spec.components:
        if service.runtime is None and service.config.get("router") is not None:
            return str(service.config["router"])
    return None


def _component(name: str, service: ServiceSpec, pod: PodProcess, variables: list[EnvVar], wish: Wish) -> Component:
    command, args = split(pod.words)
    container = Container(name=MAIN_CONTAINER, image=wish.image, command=command, args=args)
    own = {variable.name: variable for variable in (*variables, *pod.env)}  # `env A=b` wins, as here
    if service.role in (Role.PREFILL, Role.DECODE) and module_of(pod.words) == "dynamo.vllm":
        own.setdefault(NIXL_HOST, field_variable(NIXL_HOST, POD_IP))  # its default is loopback: no peer is there
    env = list(own.values())
    if env:
        container.env = env
    resources = container_resources(service.resources)
    if resources is not None:
        container.resources = resources
    pod_spec = PodSpec(containers=[container])
    if service.drain_deadline_s is not None:
        pod_spec.termination_grace_period_seconds = math.ceil(service.drain_deadline_s)
    template = PodTemplate(spec=pod_spec)
    return Component(name=name, type=TYPES[service.role], replicas=service.workers, pod_template=template)
