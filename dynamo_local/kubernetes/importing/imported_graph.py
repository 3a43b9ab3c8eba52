"""The configuration under construction: sections, and a note with file and line for each thing that differs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo_local.components.commands import launch as placeholders
from dynamo_local.components.commands.graph import with_commands
from dynamo_local.config import resolve
from dynamo_local.config.loading import HOST, PLANNER, SERVICE_ARGS, Config, normalise, with_models
from dynamo_local.config.models import MODELS
from dynamo_local.config.yaml_text import Document
from dynamo_local.core.secrets import allowed_env, is_secret_variable
from dynamo_local.core.types import Role
from dynamo_local.errors import ConfigError
from dynamo_local.kubernetes.manifests import Kind, NotCarried, Note
from dynamo_local.sdk.checks import RESERVED_SECTIONS, check_service_name

FRONTEND = "Frontend"
NO_COUNTERPART = "dynamo serve has no counterpart"
DEVICES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
_UNQUOTED = re.compile(r"[\w@%+=:,./{}-]+", re.ASCII)
API_KEY = "put the key into a file, and say `api-key: file:PATH` in Frontend; servers listen on this machine only"


@dataclass(frozen=True, slots=True)
class Place:
    """A place of the source: `line` begins at 1, `key` is the path of a key, or a command's first words."""

    line: int
    key: str


