"""What runs for a service of this host, as one of Dynamo 1.x's processes: its words, or why there are none."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from dynamo_local.components.commands import launch as placeholders
from dynamo_local.components.commands.config import CommandConfig
from dynamo_local.components.commands.dynamo_1x_env import DEFAULTS, OWNED
from dynamo_local.core.fleet.states import ROLES
from dynamo_local.core.secrets import holds_secret, is_secret_key, is_secret_variable
from dynamo_local.core.types import Role, ServiceSpec
from dynamo_local.errors import ConfigError
from dynamo_local.kubernetes.manifests import Kind, Note, left_out
from dynamo_local.kubernetes.model import (
    FRONTEND,
    MODE,
    WORKERS,
    EnvVar,
    KeyRef,
    ValueFrom,
    is_python,
    mode_of,
    module_of,
    option,
    without,
    without_env,
)

if TYPE_CHECKING:
    from dynamo_local.engines.vllm.options import VllmOptions


# --- servers
# Plain `vllm serve`, which a Frontend of ours is in front of, as Dynamo 1.x's vLLM worker, which registers itself.

MODULE = "vllm.entrypoints.openai.api_server"
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
"""Dynamo's frontend parses what the worker names."""


def is_vllm_server(words: Sequence[str]) -> bool:
    """`vllm serve …`, or its module."""
    if len(words) >= 3 and is_python(words[0]) and tuple(words[1:3]) == ("-m", MODULE):
        return True
    return len(words) >= 2 and words[0].rpartition("/")[2] == "vllm" and words[1] == "serve"


def as_worker(
    words: Sequence[str], role: Role, where: str, served_model_name: str | None
) -> tuple[tuple[str, ...], tuple[Note, ...]]:
    """The words of `python3 -m dynamo.vllm` in place of the server's. `is_vllm_server` is true of them."""
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
    """Options of the engine as they are; those of the HTTP server left out, with their values."""
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
"""Of Dynamo 1.x's frontends, whatever their version."""
_COMMAND_KEYS = ("command", "role", "runtime", "model", "ports")
_ENGINE_KEYS = ("model", "served_model_name", "max_model_len", "engine")
_OURS = "an option of this project alone; Dynamo 1.x's process has none like it"
_REASONS = {
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
    """The words, placeholders as on this host, variables that stood before them (`env A=b`), and its fixed ports."""

    words: tuple[str, ...]
    brought: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    ports: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True, slots=True)
class NoProcess:
    """There is none. `refuses`: without it the graph would be another one."""

    reason: str
    refuses: bool


def process_of(service: ServiceSpec, settings: Any, router: str | None) -> Process | NoProcess:
    """What runs for the service on Kubernetes. `settings` is its validated section, `router` the graph's policy."""
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
    notes = left_out(service.name, _REASONS, unread, _OURS)
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
    notes = left_out(service.name, _REASONS, ours, _OURS)
    # `--model=X`: two words, as in Dynamo's own manifests. A model's name begins with no hyphen.
    apart = [part for word in words for part in (word.split("=", 1) if word.startswith("--model=") else [word])]
    return Process(("python3", "-m", "dynamo.vllm", *apart, *mode), model=options.model, notes=notes)


def _frontend(service: ServiceSpec, router: str | None) -> Process:
    mode = router if router in _MODES else "round-robin" if router is None else "kv"
    notes = list(left_out(service.name, _REASONS, (key for key in service.config), _OURS))
    if router not in (mode, None):
        notes.append(Note(Kind.CHANGED, service.name, f"router {router} is --router-mode {mode} of Dynamo's frontend"))
    return Process(("python3", "-m", FRONTEND, "--router-mode", mode), notes=tuple(notes))


