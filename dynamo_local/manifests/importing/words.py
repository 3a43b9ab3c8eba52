"""What a container runs, as the words of a command on this host."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dynamo_local.commands import placeholders
from dynamo_local.kubernetes.model import Component, ComponentType, Container
from dynamo_local.kubernetes.program import FRONTEND, MODELS, module_of, option, without
from dynamo_local.manifests.exporting.environment import NIXL_PORT
from dynamo_local.manifests.importing.environment import Variables, expanded, place
from dynamo_local.manifests.notes import Kind, Note

_SHELLS = ("sh", "bash", "/bin/sh", "/bin/bash", "/usr/bin/bash")
_OPERATORS = set(";&|<>()`\n")
_ALL_ARGUMENTS = ("$@", "$*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_DISCOVERY = ("--store-kv", "--discovery-backend")
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
    for name in _DISCOVERY:
        if option(words, name) is not None:
            text = "the processes of a host find one another by its etcd"
            notes.append(Note(Kind.LEFT_OUT, f"{where}.{name}", text))
    words = without(words, *_DISCOVERY)
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