@dataclass(slots=True)
class ImportedGraph:
    """Everything that was understood so far. `refusals` stay notes as long as another server is carried over."""

    source: str
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    pass_env: set[str] = field(default_factory=set)
    shared: dict[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    """Sections of models that share the GPUs: the model's name in the API, and what its source says about its share."""
    port: int | None = None
    """The Frontend's: the port of the first server in the source."""

    def left_out(self, place: Place, why: str) -> None:
        """A thing that is not carried over."""
        self._note(Kind.LEFT_OUT, place, why)

    def changed(self, place: Place, what: str) -> None:
        """A thing that is carried over in another form."""
        self._note(Kind.CHANGED, place, what)

    def secret(self, place: Place, what: str) -> None:
        """A thing that must not stand in a file."""
        self._note(Kind.SECRET, place, what)

    def _note(self, kind: Kind, place: Place, text: str) -> None:
        self.notes.append(Note(kind, f"{self.source}:{place.line}: {place.key}", text))

    def keys_left_out(
        self, document: Document, path: tuple[str | int, ...], known: Iterable[str], reasons: Mapping[str, str]
    ) -> None:
        """A note for each key of the mapping at `path` that is not known, with its reason."""
        found = at(document.value, path)
        for key in found if isinstance(found, Mapping) else ():
            if key not in known:
                self.left_out(place_of(document, *path, key), reasons.get(key, NO_COUNTERPART))

    def listens(self, port: int, place: Place) -> None:
        """The source's server listened there: the first one's port becomes the Frontend's."""
        if self.port is None:
            self.port = port
        elif self.port != port:
            self.changed(place, f"port {port}: the Frontend answers for every model on port {self.port}")

    def environment(self, given: Mapping[str, str], place: Place) -> tuple[dict[str, str], int | None]:
        """The variables of a section, and how many devices the source names. Secrets come from the shell."""
        envs: dict[str, str] = {}
        gpus: int | None = None
        for name, value in given.items():
            where = Place(place.line, f"{place.key}: {name}")
            if name in DEVICES:
                gpus = _devices(value)
                how = "any GPUs" if gpus is None else f"{gpus} GPU{'s' * (gpus != 1)}"
                self.changed(where, f"{name}={value}: {how} of this host; dynamo serve picks which")
            elif name == "VLLM_API_KEY":
                self.secret(where, API_KEY)
            elif is_secret_variable(name):
                if not allowed_env({name: ""}):
                    self.pass_env.add(name)
                self.secret(where, f"export {name} before dynamo serve")
            else:
                envs[name] = value
        return envs, gpus

    def add(self, name: str, section: Mapping[str, Any], args: Mapping[str, Any], place: Place) -> None:
        """One more section. Servers that differ only in their port and devices become workers of one section."""
        taken = [word for word in section["command"] if _strange(word)]
        if taken:
            self.left_out(place, f"its word {taken[0]!r} would be a placeholder of `command:`")
            return
        for other, there in self.sections.items():
            workers = there[SERVICE_ARGS]["workers"]
            if section["runtime"] == placeholders.HTTP and there == {
                **section,
                SERVICE_ARGS: {**args, "workers": workers},
            }:
                there[SERVICE_ARGS]["workers"] = workers + args["workers"]
                self.changed(place, f"the same server as {other}: one more worker of it")
                return
        self.sections[self._free(name)] = {**section, SERVICE_ARGS: dict(args)}

    def _free(self, name: str) -> str:
        parts = re.findall(r"[A-Za-z0-9]+", name)
        plain = "".join(part[:1].upper() + part[1:] for part in parts) or "Server"
        if plain[0].isdigit() or plain in (*RESERVED_SECTIONS, PLANNER, FRONTEND):
            plain = f"Server{plain}"
        try:
            check_service_name(plain)
        except ValueError:
            plain += "Server"
        taken = {other.lower() for other in self.sections}
        free, number = plain, 2
        while free.lower() in taken:
            free, number = f"{plain}{number}", number + 1
        return free

    def finished(self) -> dict[str, dict[str, Any]]:
        """The sections of a file for `dynamo serve -f`.

        Raises `NotCarried` with all reasons if there is no server, or if `dynamo serve` would refuse the file.
        """
        if not self.sections:
            reasons = [f"{note.where}: {note.text}" for note in self.notes if note.kind is Kind.LEFT_OUT]
            raise NotCarried("\n".join([f"{self.source}: no part of it can run under dynamo serve", *reasons]))
        found: dict[str, dict[str, Any]] = {}
        if self.pass_env:
            found[HOST] = {"pass-env": sorted(self.pass_env)}
        if any(section["runtime"] == placeholders.HTTP for section in self.sections.values()):
            found[FRONTEND] = {"port": self.port or 8000}
        found |= {name: {**section, "command": _joined(section["command"])} for name, section in self.sections.items()}
        if models := self._models(found):
            found[MODELS] = models
        try:
            config = Config(sections=with_models(normalise(found, self.source), self.source), source=self.source)
            resolve(with_commands(None, config, None), config, namespace=None)
        except ConfigError as error:
            raise NotCarried(f"{error}; dynamo serve would refuse this configuration") from None
        return found

    def _models(self, found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Models that share the GPUs, taken out of the sections. One that needs no GPU, or has a role, stays there."""
        models = {}
        for section, (name, share) in self.shared.items():
            whole = found[section]
            aliases = whole.pop("aliases", None)  # a service of its own has the names that its server lists
            args = dict(whole[SERVICE_ARGS])
            gpus = args.pop("resources")["gpu"]
            if not gpus or whole["role"] != Role.AGGREGATED:
                continue
            del found[section]
            own = {key: value for key, value in whole.items() if key not in (SERVICE_ARGS, "runtime", "role")}
            del args["workers"]
            models[name] = {**own, **({"aliases": aliases} if aliases else {}), "gpus": gpus, **args, **share}
        return models


def _devices(value: str) -> int | None:
    """`0,1` is two; `all` says nothing about how many."""
    parts = [part for part in value.split(",") if part.strip()]
    return None if value.strip().lower() == "all" else len(parts)


def _joined(words: Sequence[str]) -> str:
    """As `shlex.join`, but a placeholder needs no quotes."""
    return " ".join(word if _UNQUOTED.fullmatch(word) else shlex.quote(word) for word in words)


def _strange(word: str) -> bool:
    named = placeholders.named([word])
    return any(not name.startswith("{port:") and name not in ("{model}", "{watcher}") for name in named)


def at(value: Any, path: Sequence[str | int]) -> Any:
    """The value at a path, None if there is none."""
    for key in path:
        if isinstance(value, Mapping):
            value = value.get(str(key))
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            value = value[key]
        else:
            return None
    return value


def place_of(document: Document, *path: str | int) -> Place:
    """Where the value at this path stands: its line, or that of what holds it."""
    known = next((path[:length] for length in range(len(path), -1, -1) if path[:length] in document.lines), ())
    return Place(document.lines.get(known, 1), ".".join(map(str, path)))


def items(value: Any) -> list[Any]:
    """The items of a list; none of anything else."""
    return value if isinstance(value, list) else []


def mapping(document: Document, *path: str | int) -> dict[str, Any]:
    """The mapping at a path; empty if it is absent. Raises `ConfigError` if it is anything else."""
    found = at(document.value, path)
    if found is None:
        return {}
    if not isinstance(found, dict):
        place = place_of(document, *path)
        raise ConfigError(f"line {place.line}: {place.key} must hold keys and values")
    return found


def variables(document: Document, *path: str | int) -> dict[str, str | None]:
    """`environment` as mapping or list of `NAME=value`. None: the value comes from the shell."""
    found = at(document.value, path)
    if isinstance(found, dict):
        return {name: None if value is None else _text(value) for name, value in found.items()}
    pairs = [_text(item).partition("=") for item in found] if isinstance(found, list) else []
    return {name: value if equals else None for name, equals, value in pairs}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