# --- environment
# The variables of a service as those of its container: secrets by name only, and nothing that is this host's own.

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
    """Variables for the container, and notes on those that are secrets, or that have no meaning in a pod.

    `secret` is the name of the Secret in which values are looked for that must not stand in a manifest.
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
    """Why this variable is of this host alone; None if it is not."""
    if name in OWNED or name == NIXL_PORT:
        return "a port that no other process of this host has; in a pod every port is free"
    if name in OF_THE_HOST:
        return "Kubernetes gives each pod its GPUs"
    if name.startswith(_SERVERS):
        return "the operator tells its pods where discovery and events are"
    if value in LOOPBACK and (name in DEFAULTS or name.endswith("_HOST")):
        return "loopback: in a pod nobody would reach it"
    return None


# --- words
# The words of a command as they are in a pod: placeholders filled in, secrets by reference, nothing of this host.

FIRST_PORT = 20000
KNOWN_PORTS = {"http": 8000, "system": 9090, "nixl": 5600}
"""By what the operator, Dynamo and vLLM take when nobody says otherwise."""
NAMESPACE_VARIABLE, NAME_VARIABLE = "DYN_NAMESPACE", "POD_NAME"
_SERVED = ("--http-host", "--http-port")
_HIDDEN = "\0("
"""In front of a variable that is to be `$(NAME)` in the end: no word of a command holds a NUL character."""
_LOCAL = re.compile(r"[/.~].*")


@dataclass(frozen=True, slots=True)
class PodProcess:
    """What a container runs. `env` is what the words need, or brought with them (`env NAME=value …`)."""

    words: tuple[str, ...]
    env: tuple[EnvVar, ...]
    notes: tuple[Note, ...]


def pod_process(process: Process, where: str, secret: str) -> PodProcess:
    """What a pod runs in place of this host's process; values of secrets are looked for in that Secret."""
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
    own, secrets, told = _secrets_apart(own, where, secret)
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
    return PodProcess(tuple(filled), tuple(env), (*notes, *told, *more))


def with_mode(words: tuple[str, ...], role: Role, where: str) -> tuple[tuple[str, ...], tuple[Note, ...], str | None]:
    """The words of a worker with its part in the graph (#13238), notes, and why that cannot be, if it cannot."""
    said = mode_of(words)
    if module_of(words) not in WORKERS:
        return words, (), f"its command must be one of Dynamo's workers (python -m {', '.join(WORKERS)})"
    if role is Role.PREFILL and said is None:
        note = Note(Kind.CHANGED, where, f"{MODE} prefill was added: without it, it would register as a decode worker")
        return (*words, MODE, "prefill"), (note,), None
    allowed = {Role.PREFILL: ("prefill",), Role.DECODE: ("decode", None), Role.AGGREGATED: ("agg", None)}[role]
    if said not in allowed:
        return words, (), f"its role is {role}, but its command says {MODE} {said}; make them agree"
    return words, (), None


def model_note(model: str | None, where: str) -> tuple[Note, ...]:
    """A folder of this host is in no pod."""
    if model is None or not _LOCAL.match(model):
        return ()
    text = f"{model} is a folder of this host: mount one there, or name a model of a hub ({where}=ORG/NAME)"
    return (Note(Kind.CHANGED, where, text),)


def split(words: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Command and arguments of a container: `python3 -m dynamo.vllm`, and the rest."""
    at = 3 if module_of(words) is not None else 1
    return list(words[:at]), list(words[at:])


def _numbers(names: Sequence[str], fixed: Mapping[str, int]) -> dict[str, int]:
    """A number for each port: in a pod all are free."""
    taken = {name: port for name in names if (port := fixed.get(name) or KNOWN_PORTS.get(name))}
    free = (port for port in itertools.count(FIRST_PORT) if port not in taken.values())
    return {name: taken.get(name) or next(free) for name in names}


def _filled(word: str, model: str | None, ports: Mapping[str, int]) -> str:
    """`$(X)` of the word is its own; `$(DYN_NAMESPACE)` is filled in by Kubernetes."""
    (filled,) = placeholders.fill(
        [word.replace("$(", "$$(")],
        namespace=f"$({NAMESPACE_VARIABLE})",
        watcher=f"$({NAME_VARIABLE})",
        model=model,
        ports=ports,
    )
    return filled.replace(_HIDDEN, "$(")


def _secrets_apart(words: Sequence[str], where: str, secret: str) -> tuple[tuple[str, ...], list[EnvVar], list[Note]]:
    """Values of secret options, and credentials in a word, as variables that Kubernetes fills in."""
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
