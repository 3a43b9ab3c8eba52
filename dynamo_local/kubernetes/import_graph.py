"""A whole graph as the sections of a configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from dynamo_local.components.commands.graph import with_commands
from dynamo_local.components.commands.launch import DYNAMO_1X
from dynamo_local.config import resolve
from dynamo_local.config.loading import COMMON, HOST, PLANNER, SERVICE_ARGS, Config, normalise
from dynamo_local.config.planner import BY_TARGETS, known_names
from dynamo_local.config.planner_section import chosen_policy, planner_section
from dynamo_local.core.types import Role
from dynamo_local.errors import ConfigError
from dynamo_local.kubernetes.export import MODULE, NAME
from dynamo_local.kubernetes.import_words import (
    CannotRun,
    Documents,
    HostCommand,
    host_command,
    host_variables,
    pod_words,
)
from dynamo_local.kubernetes.manifests import Kind, Note, Refusal, components_of, left_out, refuse, unread, variables_of
from dynamo_local.kubernetes.model import (
    FRONTEND,
    GPU_RESOURCE,
    MAIN_CONTAINER,
    WORKERS,
    Component,
    ComponentType,
    Container,
    EnvVar,
    Graph,
    GraphV1Beta1,
    PodSpec,
    Quantity,
    Resources,
    mode_of,
    module_of,
    option,
    without_env,
)
from dynamo_local.sdk.checks import RESERVED_SECTIONS, check_service_name, parse_resources
from dynamo_local.sdk.service_config import underscored

# --- components
# One component of a graph as one section of a configuration, or why it cannot be.

_COMPONENT = ("name", "type", "replicas", "pod_template", "model_ref", "scaling_adapter", "multinode", "experimental")
_POD = ("containers", "termination_grace_period_seconds", "resourceClaims")
_CONTAINER = ("name", "image", "command", "args", "env", "env_from", "resources")
_CLUSTER = "of Kubernetes: nothing on one host stands for it"
_REASONS = {
    "sharedMemorySize": "processes of one host share its /dev/shm",
    "workingDir": "commands run in the folder of dynamo serve",
    "volumeMounts": "no volume is mounted here: put the files where the command looks for them",
    "volumes": "no volume is mounted here: put the files where the command looks for them",
    "livenessProbe": "dynamo serve asks Dynamo's processes itself",
    "readinessProbe": "dynamo serve asks Dynamo's processes itself",
    "startupProbe": "dynamo serve asks Dynamo's processes itself",
    "ports": "processes of one host have ports of their own",
    "topologyConstraint": "one host",
}
_EXPERIMENTAL = {
    "gpuMemoryService": "its engines share a GPU's memory by a service of the operator",
    "failover": "it keeps a second engine on the same GPU (failover), which the operator arranges",
    "checkpoint": "its pods start from a checkpoint, which the operator restores",
}
_MULTIMODAL = re.compile(r"--multimodal-[a-z-]*(worker|processor)")
_DEVICE = re.compile(r"/.*(gpu|mig-|xe)|gpu.*/", re.IGNORECASE)
_MODES = {"prefill": Role.PREFILL, "decode": Role.DECODE, "agg": Role.AGGREGATED, "aggregated": Role.AGGREGATED}


@dataclass(frozen=True, slots=True)
class Section:
    """Of a configuration: name and keys; `model` stands apart, so that one can be common to all."""

    name: str
    keys: Mapping[str, Any]
    args: Mapping[str, Any]
    model: str | None = None
    passed: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()


def section_of(
    component: Component, of_all: Iterable[EnvVar], documents: Documents, *, disaggregated: bool
) -> Section | Refusal | Note:
    """The section, the reason against the whole, or why this component alone is left out."""
    name = component.name
    why = _impossible(component)
    if why is not None:
        return Refusal(name, why)
    if component.replicas == 0:
        return Note(Kind.LEFT_OUT, name, "it has 0 replicas, and a component here has one worker at least")
    main, pod = component.main, component.pod_template.spec if component.pod_template is not None else None
    if main is None or pod is None:
        main, pod = Container(), PodSpec()
    variables = host_variables(of_all, main, name, documents)
    try:
        command = host_command(component, main, variables, disaggregated=disaggregated)
        role = _role(component, command, disaggregated=disaggregated)
        resources = _resources(main.resources, (component.model_extra or {}).get("device"))
    except CannotRun as error:
        return Refusal(name, str(error))
    keys: dict[str, Any] = {"command": list(command.words), "role": str(role), "runtime": DYNAMO_1X}
    if command.ports:
        keys["ports"] = dict(command.ports)
    args, told = _args(component, pod, role)
    if resources:
        args["resources"] = resources
    if variables.envs:
        args["envs"] = variables.envs
    if command.model is not None and command.model.startswith("/"):
        text = f"{command.model} is a folder of its pod: have the model there, too, or name another one"
        told = (*told, Note(Kind.CHANGED, f"{name}.model", text))
    notes = (*variables.notes, *command.notes, *told, *_unread(component, pod, main))
    return Section(name, keys, args, command.model, tuple(variables.passed), notes)


def _impossible(component: Component) -> str | None:
    """Why the component cannot run on one host, or not under its name; None if it can."""
    extra = component.model_extra or {}
    experimental = extra.get("experimental") or {key: extra[key] for key in _EXPERIMENTAL if extra.get(key)}
    if component.type is ComponentType.EPP or str(extra.get("componentType", "")) == "epp":
        return "an endpoint picker belongs to a gateway of Kubernetes, which routes in place of a frontend"
    if component.frontend_sidecar is not None or _frontend_beside(component):
        return "its frontend is a sidecar that takes what a gateway of Kubernetes has routed to its pod"
    if component.multinode is not None and component.multinode.node_count > 1:
        return f"one replica spans {component.multinode.node_count} nodes, and here is one host"
    for key, why in _EXPERIMENTAL.items():
        given = experimental.get(key) if isinstance(experimental, Mapping) else None
        if given is not None and (not isinstance(given, Mapping) or given.get("enabled", True)):
            return why
    pod = component.pod_template.spec if component.pod_template is not None else None
    if pod is not None and (pod.model_extra or {}).get("resourceClaims"):
        return "its devices come from a resource claim (DRA), which only Kubernetes resolves"
    try:
        if component.name in (*RESERVED_SECTIONS, "Planner"):
            raise ValueError(f"{component.name!r} is a section of the configuration")
        check_service_name(component.name)
    except ValueError as error:
        return f"{error}; give the component another name"
    return None


def _frontend_beside(component: Component) -> bool:
    """As manifests had it before there was a field for it: a container beside the main one."""
    pod = component.pod_template.spec if component.pod_template is not None else None
    beside = [] if pod is None else [one for one in pod.containers if one.name != MAIN_CONTAINER]
    return any(module_of([*(one.command or ()), *(one.args or ())]) == FRONTEND for one in beside)


def _role(component: Component, command: HostCommand, *, disaggregated: bool) -> Role:
    words, _ = without_env(command.words)
    module = module_of(words)
    if component.type is ComponentType.FRONTEND or module == FRONTEND:
        if module != FRONTEND:
            raise CannotRun(f"a frontend here is python3 -m {FRONTEND}; it runs {' '.join(words[:3])}")
        return Role.FRONTEND
    if module not in WORKERS:
        raise CannotRun(f"it runs {' '.join(words[:3])}, which is none of Dynamo's workers ({', '.join(WORKERS)})")
    parts = [word for word in words if _MULTIMODAL.fullmatch(word)]
    if parts:
        raise CannotRun(f"it is one part of a multimodal worker ({parts[0]}), and dynamo serve knows no such role")
    said = mode_of(words)
    if said is not None:
        if said not in _MODES:
            raise CannotRun(f"its --disaggregation-mode {said} is unknown to dynamo serve")
        return _MODES[said]
    if component.type is ComponentType.PREFILL:
        raise CannotRun("its type is prefill, but its command has no --disaggregation-mode prefill")
    return Role.DECODE if disaggregated else Role.AGGREGATED


def _args(component: Component, pod: PodSpec, role: Role) -> tuple[dict[str, Any], tuple[Note, ...]]:
    replicas = 1 if component.replicas is None else component.replicas
    notes: tuple[Note, ...] = ()
    if role is Role.FRONTEND and replicas > 1:
        notes = (Note(Kind.CHANGED, component.name, f"one frontend in place of {replicas}: it has one port here"),)
        replicas = 1
    args: dict[str, Any] = {"workers": replicas}
    if pod.termination_grace_period_seconds:
        args["drain-deadline-s"] = pod.termination_grace_period_seconds
    return args, notes


def _resources(given: Resources | None, device: Any) -> dict[str, Any]:
    """GPUs, CPUs and memory of one worker. `device`: what newer operators merge into its resources.

    Raises `CannotRun` for devices that are no whole NVIDIA GPUs.
    """
    given = given or Resources()
    if (given.model_extra or {}).get("claims"):
        raise CannotRun("its devices come from a resource claim (DRA), which only Kubernetes resolves")
    merged = device.get("resources") if isinstance(device, Mapping) else None
    amounts: dict[str, Quantity] = {**(given.requests or {}), **(given.limits or {})}
    amounts |= merged if isinstance(merged, Mapping) else {}
    devices = [name for name in amounts if name != GPU_RESOURCE and _DEVICE.search(name)]
    if devices:
        raise CannotRun(f"it asks for {devices[0]}, and dynamo serve gives whole NVIDIA GPUs only")
    wanted = {"gpu": amounts.get(GPU_RESOURCE), "cpu": amounts.get("cpu"), "memory": amounts.get("memory")}
    found = {key: amount for key, amount in wanted.items() if amount is not None}
    try:
        parsed = parse_resources(found)
    except ValueError as error:
        raise CannotRun(str(error)) from None
    return {**found, **({"gpu": parsed.gpu} if "gpu" in found else {})}


def _unread(component: Component, pod: PodSpec, main: Container) -> Iterable[Note]:
    """A note for each field of component, pod and container that says nothing here."""
    where = component.name
    yield from left_out(where, _REASONS, unread(component, _COMPONENT), _CLUSTER)
    if component.pod_template is not None:
        yield from left_out(f"{where}.podTemplate", _REASONS, unread(component.pod_template, ("spec",)), _CLUSTER)
    yield from left_out(f"{where}.pod", _REASONS, unread(pod, _POD), _CLUSTER)
    yield from left_out(f"{where}.{main.name}", _REASONS, unread(main, _CONTAINER), _CLUSTER)
    more = {
        **((main.resources and main.resources.limits) or {}),
        **((main.resources and main.resources.requests) or {}),
    }
    others = sorted(set(more) - {GPU_RESOURCE, "cpu", "memory"})
    yield from left_out(f"{where}.resources", {}, others, "dynamo serve asks for GPUs, CPUs and memory alone")
    for container in pod.containers:
        if container is not main and container.name != main.name:
            yield Note(Kind.LEFT_OUT, f"{where}.{container.name}", "a sidecar: only the main container runs here")


# --- planner
# A planner's component as the section `Planner`: this project's own, and Dynamo's.

FIRST = "planner_sla"
DYNAMOS = ("dynamo.planner", FIRST)
_OF_THE_CLUSTER = ("environment", "namespace", "config", "frontend", "graph", "kubernetes_namespace", "metrics_port")
_POLICY = "throughput-load"
"""What Dynamo's planner does is this policy, under the same names, and ours does in a pod where none is named; Dynamo's
first one was `sla`."""


def planner_of(component: Component) -> tuple[dict[str, Any] | None, tuple[Note, ...]]:
    """The section, None where it cannot be one, and what was left out of it. A graph can be served without it."""
    try:
        words = pod_words(component.type, component.main or Container())
    except CannotRun as error:
        return None, (Note(Kind.LEFT_OUT, component.name, str(error)),)
    module = module_of(words) or ""
    if module != MODULE and not module.startswith(DYNAMOS):
        return None, (Note(Kind.LEFT_OUT, component.name, f"it runs {' '.join(words[:3])}, which is no planner here"),)
    given, notes = _options(words[3:], component.name)
    section: dict[str, Any] = {}
    if module != MODULE:
        section["policy"] = "sla" if module.endswith(FIRST) else _POLICY
    elif chosen_policy(given) == BY_TARGETS:
        section["policy"] = _POLICY  # unless it is named, below: here targets alone would choose another one
    names = known_names()
    for key, value in given.items():
        where = f"{component.name}.{key}"
        if key in _OF_THE_CLUSTER:
            continue
        if key not in names:
            notes.append(Note(Kind.LEFT_OUT, where, "an option that the planners here do not have"))
        elif key == "profile_results_dir" and "/" in str(value):
            notes.append(
                Note(
                    Kind.LEFT_OUT,
                    where,
                    f"{value} is a folder of its pod; name one of this host, if it plans by a profile",
                )
            )
        else:
            section[key] = value
    try:
        planner_section(NAME, section)
    except ConfigError as error:
        return None, (*notes, Note(Kind.LEFT_OUT, component.name, f"its options do not go together here: {error}"))
    return section, tuple(notes)


def _options(words: Sequence[str], where: str) -> tuple[dict[str, Any], list[Note]]:
    """`--config JSON`, and `--name value` as Dynamo's first planners took them."""
    notes: list[Note] = []
    found: dict[str, Any] = {}
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            behind = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("--") else "true"
            found[underscored(name.removeprefix("--"))] = _value(value if equals else behind)
    text = option(words, "--config")
    if text is None:
        return found, notes
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, Mapping):
        notes.append(Note(Kind.LEFT_OUT, f"{where}.--config", f"{text} is a file of its pod, or no JSON"))
        return found, notes
    return {**found, **{underscored(str(key)): value for key, value in parsed.items()}}, notes


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


