"""The words of a command as they are in a pod: placeholders filled in, secrets by reference, nothing of this host."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dynamo_local.commands import placeholders
from dynamo_local.core.secrets import holds_secret, is_secret_key
from dynamo_local.core.types import Role
from dynamo_local.kubernetes.model import EnvVar
from dynamo_local.kubernetes.program import FRONTEND, MODE, WORKERS, is_python, mode_of, module_of, without
from dynamo_local.manifests.exporting.environment import POD_NAME, field_variable, pod_variables, secret_variable
from dynamo_local.manifests.exporting.processes import Process
from dynamo_local.manifests.notes import Kind, Note

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
