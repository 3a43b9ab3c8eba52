"""Imports a manifest's graph as the sections of a configuration, whose commands run on one host."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from dynamo_local.components.commands import launch as placeholders
from dynamo_local.components.commands.dynamo_1x_env import HTTP_PORT, OWNED, PORT_VARIABLES
from dynamo_local.components.commands.graph import with_commands
from dynamo_local.components.commands.launch import DYNAMO_1X
from dynamo_local.config import resolve
from dynamo_local.config.loading import COMMON, HOST, PLANNER, SERVICE_ARGS, Config, normalise
from dynamo_local.config.planner import BY_TARGETS, known_names
from dynamo_local.config.planner_section import chosen_policy, planner_section
from dynamo_local.config.yaml_text import manifests
from dynamo_local.core.secrets import allowed_env
from dynamo_local.core.types import Role
from dynamo_local.errors import ConfigError
from dynamo_local.kubernetes.export import MODULE, NAME, NIXL_PORT, OF_THE_HOST, POD_IP, POD_NAME
from dynamo_local.kubernetes.manifests import (
    FRONTEND,
    GPU_RESOURCE,
    GRAPH_KIND,
    MAIN_CONTAINER,
    MODELS,
    WORKERS,
    Component,
    ComponentType,
    Container,
    EnvVar,
    Graph,
    GraphV1Beta1,
    Kind,
    NamedRef,
    Note,
    PodSpec,
    Quantity,
    Refusal,
    Resources,
    WrongKind,
    components_of,
    left_out,
    mode_of,
    module_of,
    option,
    read_graph,
    refuse,
    unread,
    variables_of,
    without,
    without_env,
)
from dynamo_local.sdk.checks import RESERVED_SECTIONS, SET_BY_SERVE, check_service_name, listing, parse_resources
from dynamo_local.sdk.service_config import underscored

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
    """A section of the configuration: name and keys. `model` is separate, so that one can be common to all."""

    name: str
    keys: Mapping[str, Any]
    args: Mapping[str, Any]
    model: str | None = None
    passed: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()


def section_of(
    component: Component, of_all: Iterable[EnvVar], documents: Documents, *, disaggregated: bool
) -> Section | Refusal | Note:
    """The section, a reason against the whole import, or a reason to leave out this component."""
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
    args, more_notes = _args(component, pod, role)
    if resources:
        args["resources"] = resources
    if variables.envs:
        args["envs"] = variables.envs
    if command.model is not None and command.model.startswith("/"):
        text = f"{command.model} is a folder of its pod: have the model there, too, or name another one"
        more_notes = (*more_notes, Note(Kind.CHANGED, f"{name}.model", text))
    notes = (*variables.notes, *command.notes, *more_notes, *_unread(component, pod, main))
    return Section(name, keys, args, command.model, tuple(variables.passed), notes)


def _impossible(component: Component) -> str | None:
    """Why the component cannot run on one host, or not under its name. None if it can."""
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
    """Older manifests have a container beside the main one instead of a field."""
    pod = component.pod_template.spec if component.pod_template is not None else None
    beside = [] if pod is None else [one for one in pod.containers if one.name != MAIN_CONTAINER]
    return any(module_of([*(one.command or ()), *(one.args or ())]) == FRONTEND for one in beside)


def _role(component: Component, command: HostCommand, *, disaggregated: bool) -> Role:
    words, _ = without_env(command.words)
    module = module_of(words)
    if component.type is ComponentType.FRONTEND or module == FRONTEND:
        if module != FRONTEND:
            raise CannotRun(f"a frontend here is python3 -m {FRONTEND}, and this one runs {' '.join(words[:3])}")
        return Role.FRONTEND
    if module not in WORKERS:
        raise CannotRun(f"it runs {' '.join(words[:3])}, which is none of Dynamo's workers ({', '.join(WORKERS)})")
    parts = [word for word in words if _MULTIMODAL.fullmatch(word)]
    if parts:
        raise CannotRun(f"it is one part of a multimodal worker ({parts[0]}), and dynamo serve knows no such role")
    mode = mode_of(words)
    if mode is not None:
        if mode not in _MODES:
            raise CannotRun(f"its --disaggregation-mode {mode} is unknown to dynamo serve")
        return _MODES[mode]
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
    """GPUs, CPUs and memory of one worker. Newer operators merge `device` into its resources.

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
    """A note for each field of component, pod and container that has no meaning here."""
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


