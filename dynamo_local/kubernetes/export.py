"""Exports a resolved graph of this host as one `DynamoGraphDeployment`, with its planner, servers and variables."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dynamo_local.components.commands import launch as placeholders
from dynamo_local.components.commands.config import CommandConfig
from dynamo_local.components.commands.dynamo_1x_env import DEFAULTS, OWNED
from dynamo_local.config.loading import HOST, PLANNER, Config
from dynamo_local.config.planner import BY_TARGETS
from dynamo_local.config.planner_section import chosen_policy
from dynamo_local.core.fleet.states import ROLES
from dynamo_local.core.secrets import holds_secret, is_secret_key, is_secret_variable
from dynamo_local.core.types import GraphSpec, Role, ServiceSpec
from dynamo_local.core.types import Resources as Wanted
from dynamo_local.errors import ConfigError
from dynamo_local.kubernetes.manifests import (
    FRONTEND,
    GPU_RESOURCE,
    GRAPH_KIND,
    MAIN_CONTAINER,
    MODE,
    PLANNED,
    V1BETA1,
    WORKERS,
    Component,
    ComponentType,
    Container,
    EnvVar,
    GraphV1Beta1,
    KeyRef,
    Kind,
    Metadata,
    Note,
    PodSpec,
    PodTemplate,
    Refusal,
    Resources,
    ScalingAdapter,
    ValueFrom,
    faults,
    is_python,
    left_out,
    mode_of,
    module_of,
    option,
    refuse,
    without,
    without_env,
)
from dynamo_local.kubernetes.manifests import GraphSpec as KubernetesSpec
from dynamo_local.sdk.loader import LoadedGraph
from dynamo_local.sdk.settings import validate_section

if TYPE_CHECKING:
    from dynamo_local.engines.vllm.options import VllmOptions

NAME = "Planner"
RIGHTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("nvidia.com", "dynamographdeployments", ("get", "patch")),
    ("nvidia.com", "dynamographdeploymentscalingadapters/scale", ("get", "patch")),
    ("nvidia.com", "dynamoworkermetadatas", ("list",)),
    ("coordination.k8s.io", "leases", ("get", "create", "update")),
)
"""The minimum that suffices.

The service account that the operator gives a planner cannot write leases or read an adapter's scale.
"""
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
    """The host's planner as a component: the same policy and options in a pod of its own, and the options left out.

    The section is valid, and its keys have underscores. `frontend` is the name of the Service whose /metrics has the
    traffic, `account` the name of the account of `rights`.
    """
    unread = [key for key in section if key in _REASONS or key.startswith("virtual_")]
    notes = left_out(NAME, _REASONS, unread, _HERE)
    kept = {key: value for key, value in section.items() if key not in unread}
    if chosen_policy(section) == BY_TARGETS:
        kept.setdefault("policy", BY_TARGETS)  # a pod without a policy plans as Dynamo does
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
    """A service account with exactly the rights of a planner."""
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


_MEMORY = re.compile(r"(?P<number>[\d.]+)(?P<unit>[EPTGMKk]?i?)B?")


def container_resources(wanted: Wanted) -> Resources | None:
    """GPUs as limits (they cannot be shared), CPUs and memory as requests. None if a worker requests nothing."""
    requests = {"cpu": wanted.cpu, "memory": None if wanted.memory is None else quantity(wanted.memory)}
    requested = {name: value for name, value in requests.items() if value is not None}
    found = Resources()
    if wanted.gpu:
        found.limits = {GPU_RESOURCE: str(wanted.gpu)}
    if requested:
        found.requests = dict(requested)
    return found if found.model_fields_set else None


def quantity(memory: str) -> str:
    """`20GiB`, `20GB`, `20K` in Kubernetes' notation: `20Gi`, `20G`, `20k`."""
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
class ExportRequest:
    """The values of the command line. `planner_image` is None without a planner."""

    name: str
    image: str
    secret: str
    planner_image: str | None = None


@dataclass(frozen=True, slots=True)
class ExportResult:
    """The manifest, and notes on everything that did not carry over unchanged."""

    graph: GraphV1Beta1
    notes: tuple[Note, ...]
    beside: tuple[dict[str, Any], ...] = ()
    """Objects that the graph needs: the planner's service account and its rights."""

    def secret_keys(self, secret: str) -> tuple[str, ...]:
        """The keys that the pods read from this Secret."""
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
    """The graph's name if none is given: its namespace here, in the letters that names have there."""
    return re.sub(r"[^a-z0-9]+", "-", namespace.lower()).strip("-")


