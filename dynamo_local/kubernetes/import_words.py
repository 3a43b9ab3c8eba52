"""What a container runs, as the words of a command on this host."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from pydantic import ValidationError

from dynamo_local.components.commands import launch as placeholders
from dynamo_local.components.commands.dynamo_1x_env import HTTP_PORT, OWNED, PORT_VARIABLES
from dynamo_local.config.loading import not_yaml
from dynamo_local.core.secrets import allowed_env
from dynamo_local.errors import ConfigError
from dynamo_local.kubernetes.export_processes import NIXL_PORT, OF_THE_HOST, POD_IP, POD_NAME
from dynamo_local.kubernetes.manifests import Kind, Note
from dynamo_local.kubernetes.model import (
    FRONTEND,
    GRAPH_KIND,
    MODELS,
    Component,
    ComponentType,
    Container,
    EnvVar,
    Graph,
    NamedRef,
    WrongKind,
    module_of,
    option,
    read_graph,
    without,
)
from dynamo_local.sdk.checks import SET_BY_SERVE, listing

# --- documents
# The documents of a file of manifests: the graph, and whatever else stands beside it.

CONFIG_MAP = "ConfigMap"


@dataclass(frozen=True, slots=True)
class Documents:
    """`others` are kind and name; `config_maps` their data by name."""

    graph: Graph
    others: tuple[tuple[str, str], ...] = ()
    config_maps: Mapping[str, Mapping[str, str]] | None = None

    def config_value(self, name: str, key: str) -> str | None:
        """A key of a ConfigMap of the same file."""
        return (self.config_maps or {}).get(name, {}).get(key)


def read_documents(text: str, source: str, name: str | None = None) -> Documents:
    """The file's graph, that of this name where there are several. Raises `ConfigError`, which names the field."""
    found = _objects(_documents(text, source), source)
    graphs = {_name(raw): raw for raw in found if raw["kind"] == GRAPH_KIND}
    if name is None and len(graphs) > 1:
        raise ConfigError(f"{source}: it holds the graphs {listing(graphs)}; say --name with one of them")
    if not graphs or (name is not None and name not in graphs):
        there = listing(graphs) if graphs else f"documents of the kinds {listing({raw['kind'] for raw in found})}"
        wanted = "" if name is None else f" {name!r}"
        raise ConfigError(f"{source}: there is no {GRAPH_KIND}{wanted} in it; it holds {there}")
    chosen = name if name is not None else next(iter(graphs))
    others = tuple((raw["kind"], _name(raw)) for raw in found if raw["kind"] not in (GRAPH_KIND, CONFIG_MAP))
    maps = {_name(raw): raw["data"] for raw in found if raw["kind"] == CONFIG_MAP and isinstance(raw.get("data"), dict)}
    return Documents(_graph(graphs[chosen], source), others, maps)


def _objects(documents: list[Any], source: str) -> list[dict[str, Any]]:
    """Each with a `kind`; the items of a `List` (`kubectl get … -o yaml`) are objects like others."""
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


def _documents(text: str, source: str) -> list[Any]:
    """Raises `ConfigError` for what is not YAML, or holds itself, or what JSON does not have."""
    try:
        found = list(yaml.safe_load_all(text))  # YAML 1.1, as Kubernetes' own tools read it
        json.dumps(found)
    except yaml.YAMLError as error:
        raise not_yaml(source, error) from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: not what a manifest may hold: {error}") from None
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
        # Between the version's model and the field: pydantic's own names of alternatives are nobody's.
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{source}: {place}: {first['msg']}") from None


# --- environment
# The variables of a container as those of a command on this host.

_REFERENCE = re.compile(r"\$(\$)?\(([A-Za-z_][A-Za-z0-9_.-]*)\)")
_IN_CLUSTER = re.compile(r"\.svc\b")
_SERVERS = ("ETCD_", "NATS_", "KUBERNETES_")
_DISCOVERY = ("DYN_DISCOVERY_BACKEND", "DYN_KUBE_DISCOVERY_MODE", "DYN_STORE_KV")
WATCHER = "{watcher}"
_PER_WORKER = {POD_IP: "127.0.0.1", POD_NAME: WATCHER}


