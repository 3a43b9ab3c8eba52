"""A resolved graph as one `DynamoGraphDeployment`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dynamo_local.config.loading import HOST, PLANNER, Config
from dynamo_local.config.planner import BY_TARGETS
from dynamo_local.config.planner_section import chosen_policy
from dynamo_local.core.fleet.states import ROLES
from dynamo_local.core.types import GraphSpec, Role, ServiceSpec
from dynamo_local.core.types import Resources as Wanted
from dynamo_local.kubernetes.export_processes import (
    NIXL_HOST,
    POD_IP,
    NoProcess,
    PodProcess,
    field_variable,
    model_note,
    pod_process,
    pod_variables,
    process_of,
    split,
    with_mode,
)
from dynamo_local.kubernetes.manifests import PLANNED, Kind, Note, Refusal, faults, left_out, refuse
from dynamo_local.kubernetes.model import (
    GPU_RESOURCE,
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
    Resources,
    ScalingAdapter,
    module_of,
)
from dynamo_local.kubernetes.model import GraphSpec as KubernetesSpec
from dynamo_local.sdk.loader import LoadedGraph
from dynamo_local.sdk.settings import validate_section

# --- planner
# The planner of a host as a component of the graph: the same policy and options, in a pod of its own.

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


# --- resources
# What a worker asks of its host, as what a container asks of a node.

_MEMORY = re.compile(r"(?P<number>[\d.]+)(?P<unit>[EPTGMKk]?i?)B?")


def container_resources(wanted: Wanted) -> Resources | None:
    """GPUs as limits (they cannot be shared), CPUs and memory as requests; None where nothing is asked for."""
    requests = {"cpu": wanted.cpu, "memory": None if wanted.memory is None else quantity(wanted.memory)}
    asked = {name: value for name, value in requests.items() if value is not None}
    found = Resources()
    if wanted.gpu:
        found.limits = {GPU_RESOURCE: str(wanted.gpu)}
    if asked:
        found.requests = dict(asked)
    return found if found.model_fields_set else None


def quantity(memory: str) -> str:
    """`20GiB`, `20GB`, `20K` as Kubernetes writes them: `20Gi`, `20G`, `20k`."""
    matched = _MEMORY.fullmatch(memory)
    if matched is None:
        return memory
    unit = matched["unit"]
    return matched["number"] + ("k" if unit == "K" else "Ki" if unit == "ki" else unit)


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