def export(loaded: LoadedGraph, spec: GraphSpec, config: Config, request: ExportRequest) -> ExportResult:
    """The manifest of the graph. Raises `NotCarried` with every reason."""
    router = _router(spec)
    parts = [_part(service, _settings(loaded, service, config), router, config, request) for service in spec.components]
    refusals = [part.refusal for part in parts if part.refusal is not None]
    components = [part.component for part in parts if part.component is not None]
    notes = [note for part in parts for note in part.notes]
    if request.planner_image is not None:
        planner, more_notes = planner_component(
            config.service(PLANNER),
            request.planner_image,
            _frontend_service(request.name, components),
            _account(request),
        )
        for component in components:
            if component.type in PLANNED:
                component.scaling_adapter = ScalingAdapter()
        components.append(planner)
        notes += more_notes
    elif PLANNER in config.sections and PLANNER not in loaded.services:
        notes.append(Note(Kind.LEFT_OUT, PLANNER, "no planner was asked for"))
    notes += left_out(HOST, {}, config.sections.get(HOST, {}), _HOST_ONLY)
    refusals += [Refusal(request.name, fault) for fault in faults(request.name, components)] if not refusals else []
    refuse(config.source, refusals)
    graph = GraphV1Beta1(
        api_version=V1BETA1,
        kind=GRAPH_KIND,
        metadata=Metadata(name=request.name),
        spec=KubernetesSpec(components=components),
    )
    beside = () if request.planner_image is None else rights(_account(request))
    return ExportResult(graph, tuple(dict.fromkeys(notes)), beside)


def _account(request: ExportRequest) -> str:
    return f"{request.name}-planner"


def _frontend_service(name: str, components: list[Component]) -> str | None:
    """The operator's Service of the frontend. None without a frontend."""
    frontends = [component.name for component in components if component.type is ComponentType.FRONTEND]
    return f"{name}-{frontends[0].lower()}" if frontends else None


def _settings(loaded: LoadedGraph, service: ServiceSpec, config: Config) -> Any:
    model = loaded.services[service.name].config_model
    return None if model is None else validate_section(model, f"{config.source}: {service.name}", service.config)


def _part(service: ServiceSpec, settings: Any, router: str | None, config: Config, request: ExportRequest) -> _Part:
    process = process_of(service, settings, router)
    if isinstance(process, NoProcess):
        if process.refuses:
            return _Part(None, refusal=Refusal(service.name, process.reason))
        return _Part(None, (Note(Kind.LEFT_OUT, service.name, process.reason),))
    notes = [*process.notes, *left_out(f"{service.name}.ServiceArgs", _ARGS, _unread_args(service), _NO_SUCH)]
    if ROLES[service.role].computes:
        words, more_notes, why = with_mode(process.words, service.role, service.name)
        if why is not None:
            return _Part(None, refusal=Refusal(service.name, why))
        process = replace(process, words=words)
        notes += [*more_notes, *model_note(process.model, f"{service.name}.model")]
    elif service.role not in TYPES:
        reason = "neither a frontend nor a worker: the operator has no such component"
        return _Part(None, (Note(Kind.LEFT_OUT, service.name, reason),))
    pod = pod_process(process, service.name, request.secret)
    variables, worker_env = pod_variables(service.envs, f"{service.name}.ServiceArgs.envs", request.secret)
    name = service.name.replace("_", "-").strip("-")
    if name != service.name:
        notes.append(Note(Kind.CHANGED, service.name, f"named {name!r}: a component's name has no '_' there"))
    return _Part(_component(name, service, pod, variables, request), (*notes, *pod.notes, *worker_env))


def _unread_args(service: ServiceSpec) -> list[str]:
    given = {
        "start_deadline_s": service.start_deadline_s is not None,
        "standby": service.standby is not None,
        "flippable": not service.flippable,
    }
    return [name for name, there in given.items() if there]


def _router(spec: GraphSpec) -> str | None:
    """How this graph's own Processor or Router picks workers. None if nothing says so."""
    for service in spec.components:
        if service.runtime is None and service.config.get("router") is not None:
            return str(service.config["router"])
    return None