@dataclass(slots=True)
class Variables:
    """`envs` are of the section, `brought` stand before the command (each worker has its own), `passed` are to come
    from the shell. `known` is what `$(NAME)` in a word stands for."""

    envs: dict[str, str] = field(default_factory=dict)
    brought: dict[str, str] = field(default_factory=dict)
    passed: list[str] = field(default_factory=list)
    known: dict[str, str] = field(default_factory=lambda: {"DYN_NAMESPACE": "{namespace}", "POD_NAME": WATCHER})
    http_port: int | None = None
    notes: list[Note] = field(default_factory=list)


def host_variables(of_all: Iterable[EnvVar], container: Container, where: str, documents: Documents) -> Variables:
    """Those of all components, and the container's own over them."""
    found = Variables()
    merged = {variable.name: variable for variable in (*of_all, *(container.env or ()))}
    for variable in merged.values():
        _take(variable, f"{where}.env.{variable.name}", documents, found)
    for source in container.env_from or ():
        _take_all(source.secret_ref, source.config_map_ref, where, documents, found)
    return found


def expanded(text: str, known: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """`$(NAME)` as Kubernetes fills it in, and the names that are not known; `$$(` is `$(`."""
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
    """A variable with a value: into the section, before the command, or nowhere."""
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
        # Pods may all have the same: on one host each worker needs its own.
        found.brought[name] = f"{{port:{name.removesuffix('_PORT').lower().replace('_', '-')}}}"
        found.notes.append(Note(Kind.CHANGED, where, f"any free port for each worker, in place of {value}"))
    else:
        found.envs[name] = value


def _take_all(
    secret: NamedRef | None, config_map: NamedRef | None, where: str, documents: Documents, found: Variables
) -> None:
    """All keys of a Secret, or of a ConfigMap."""
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
    """The container's command cannot be one of this host; the text says why."""


@dataclass(frozen=True, slots=True)
class HostCommand:
    """`words` are as in the section, `env NAME=value` before them included; `model` is what `{model}` stands for."""

    words: tuple[str, ...]
    model: str | None = None
    ports: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()


def host_command(
    component: Component, container: Container, variables: Variables, *, disaggregated: bool
) -> HostCommand:
    """The words of its main container. `disaggregated`: the graph has prefill workers. Raises `CannotRun`."""
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
    words, told = _own_ports(words, where)
    if module_of(words) == "dynamo.vllm" and (disaggregated or "Nixl" in " ".join(words)):
        brought[NIXL_PORT] = _NIXL
        notes.append(
            Note(Kind.CHANGED, where, f"{NIXL_PORT}: any free port for each worker, as NIXL needs on one host")
        )
    if brought:
        words = ("env", *(f"{name}={value}" for name, value in brought.items()), *words)
    return HostCommand(words, model, ports, (*notes, *told))


def pod_words(kind: ComponentType | None, container: Container) -> tuple[str, ...]:
    """Command and arguments, with what the operator puts in where they are not given. Raises `CannotRun`."""
    command, args = container.command or [], container.args
    if not command and kind is ComponentType.FRONTEND:
        command, args = ["python3"], args if args is not None else ["-m", FRONTEND]
    elif not command and args:
        command = ["/bin/sh", "-c"]
    if not command:
        raise CannotRun("it has no command: what its image starts by itself is not known here")
    return (*command, *(args or ()))


def _plain(words: tuple[str, ...], known: Mapping[str, str]) -> tuple[str, ...]:
    """A shell's single command as its words; a script of several cannot be told from its parts."""
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
    """A port is `ports: {http: …}` of the section here; `dynamo serve` says where a frontend listens."""
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
    """`tcp://*:20080` of one pod would be that of every worker here."""
    notes: list[Note] = []
    names: dict[str, str] = {}

    def placeholder(match: re.Match[str]) -> str:
        name = names.setdefault(match[0], f"events{len(names) or ''}")
        notes.append(
            Note(Kind.CHANGED, where, f"any free port for each worker in place of {match[0]}, on every interface")
        )
        return f"{{port:{name}}}"

    return tuple(_BOUND_PORT.sub(placeholder, word) for word in words), tuple(notes)