FIRST = "planner_sla"
DYNAMOS = ("dynamo.planner", FIRST)
_OF_THE_CLUSTER = ("environment", "namespace", "config", "frontend", "graph", "kubernetes_namespace", "metrics_port")
_POLICY = "throughput-load"
"""Dynamo's planner has this policy, under the same names, and ours has it in a pod by default.

Dynamo's first planner was `sla`.
"""


def planner_of(component: Component) -> tuple[dict[str, Any] | None, tuple[Note, ...]]:
    """The planner's section (None if that is impossible) and the left-out options. A graph can be served without it."""
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
        section["policy"] = _POLICY  # unless it is named below: here targets alone would choose another one
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
    """`--config JSON`, and `--name value` as in Dynamo's first planners."""
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
class ImportResult:
    """The sections of the file for `dynamo serve -f`."""

    name: str
    sections: Mapping[str, Mapping[str, Any]]
    notes: tuple[Note, ...]


def import_graph(documents: Documents, source: str) -> ImportResult:
    """The configuration. Raises `NotCarried` with every reason."""
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
            planner, more_notes = planner_of(component)
            notes += more_notes
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
    return ImportResult(
        graph.metadata.name or "", found, (*_of_graph(graph, documents, components), *dict.fromkeys(notes))
    )


def _is_prefill(component: Component) -> bool:
    main = component.main
    words = [] if main is None else [*(main.command or ()), *(main.args or ())]
    return component.type is ComponentType.PREFILL or mode_of(words) == "prefill"