def _component(
    name: str, service: ServiceSpec, pod: PodProcess, variables: list[EnvVar], request: ExportRequest
) -> Component:
    command, args = split(pod.words)
    container = Container(name=MAIN_CONTAINER, image=request.image, command=command, args=args)
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


# Plain `vllm serve` behind a Frontend of ours becomes Dynamo 1.x's vLLM worker, which registers itself.

PROCESS_MODULE = "vllm.entrypoints.openai.api_server"
_LISTENS = "the worker does not listen for clients: Dynamo's frontend does"
_WITH_VALUE = dict.fromkeys(
    (
        *("--host", "--port", "--uds", "--root-path", "--api-key", "--uvicorn-log-level", "--api-server-count"),
        *("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs", "--allowed-origins", "--allowed-methods"),
        *("--allowed-headers", "--middleware", "--response-role", "--chat-template-content-format"),
    ),
    _LISTENS,
)
_FLAGS = dict.fromkeys(
    ("--disable-uvicorn-access-log", "--allow-credentials", "--enable-request-id-headers", "--disable-fastapi-docs"),
    _LISTENS,
)
_FLAGS["--enable-auto-tool-choice"] = "Dynamo's worker needs --dyn-tool-call-parser alone"
_RENAMED = {"--tool-call-parser": "--dyn-tool-call-parser", "--reasoning-parser": "--dyn-reasoning-parser"}
"""Dynamo's frontend parses the names that the worker gives."""


def is_vllm_server(words: Sequence[str]) -> bool:
    """`vllm serve …`, or its module."""
    if len(words) >= 3 and is_python(words[0]) and tuple(words[1:3]) == ("-m", PROCESS_MODULE):
        return True
    return len(words) >= 2 and words[0].rpartition("/")[2] == "vllm" and words[1] == "serve"


def as_worker(
    words: Sequence[str], role: Role, where: str, served_model_name: str | None
) -> tuple[tuple[str, ...], tuple[Note, ...]]:
    """The words of `python3 -m dynamo.vllm` for these words of a vLLM server."""
    options = list(words[3:] if is_python(words[0]) else words[2:])
    model: list[str] = []
    if options and not options[0].startswith("-"):
        model = ["--model", options.pop(0)]
    kept, notes = _translated(options, where)
    if served_model_name is not None and option(kept, "--served-model-name") is None:
        kept += ["--served-model-name", served_model_name]
    mode = [MODE, str(role)] if role in (Role.PREFILL, Role.DECODE) else []
    changed = Note(Kind.CHANGED, where, "python3 -m dynamo.vllm in place of the server: Dynamo's frontend finds it")
    return ("python3", "-m", "dynamo.vllm", *model, *kept, *mode), (changed, *notes)


def _translated(options: Sequence[str], where: str) -> tuple[list[str], list[Note]]:
    """The engine's options, without those of the HTTP server and their values."""
    kept: list[str] = []
    notes: list[Note] = []
    dropping = False
    for word in options:
        name, equals, _ = word.partition("=")
        if dropping and not word.startswith("--"):
            continue
        dropping = False
        if name in _WITH_VALUE or name in _FLAGS:
            dropping = not equals and name in _WITH_VALUE
            why = _WITH_VALUE.get(name) or _FLAGS[name]
            notes.append(Note(Kind.LEFT_OUT, where, f"{name}: {why}"))
        elif name in _RENAMED:
            kept.append(_RENAMED[name] + word[len(name) :])
            notes.append(Note(Kind.CHANGED, where, f"{name} is {_RENAMED[name]} of Dynamo's worker"))
        else:
            kept.append(word)
    return kept, notes


