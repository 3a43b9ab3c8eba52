"""One component of a graph as one section of a configuration, or why it cannot be."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dynamo_local.commands.launching import DYNAMO_1X
from dynamo_local.core.types import Role
from dynamo_local.kubernetes.model import (
    GPU_RESOURCE,
    MAIN_CONTAINER,
    Component,
    ComponentType,
    Container,
    EnvVar,
    PodSpec,
    Quantity,
    Resources,
)
from dynamo_local.kubernetes.program import FRONTEND, WORKERS, mode_of, module_of, without_env
from dynamo_local.manifests.importing.documents import Documents
from dynamo_local.manifests.importing.environment import host_variables
from dynamo_local.manifests.importing.words import CannotRun, HostCommand, host_command
from dynamo_local.manifests.notes import Kind, Note, Refusal, left_out, unread
from dynamo_local.sdk.checks import RESERVED_SECTIONS, check_service_name, parse_resources

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