_SPEC = ("components", "services", "env", "envs", "backend_framework")


@dataclass(frozen=True, slots=True)
class Imported:
    """`sections` as they are written to a file; `dynamo serve -f` takes them."""

    name: str
    sections: Mapping[str, Mapping[str, Any]]
    notes: tuple[Note, ...]


def import_graph(documents: Documents, source: str) -> Imported:
    """The configuration. Raises `NotCarried` with everything that stands against it."""
    graph = documents.graph
    try:
        components = components_of(graph)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        refuse(source, [Refusal("spec.services", f"{first['input']!r}: {place}: {first['msg']}")])
        raise
    sections, refusals, notes = list[Section](), list[Refusal](), list[Note]()
    planner: dict[str, Any] | None = None
    disaggregated = any(_is_prefill(component) for component in components)
    for component in components:
        if component.type is ComponentType.PLANNER:
            planner, told = planner_of(component)
            notes += told
            continue
        part = section_of(component, variables_of(graph), documents, disaggregated=disaggregated)
        if isinstance(part, Section):
            sections.append(part)
            notes += part.notes
        elif isinstance(part, Refusal):
            refusals.append(part)
        else:
            notes.append(part)
    if not refusals and not sections:
        refusals.append(Refusal(graph.metadata.name or source, "it has no component that can run on this host"))
    refuse(source, refusals)
    found = _sections(sections, planner)
    _check(found, source)
    return Imported(graph.metadata.name or "", found, (*_of_graph(graph, documents, components), *dict.fromkeys(notes)))