_MODES = ("round-robin", "random", "kv")
"""Options of Dynamo 1.x's frontends, in any version."""
_COMMAND_KEYS = ("command", "role", "runtime", "model", "ports")
_ENGINE_KEYS = ("model", "served_model_name", "max_model_len", "engine")
_OURS = "an option of this project alone; Dynamo 1.x's process has none like it"
_PROCESS_REASONS = {
    "health_url": "the operator's probes ask Dynamo's processes",
    "settle_s": "the operator's probes ask Dynamo's processes",
    "health_bound_s": "the operator's probes decide when a pod is started anew",
    "stop_timeout_s": "a pod has terminationGracePeriodSeconds (ServiceArgs.drain-deadline-s)",
    "sleep_hook": "there are no sleeping workers on Kubernetes",
    "wake_hook": "there are no sleeping workers on Kubernetes",
    "host": "the operator says where a frontend listens",
    "port": "the operator says where a frontend listens: port 8000 of its Service",
    "api_key": "Dynamo's frontend asks for no key: put a gateway with authentication in front of it",
    "tls_certificate": "a gateway or an ingress in front of the frontend terminates TLS",
    "remote_prefill": "in Dynamo 1.x the frontend has prompts prefilled elsewhere",
    "conditional_disagg": "in Dynamo 1.x the frontend has prompts prefilled elsewhere",
}


@dataclass(frozen=True, slots=True)
class Process:
    """The words with this host's placeholders, the variables before them (`env A=b`), and fixed ports."""

    words: tuple[str, ...]
    brought: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    ports: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True)
class NoProcess:
    """There is no process. With `refuses` the graph cannot be exported without it."""

    reason: str
    refuses: bool


def process_of(service: ServiceSpec, settings: Any, router: str | None) -> Process | NoProcess:
    """The process of the service on Kubernetes. `settings` is its validated section, `router` the graph's policy."""
    if isinstance(settings, CommandConfig):
        return _of_command(service, settings)
    if hasattr(settings, "vllm_options"):
        return _of_engine(service, settings)
    if service.role is Role.FRONTEND:
        return _frontend(service, router)
    if ROLES[service.role].computes:
        return NoProcess("a worker of this graph's own code: Dynamo's images do not have it", refuses=True)
    return NoProcess("Dynamo 1.x's frontend does this work (or it is this graph's own code)", refuses=False)


def _of_command(service: ServiceSpec, settings: CommandConfig) -> Process | NoProcess:
    unread = [key for key in service.config if key not in (*_COMMAND_KEYS, "served_model_name")]
    notes = left_out(service.name, _PROCESS_REASONS, unread, _OURS)
    words, brought = without_env(settings.words)
    if (module_of(words) or "").startswith("dynamo."):
        return Process(words, brought, settings.model, settings.ports, notes)
    if is_vllm_server(words) and ROLES[service.role].computes:
        named = getattr(settings, "served_model_name", None)
        worker, more = as_worker(words, service.role, service.name, named)
        return Process(worker, brought, settings.model, settings.ports, (*notes, *more))
    known = "Dynamo 1.x's processes (python -m dynamo.…) and `vllm serve` carry over, this program does not"
    return NoProcess(known, refuses=service.role is not Role.OTHER)


def _of_engine(service: ServiceSpec, settings: Any) -> Process | NoProcess:
    if settings.engine_name != "vllm":
        why = f"its engine is {settings.engine_name}: a graph for a cluster computes with vllm (engine: vllm, model: …)"
        return NoProcess(why, refuses=True)
    options: VllmOptions = settings.vllm_options(service.resources.gpu)
    mode = {"producer": [MODE, "prefill"], "consumer": [MODE, "decode"]}.get(options.transfer, [])
    try:
        # Dynamo's vLLM workers both give KV and take it.
        words = replace(options, transfer="both" if mode else "none").arguments()
    except ConfigError as error:
        return NoProcess(str(error), refuses=True)
    ours = [key for key in service.config if key in type(settings).model_fields and key not in _ENGINE_KEYS]
    notes = left_out(service.name, _PROCESS_REASONS, ours, _OURS)
    # `--model=X` becomes two words, as in Dynamo's own manifests. A model's name begins with no hyphen.
    apart = [part for word in words for part in (word.split("=", 1) if word.startswith("--model=") else [word])]
    return Process(("python3", "-m", "dynamo.vllm", *apart, *mode), model=options.model, notes=notes)


def _frontend(service: ServiceSpec, router: str | None) -> Process:
    mode = router if router in _MODES else "round-robin" if router is None else "kv"
    notes = list(left_out(service.name, _PROCESS_REASONS, (key for key in service.config), _OURS))
    if router not in (mode, None):
        notes.append(Note(Kind.CHANGED, service.name, f"router {router} is --router-mode {mode} of Dynamo's frontend"))
    return Process(("python3", "-m", FRONTEND, "--router-mode", mode), notes=tuple(notes))