def _sections(parts: Sequence[Section], planner: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """The order of a file that a person writes: common values first, the planner last."""
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
    """Raise `NotCarried` for everything that `dynamo serve` would refuse."""
    config = Config(sections=normalise(sections, source), source=source)
    try:
        resolve(with_commands(None, config, None), config, namespace=None)
    except ConfigError as error:
        text = str(error).removeprefix(f"{source}: ")
        refuse(source, [Refusal("the configuration that it would be", text)])


def _of_graph(graph: Graph, documents: Documents, components: Sequence[Component]) -> tuple[Note, ...]:
    """The parts of graph and file besides components."""
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


CONFIG_MAP = "ConfigMap"


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of a file: the graph, and other objects. `others` are kind and name, `config_maps` data by name."""

    graph: Graph
    others: tuple[tuple[str, str], ...] = ()
    config_maps: Mapping[str, Mapping[str, str]] | None = None

    def config_value(self, name: str, key: str) -> str | None:
        """A key of a ConfigMap in the same file."""
        return (self.config_maps or {}).get(name, {}).get(key)


def read_documents(text: str, source: str, name: str | None = None) -> Documents:
    """The file's graph, or that of this name among several. Raises `ConfigError`, which names the field."""
    found = _objects([document.value for document in manifests(text, source)], source)
    graphs = {_name(raw): raw for raw in found if raw["kind"] == GRAPH_KIND}
    if name is None and len(graphs) > 1:
        raise ConfigError(f"{source}: it holds the graphs {listing(graphs)}; say --name with one of them")
    if not graphs or (name is not None and name not in graphs):
        there = listing(graphs) if graphs else f"documents of the kinds {listing({raw['kind'] for raw in found})}"
        wanted = "" if name is None else f" {name!r}"
        raise ConfigError(f"{source}: there is no {GRAPH_KIND}{wanted} in it, but {there}")
    chosen = name if name is not None else next(iter(graphs))
    others = tuple((raw["kind"], _name(raw)) for raw in found if raw["kind"] not in (GRAPH_KIND, CONFIG_MAP))
    maps = {_name(raw): raw["data"] for raw in found if raw["kind"] == CONFIG_MAP and isinstance(raw.get("data"), dict)}
    return Documents(_graph(graphs[chosen], source), others, maps)


def _objects(documents: list[Any], source: str) -> list[dict[str, Any]]:
    """Documents with a `kind`. The items of a `List` (`kubectl get … -o yaml`) are objects, too."""
    found = []
    for raw in documents:
        if raw is None:
            continue
        if not isinstance(raw, dict) or not isinstance(raw.get("kind"), str):
            raise ConfigError(f"{source}: it holds a document without `kind`: no manifest of Kubernetes")
        if raw["kind"] == "List" and isinstance(raw.get("items"), list):
            found += _objects(raw["items"], source)
        else:
            found.append(raw)
    return found


def _name(raw: Mapping[str, Any]) -> str:
    metadata = raw.get("metadata")
    return str(metadata.get("name") or "") if isinstance(metadata, dict) else ""


def _graph(raw: Mapping[str, Any], source: str) -> Graph:
    try:
        return read_graph(raw)
    except WrongKind as error:
        raise ConfigError(f"{source}: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        # pydantic inserts names of alternatives between the version's model and the field
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{source}: {place}: {first['msg']}") from None


_REFERENCE = re.compile(r"\$(\$)?\(([A-Za-z_][A-Za-z0-9_.-]*)\)")
_IN_CLUSTER = re.compile(r"\.svc\b")
_SERVERS = ("ETCD_", "NATS_", "KUBERNETES_")
_DISCOVERY = ("DYN_DISCOVERY_BACKEND", "DYN_KUBE_DISCOVERY_MODE", "DYN_STORE_KV")
WATCHER = "{watcher}"
_PER_WORKER = {POD_IP: "127.0.0.1", POD_NAME: WATCHER}


@dataclass(slots=True)
class Variables:
    """The variables of a container as those of a command on this host.

    `envs` belong to the section. `brought` stand before the command, because each worker has its own. `passed` come
    from the shell. `known` are the values of `$(NAME)` in a word.
    """

    envs: dict[str, str] = field(default_factory=dict)
    brought: dict[str, str] = field(default_factory=dict)
    passed: list[str] = field(default_factory=list)
    known: dict[str, str] = field(default_factory=lambda: {"DYN_NAMESPACE": "{namespace}", "POD_NAME": WATCHER})
    http_port: int | None = None
    notes: list[Note] = field(default_factory=list)


def host_variables(of_all: Iterable[EnvVar], container: Container, where: str, documents: Documents) -> Variables:
    """The variables of all components, and the container's own over them."""
    found = Variables()
    merged = {variable.name: variable for variable in (*of_all, *(container.env or ()))}
    for variable in merged.values():
        _take(variable, f"{where}.env.{variable.name}", documents, found)
    for source in container.env_from or ():
        _take_all(source.secret_ref, source.config_map_ref, where, documents, found)
    return found


def expanded(text: str, known: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """`$(NAME)` as Kubernetes fills it in, and the unknown names. `$$(` is `$(`."""
    unknown: list[str] = []

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return match[0][1:]
        if match[2] not in known:
            unknown.append(match[2])
            return match[0]
        return known[match[2]]

    return _REFERENCE.sub(value, text), tuple(unknown)


def _take(variable: EnvVar, where: str, documents: Documents, found: Variables) -> None:
    name, source = variable.name, variable.value_from
    if source is not None and source.secret_key_ref is not None:
        return _pass(
            name, f"the key {source.secret_key_ref.key} of the Secret {source.secret_key_ref.name}", where, found
        )
    value: str | None = variable.value or ""
    if source is not None:
        ref = source.config_map_key_ref
        in_pod = ((source.model_extra or {}).get("fieldRef") or {}).get("fieldPath")
        value = documents.config_value(ref.name, ref.key) if ref is not None else _PER_WORKER.get(str(in_pod))
        if value is None:
            what = f"the key {ref.key} of the ConfigMap {ref.name}, which is not in this file" if ref else in_pod
            found.notes.append(Note(Kind.LEFT_OUT, where, f"its value is {what or 'of the pod'}"))
            return None
    value, unknown = expanded(value or "", found.known)
    if unknown:
        found.notes.append(Note(Kind.LEFT_OUT, where, f"its value needs {', '.join(unknown)}, which is not known here"))
        return None
    found.known[name] = value
    return place(name, value, where, found)


def place(name: str, value: str, where: str, found: Variables) -> None:
    """Put a variable with a value into the section, before the command, or nowhere."""
    if name == PORT_VARIABLES[HTTP_PORT] and value.isdecimal():
        found.http_port = int(value)
    elif name in OWNED or name in SET_BY_SERVE:
        found.notes.append(Note(Kind.LEFT_OUT, where, "dynamo serve sets it, for each worker its own"))
    elif name.startswith(_SERVERS) or _IN_CLUSTER.search(value):
        found.notes.append(Note(Kind.LEFT_OUT, where, f"{value} is a server of the cluster"))
    elif name in OF_THE_HOST:
        found.notes.append(Note(Kind.LEFT_OUT, where, "dynamo serve gives each worker its GPUs"))
    elif name in _DISCOVERY:
        found.notes.append(Note(Kind.LEFT_OUT, where, "the processes of a host find one another by its etcd"))
    elif value == WATCHER:
        found.brought[name] = value
    elif name.endswith("_PORT") and value.isdecimal():
        # Pods may share the value. On one host each worker needs its own.
        found.brought[name] = f"{{port:{name.removesuffix('_PORT').lower().replace('_', '-')}}}"
        found.notes.append(Note(Kind.CHANGED, where, f"any free port for each worker, in place of {value}"))
    else:
        found.envs[name] = value


def _take_all(
    secret: NamedRef | None, config_map: NamedRef | None, where: str, documents: Documents, found: Variables
) -> None:
    """All keys of a Secret or a ConfigMap."""
    from_ = f"{where}.envFrom"
    if secret is not None:
        text = (
            f"all keys of the Secret {secret.name}: export those that are needed before dynamo serve "
            "(HF_* reach the workers, others where Host.pass-env names them)"
        )
        found.notes.append(Note(Kind.SECRET, from_, text))
        return
    name = "" if config_map is None else config_map.name
    data = (documents.config_maps or {}).get(name)
    if data is None:
        found.notes.append(Note(Kind.LEFT_OUT, from_, f"the ConfigMap {name} is not in this file"))
        return
    for key, value in data.items():
        if key not in found.known and isinstance(value, str):
            found.known[key] = value
            place(key, value, f"{from_}.{key}", found)


def _pass(name: str, what: str, where: str, found: Variables) -> None:
    if not allowed_env({name: ""}):
        found.passed.append(name)
    found.notes.append(Note(Kind.SECRET, where, f"{what}: export {name} before dynamo serve"))


_SHELLS = ("sh", "bash", "/bin/sh", "/bin/bash", "/usr/bin/bash")
_OPERATORS = set(";&|<>()`\n")
_ALL_ARGUMENTS = ("$@", "$*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_DISCOVERY_WORDS = ("--store-kv", "--discovery-backend")
_SHELL_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
_BOUND_PORT = re.compile(r"(?<=tcp://\*:)\d+")
_NIXL = "{port:nixl}"


class CannotRun(Exception):
    """The container's command cannot run on this host. The text says why."""


@dataclass(frozen=True, slots=True)
class HostCommand:
    """The words of the section, `env NAME=value` before them included. `model` is the value of `{model}`."""

    words: tuple[str, ...]
    model: str | None = None
    ports: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()


def host_command(
    component: Component, container: Container, variables: Variables, *, disaggregated: bool
) -> HostCommand:
    """The words of its main container. Raises `CannotRun`.

    `disaggregated` says that the graph has prefill workers.
    """
    where, notes = component.name, list[Note]()
    words = pod_words(component.type, container)
    words = _plain(words, variables.known)
    while len(words) > 1 and (assigned := _ASSIGNMENT.fullmatch(words[0])) is not None:  # `A=b python3 …` of a shell
        place(assigned[1], assigned[2], f"{where}.command.{assigned[1]}", variables)
        words = words[1:]
    for name in _DISCOVERY_WORDS:
        if option(words, name) is not None:
            text = "the processes of a host find one another by its etcd"
            notes.append(Note(Kind.LEFT_OUT, f"{where}.{name}", text))
    words = without(words, *_DISCOVERY_WORDS)
    taken = [word for word in words if placeholders.named([word])]
    if taken:
        raise CannotRun(f"its word {taken[0]!r} holds what is a placeholder in a `command:` here")
    words = tuple(_filled(word, variables.known) for word in words)
    brought, ports = dict(variables.brought), dict[str, int]()
    if module_of(words) == FRONTEND:
        words, ports = _listening(words, variables)
    model = option(words, *MODELS)
    if model is not None:
        words = _with_model(words, model)
    words, more_notes = _own_ports(words, where)
    if module_of(words) == "dynamo.vllm" and (disaggregated or "Nixl" in " ".join(words)):
        brought[NIXL_PORT] = _NIXL
        notes.append(
            Note(Kind.CHANGED, where, f"{NIXL_PORT}: any free port for each worker, as NIXL needs on one host")
        )
    if brought:
        words = ("env", *(f"{name}={value}" for name, value in brought.items()), *words)
    return HostCommand(words, model, ports, (*notes, *more_notes))


def pod_words(kind: ComponentType | None, container: Container) -> tuple[str, ...]:
    """Command and arguments, with the operator's defaults. Raises `CannotRun`."""
    command, args = container.command or [], container.args
    if not command and kind is ComponentType.FRONTEND:
        command, args = ["python3"], args if args is not None else ["-m", FRONTEND]
    elif not command and args:
        command = ["/bin/sh", "-c"]
    if not command:
        raise CannotRun("it has no command: what its image starts by itself is not known here")
    return (*command, *(args or ()))


def _plain(words: tuple[str, ...], known: Mapping[str, str]) -> tuple[str, ...]:
    """A shell's single command as its words. A script of several commands cannot be split."""
    if words[0] not in _SHELLS or len(words) < 3 or not words[1].startswith("-") or not words[1].endswith("c"):
        if words[0] in _SHELLS:
            raise CannotRun("its command is a shell script")
        return words
    script = words[2].replace("\\\n", " ").strip()
    script = script.removeprefix("exec ")
    quoted = re.sub(r"'[^']*'|\"[^\"]*\"", "", script)
    if _OPERATORS & set(quoted) or "$(" in script:
        raise CannotRun("its command is a shell script of more than one command; give the program itself")

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in known:
            raise CannotRun(f"its shell script needs ${name}, which is not known here")
        return known[name]

    found: list[str] = []
    try:
        for word in shlex.split(script):
            found += words[4:] if word in _ALL_ARGUMENTS else [_SHELL_VARIABLE.sub(value, word)]
    except ValueError as error:
        raise CannotRun(f"its shell script cannot be split into words: {error}") from None
    return tuple(found)


def _filled(word: str, known: Mapping[str, str]) -> str:
    filled, unknown = expanded(word, known)
    if unknown:
        raise CannotRun(
            f"its word {word!r} needs {', '.join(unknown)}: a secret, or a variable that is not known here; "
            "Dynamo's processes take it from their environment"
        )
    return filled


def _listening(words: tuple[str, ...], variables: Variables) -> tuple[tuple[str, ...], dict[str, int]]:
    """A port is `ports: {http: …}` of the section here. `dynamo serve` says where a frontend listens."""
    port = option(words, "--http-port") or variables.http_port or 8000
    try:
        return without(words, "--http-port", "--http-host"), {"http": int(port)}
    except ValueError:
        raise CannotRun(f"its --http-port {port} is no number") from None


def _with_model(words: Sequence[str], model: str) -> tuple[str, ...]:
    found: list[str] = []
    for at, word in enumerate(words):
        name, equals, _ = word.partition("=")
        if name in MODELS and equals:
            found.append(f"{name}={{model}}")
        elif word == model and at and words[at - 1] in MODELS:
            found.append("{model}")
        else:
            found.append(word)
    return tuple(found)


def _own_ports(words: tuple[str, ...], where: str) -> tuple[tuple[str, ...], tuple[Note, ...]]:
    """Every worker on this host would share the pod's `tcp://*:20080`."""
    notes: list[Note] = []
    names: dict[str, str] = {}

    def placeholder(match: re.Match[str]) -> str:
        name = names.setdefault(match[0], f"events{len(names) or ''}")
        notes.append(
            Note(Kind.CHANGED, where, f"any free port for each worker in place of {match[0]}, on every interface")
        )
        return f"{{port:{name}}}"

    return tuple(_BOUND_PORT.sub(placeholder, word) for word in words), tuple(notes)