def _is_prefill(component: Component) -> bool:
    main = component.main
    words = [] if main is None else [*(main.command or ()), *(main.args or ())]
    return component.type is ComponentType.PREFILL or mode_of(words) == "prefill"


def _sections(parts: Sequence[Section], planner: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """In the order of a file that a person writes: what is common first, the planner last."""
    models = {part.model for part in parts if part.model is not None}
    shared = models.pop() if len(models) == 1 and sum(part.model is not None for part in parts) > 1 else None
    found: dict[str, dict[str, Any]] = {} if shared is None else {COMMON: {"model": shared}}
    passed = sorted({name for part in parts for name in part.passed})
    if passed:
        found[HOST] = {"pass-env": passed}
    for part in parts:
        section = dict(part.keys)
        if part.model is not None:
            section.update({"common-configs": ["model"]} if shared is not None else {"model": part.model})
        found[part.name] = {**section, SERVICE_ARGS: dict(part.args)}
    if planner is not None:
        found[PLANNER] = dict(planner)
    return found


def _check(sections: Mapping[str, Mapping[str, Any]], source: str) -> None:
    """What `dynamo serve` would refuse of it is told now. Raises `NotCarried`."""
    config = Config(sections=normalise(sections, source), source=source)
    try:
        resolve(with_commands(None, config, None), config, namespace=None)
    except ConfigError as error:
        text = str(error).removeprefix(f"{source}: ")
        refuse(source, [Refusal("the configuration that it would be", text)])


def _of_graph(graph: Graph, documents: Documents, components: Sequence[Component]) -> tuple[Note, ...]:
    """What the graph, and the file, have beside its components."""
    images = sorted({one.main.image for one in components if one.main is not None and one.main.image})
    notes = [
        Note(Kind.CHANGED, "image", f"{image}: the Dynamo that is installed beside dynamo serve runs")
        for image in images
    ]
    notes += left_out("spec", {}, unread(graph.spec, _SPEC), "of Kubernetes: nothing on one host stands for it")
    version = "spec.components" if isinstance(graph, GraphV1Beta1) else "spec.services"
    if any(component.scaling_adapter is not None for component in components):
        notes.append(
            Note(Kind.CHANGED, version, "scaling adapters: dynamo scale and the planner scale each component here")
        )
    notes += [Note(Kind.LEFT_OUT, f"{kind} {name}", "another document of the file") for kind, name in documents.others]
    return tuple(notes)