NIXL_HOST, NIXL_PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"
POD_IP, POD_NAME = "status.podIP", "metadata.name"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
OF_THE_HOST = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_SERVERS = ("ETCD_", "NATS_")


def secret_variable(name: str, secret: str) -> EnvVar:
    """A variable whose value is this key of that Secret."""
    return EnvVar(name=name, value_from=ValueFrom(secret_key_ref=KeyRef(name=secret, key=name)))


def field_variable(name: str, field_path: str) -> EnvVar:
    """A variable whose value is a field of the pod."""
    from_field: dict[str, Any] = {"fieldRef": {"fieldPath": field_path}}
    return EnvVar(name=name, value_from=ValueFrom.model_validate(from_field))


def pod_variables(envs: Mapping[str, str], where: str, secret: str) -> tuple[list[EnvVar], list[Note]]:
    """Variables for the container, and notes on secrets and on variables without a meaning in a pod.

    `secret` is the name of the Secret that holds the values which must not stand in a manifest.
    """
    variables, notes = [], []
    for name, value in envs.items():
        place = f"{where}.{name}"
        if name == NIXL_HOST and value in LOOPBACK:
            variables.append(field_variable(name, POD_IP))
            notes.append(
                Note(Kind.CHANGED, place, "the pod's own address in place of loopback: its peers are elsewhere")
            )
        elif (why := _only_here(name, value)) is not None:
            notes.append(Note(Kind.LEFT_OUT, place, why))
        elif value and (is_secret_variable(name) or holds_secret(value)):
            variables.append(secret_variable(name, secret))
            notes.append(Note(Kind.SECRET, place, f"its value is to be the key {name} of the Secret {secret}"))
        else:
            # `$(X)` would be another variable's value in a pod.
            variables.append(EnvVar(name=name, value=value.replace("$(", "$$(")))
    return variables, notes


def _only_here(name: str, value: str) -> str | None:
    """Why this variable belongs to this host alone, or None."""
    if name in OWNED or name == NIXL_PORT:
        return "a port that no other process of this host has; in a pod every port is free"
    if name in OF_THE_HOST:
        return "Kubernetes gives each pod its GPUs"
    if name.startswith(_SERVERS):
        return "the operator tells its pods where discovery and events are"
    if value in LOOPBACK and (name in DEFAULTS or name.endswith("_HOST")):
        return "loopback: in a pod nobody would reach it"
    return None


FIRST_PORT = 20000
KNOWN_PORTS = {"http": 8000, "system": 9090, "nixl": 5600}
"""The defaults of the operator, of Dynamo and of vLLM."""
NAMESPACE_VARIABLE, NAME_VARIABLE = "DYN_NAMESPACE", "POD_NAME"
_SERVED = ("--http-host", "--http-port")
_HIDDEN = "\0("
"""Marks a variable that becomes `$(NAME)` in the end: no word of a command holds a NUL character."""
_LOCAL = re.compile(r"[/.~].*")


@dataclass(frozen=True, slots=True)
class PodProcess:
    """The command of a container. `env` has variables that the words need or brought (`env NAME=value …`)."""

    words: tuple[str, ...]
    env: tuple[EnvVar, ...]
    notes: tuple[Note, ...]


def pod_process(process: Process, where: str, secret: str) -> PodProcess:
    """The process of a pod in place of this host's process. Secret values are read from that Secret."""
    own, model = process.words, process.model
    notes = []
    if is_python(own[0]):
        if "/" in own[0]:
            notes.append(Note(Kind.CHANGED, where, f"python3 of the image in place of {own[0]}"))
        own = ("python3", *own[1:])
    elif "/" in own[0]:
        notes.append(Note(Kind.CHANGED, where, f"{own[0]} is looked for in the image"))
    if module_of(own) == FRONTEND and (served := without(own, *_SERVED)) != own:
        notes.append(Note(Kind.LEFT_OUT, where, "the operator says where a frontend listens: port 8000 of its Service"))
        own = served
    words = (*process.brought.values(), *process.words)
    numbers = _numbers(placeholders.port_names(words), process.ports)
    own, secrets, more_notes = _secrets_apart(own, where, secret)
    filled = [_filled(word, model, numbers) for word in own]
    variables, more = pod_variables(
        {name: _filled(value, model, numbers) for name, value in process.brought.items()}, where, secret
    )
    env = [*secrets, *variables]
    if any("{watcher}" in word for word in words):
        env.append(field_variable(NAME_VARIABLE, POD_NAME))
        notes.append(Note(Kind.CHANGED, where, "{watcher} is the pod's name"))
    if any(host in word for word in filled for host in ("127.0.0.1", "localhost")):
        notes.append(Note(Kind.CHANGED, where, "its words name loopback, which is the pod's own"))
    return PodProcess(tuple(filled), tuple(env), (*notes, *more_notes, *more))


def with_mode(words: tuple[str, ...], role: Role, where: str) -> tuple[tuple[str, ...], tuple[Note, ...], str | None]:
    """The worker's words with its role in the graph (vLLM #13238), notes, and a reason if that is impossible."""
    mode = mode_of(words)
    if module_of(words) not in WORKERS:
        return words, (), f"its command must be one of Dynamo's workers (python -m {', '.join(WORKERS)})"
    if role is Role.PREFILL and mode is None:
        note = Note(Kind.CHANGED, where, f"{MODE} prefill was added: without it, it would register as a decode worker")
        return (*words, MODE, "prefill"), (note,), None
    allowed = {Role.PREFILL: ("prefill",), Role.DECODE: ("decode", None), Role.AGGREGATED: ("agg", None)}[role]
    if mode not in allowed:
        return words, (), f"its role is {role}, but its command says {MODE} {mode}; make them agree"
    return words, (), None


def model_note(model: str | None, where: str) -> tuple[Note, ...]:
    """No pod has a folder of this host."""
    if model is None or not _LOCAL.match(model):
        return ()
    text = f"{model} is a folder of this host: mount one there, or name a model of a hub ({where}=ORG/NAME)"
    return (Note(Kind.CHANGED, where, text),)


def split(words: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Command and arguments of a container: `python3 -m dynamo.vllm`, and the rest."""
    at = 3 if module_of(words) is not None else 1
    return list(words[:at]), list(words[at:])


def _numbers(names: Sequence[str], fixed: Mapping[str, int]) -> dict[str, int]:
    """A number for each port. In a pod all are free."""
    taken = {name: port for name in names if (port := fixed.get(name) or KNOWN_PORTS.get(name))}
    free = (port for port in itertools.count(FIRST_PORT) if port not in taken.values())
    return {name: taken.get(name) or next(free) for name in names}


def _filled(word: str, model: str | None, ports: Mapping[str, int]) -> str:
    """`$(X)` in the word is its own. Kubernetes fills in `$(DYN_NAMESPACE)`."""
    (filled,) = placeholders.fill(
        [word.replace("$(", "$$(")],
        namespace=f"$({NAMESPACE_VARIABLE})",
        watcher=f"$({NAME_VARIABLE})",
        model=model,
        ports=ports,
    )
    return filled.replace(_HIDDEN, "$(")


def _secrets_apart(words: Sequence[str], where: str, secret: str) -> tuple[tuple[str, ...], list[EnvVar], list[Note]]:
    """Values of secret options, and credentials in a word, become variables that Kubernetes fills in."""
    kept: list[str] = []
    variables: list[EnvVar] = []
    notes: list[Note] = []

    def hide(name: str) -> str:
        variables.append(secret_variable(name, secret))
        notes.append(Note(Kind.SECRET, where, f"its value is to be the key {name} of the Secret {secret}"))
        return f"{_HIDDEN}{name})"

    before = ""
    for at, word in enumerate(words):
        option, equals, value = word.partition("=")
        named = option.startswith("--") and is_secret_key(option)
        if named and equals and value:
            kept.append(f"{option}={hide(_variable(option))}")
        elif before and not word.startswith("-"):
            kept.append(hide(_variable(before)))
        elif holds_secret(word):
            kept.append(hide(f"{_variable(where.partition('.')[0])}_WORD_{at}"))
        else:
            kept.append(word)
        before = option if named and not equals else ""
    return tuple(kept), variables, notes


def _variable(text: str) -> str:
    return re.sub(r"\W+", "_", text.strip("-")).upper()
