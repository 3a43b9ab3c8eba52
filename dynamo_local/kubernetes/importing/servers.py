"""A command line of vLLM, SGLang or llama.cpp, as a section of `runtime: http`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo_local.components.commands.launch import HTTP
from dynamo_local.config.model_graph import TLS
from dynamo_local.core.secrets import is_secret_key
from dynamo_local.core.types import Role
from dynamo_local.kubernetes.importing.imported_graph import API_KEY, ImportedGraph, Place

NIXL_PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"


@dataclass(frozen=True, slots=True)
class Program:
    """How a kind of server is told its port, model and GPUs. `factors` multiply to the number of GPUs.

    `section` is the name of its section, if the source has none.
    """

    name: str
    section: str
    port: int
    models: tuple[str, ...]
    factors: tuple[tuple[str, ...], ...]
    served_names: tuple[str, ...]
    added: tuple[str, ...] = ()
    """Words without which the server does not say its load."""


VLLM = Program(
    "vLLM",
    "Vllm",
    8000,
    ("--model",),
    (("--tensor-parallel-size", "-tp"), ("--pipeline-parallel-size", "-pp"), ("--data-parallel-size", "-dp")),
    ("--served-model-name",),
)
SGLANG = Program(
    "SGLang",
    "Sglang",
    30000,
    ("--model-path", "--model"),
    (("--tensor-parallel-size", "--tp-size", "--tp"), ("--pipeline-parallel-size", "--pp-size"), ("--dp-size", "--dp")),
    ("--served-model-name",),
    ("--enable-metrics",),
)
LLAMA = Program("llama.cpp", "LlamaCpp", 8080, ("--model", "-m"), (), ("--alias", "-a"), ("--metrics",))

MODULES = {"vllm.entrypoints.openai.api_server": VLLM, "sglang.launch_server": SGLANG}
_SUBCOMMANDS = {"vllm": VLLM, "sglang": SGLANG}
_DROPPED: Mapping[str, str] = {
    **dict.fromkeys(TLS, "servers listen on this machine only; TLS is the Frontend's (docs/security.md)"),
    "--api-key": API_KEY,
    "--admin-api-key": API_KEY,
    "--root-path": "the Frontend forwards to a server's own paths",
    "--api-prefix": "the Frontend forwards to a server's own paths",
    "--uds": "the server listens on a port",
    "--allowed-origins": "say it in Frontend (docs/configuration.md)",
    "--nccl-port": "each server takes a free one",
    "--dist-init-addr": "one host",
}
_DROPPED_FLAGS: Mapping[str, str] = {"--disable-log-stats": "without it the server says no load, and nothing scales"}
_IMPOSSIBLE: Mapping[str, str] = {
    "--nnodes": "it spans several hosts",
    "--data-parallel-size-local": "it spans several hosts",
    "--headless": "it is one part of a server on several hosts",
    "--disaggregation-mode": "SGLang's prefill and decode apart need SGLang's own router",
}
_ALONE: Mapping[str, tuple[str, ...]] = {"--nnodes": ("1",), "--disaggregation-mode": ("null",)}
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PREFIXES = re.compile(r"(python[0-9.]*|uv|uvx|run|nohup|exec|env|numactl|nice|taskset|-.*|[0-9a-f,]+|[A-Za-z_]\w*=.*)")


def program_of(words: Sequence[str]) -> tuple[Program, int] | None:
    """The kind of server that a command line starts, and the index of its first option. None: it starts none.

    Words before the program may only be those of Python, `env`, `uv` and the like.
    """
    for index, word in enumerate(words):
        name = word.rpartition("/")[2]
        behind = words[index + 1] if index + 1 < len(words) else ""
        if word == "-m" and behind in MODULES:
            return MODULES[behind], index + 2
        if word == "-m" and behind == "vllm.entrypoints.cli.main" and words[index + 2 : index + 3] == ["serve"]:
            return VLLM, index + 3
        if name in _SUBCOMMANDS and behind == "serve":
            return _SUBCOMMANDS[name], index + 2
        if name.startswith("llama-server"):
            return LLAMA, index + 1
        if not _PREFIXES.fullmatch(name):
            return None
    return None


@dataclass(slots=True)
class Server:
    """A server as its source describes it. `gpus` None: as its options say. `names` is how clients call its model."""

    name: str
    words: tuple[str, ...]
    place: Place
    env: Mapping[str, str] = field(default_factory=dict)
    gpus: int | None = None
    replicas: int = 1
    names: tuple[str, ...] = ()
    names_place: Place | None = None
    published: int | None = None
    """The port where clients reach it, if that is not the one on its command line."""
    health: str | None = None


def add_server(graph: ImportedGraph, server: Server) -> None:
    """Add the server's section, or a note that says why not."""
    found = program_of(server.words)
    assert found is not None
    program, begin = found
    options = Options(server.words[begin:])
    if (why := _impossible(options)) is not None:
        graph.left_out(server.place, why)
        return
    _drop(graph, server.place, options)
    port, host = options.take("--port"), options.take("--host")
    if host is not None and host not in _LOOPBACK:
        graph.changed(server.place, f"--host {host}: the Frontend listens on 127.0.0.1; else say its `host`, `api-key`")
    model = options.take(*program.models) or options.take_first(program is VLLM)
    listens = server.published or (int(port) if port is not None and port.isdigit() else program.port)
    graph.listens(listens, server.place)
    env, devices = graph.environment(server.env, server.place)
    head = [*_prefixed(env), *server.words[:begin]]
    words = [*head, *_model_words(program, server.words[:begin], model), "--host", "127.0.0.1", "--port", "{port:http}"]
    name_of_model = _served_name(graph, program, options, server)
    words += options.words
    if name_of_model:
        words += [program.served_names[0], *(name_of_model if program is VLLM else name_of_model[:1])]
    for word in program.added:
        if word not in options.words:
            words.append(word)
            graph.changed(server.place, f"{word} is added: without it the server does not say its load")
    section: dict[str, Any] = {"command": words, "runtime": HTTP, "role": str(_role(graph, options, server.place))}
    if model is not None:
        section["model"] = model
    if server.health is not None and server.health != "/health":
        section["health"] = server.health
    if name_of_model[1:] and program is VLLM:
        section["aliases"] = list(name_of_model[1:])
    gpus = _gpus(graph, program, options, server, devices)
    args: dict[str, Any] = {"workers": server.replicas, "resources": {"gpu": gpus}, "start-deadline-s": 1800}
    if env:
        args["envs"] = env
    graph.add(server.name, section, args, server.place)


class Options:
    """The options of a command line; `words` are those that are left. `_` and `-` are the same in a name."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)

    def _find(self, names: Sequence[str]) -> tuple[int, str | None] | None:
        for index, word in enumerate(self.words):
            name, equals, value = word.partition("=")
            if name.startswith("-") and (name in names or name.replace("_", "-") in names):
                return index, value if equals else None
        return None

    def get(self, *names: str) -> str | None:
        """The value of the option; None without the option, or without a value."""
        found = self._find(names)
        if found is None or found[1] is not None:
            return None if found is None else found[1]
        behind = self.words[found[0] + 1 : found[0] + 2]
        return behind[0] if behind and not behind[0].startswith("--") else None

    def has(self, name: str) -> bool:
        """Whether the option is given."""
        return self._find([name]) is not None

    def take(self, *names: str, flag: bool = False) -> str | None:
        """Like `get`; the option is removed. The last of several counts."""
        value = None
        while (found := self._find(names)) is not None:
            given = None if flag else self.get(*names)
            del self.words[found[0] : found[0] + (2 if given is not None and found[1] is None else 1)]
            value = given if given is not None else value
        return value

    def take_first(self, positional: bool) -> str | None:
        """The first word, removed, if it is no option."""
        return self.words.pop(0) if positional and self.words and not self.words[0].startswith("-") else None


def _impossible(options: Options) -> str | None:
    for name, why in _IMPOSSIBLE.items():
        if options.has(name) and options.get(name) not in _ALONE.get(name, ()):
            return f"{name} {options.get(name) or ''}".rstrip() + f": {why}"
    return None


def _drop(graph: ImportedGraph, place: Place, options: Options) -> None:
    for name, why in {**_DROPPED, **_DROPPED_FLAGS}.items():
        if options.has(name):
            options.take(name, flag=name in _DROPPED_FLAGS)
            where = Place(place.line, f"{place.key}: {name}")
            (graph.secret if name.endswith("api-key") else graph.left_out)(where, why)
    for word in list(options.words):
        name = word.partition("=")[0]
        if name.startswith("--") and is_secret_key(name) and options.take(name) is not None:
            graph.secret(Place(place.line, f"{place.key}: {name}"), "give it by the server's environment variable")


def _prefixed(env: dict[str, str]) -> tuple[str, ...]:
    """NIXL's side channel needs a port of each worker's own."""
    return ("env", f"{NIXL_PORT}={{port:nixl}}") if env.pop(NIXL_PORT, None) is not None else ()


def _model_words(program: Program, head: Sequence[str], model: str | None) -> tuple[str, ...]:
    if model is None:
        return ()
    positional = program is VLLM and head[-1] == "serve"
    return ("{model}",) if positional else (program.models[0], "{model}")


def _served_name(graph: ImportedGraph, program: Program, options: Options, server: Server) -> tuple[str, ...]:
    """The names of the model in the API, if the source names it beside the command."""
    if not server.names:
        return ()
    before = options.take(*program.served_names)
    if before is not None and before not in server.names:
        graph.changed(server.place, f"{program.served_names[0]} {before}: clients call the model {server.names[0]}")
    if len(server.names) > 1 and program is not VLLM:
        others = ", ".join(server.names[1:])
        graph.left_out(server.names_place or server.place, f"{others}: {program.name} has one name only")
    return server.names


def _role(graph: ImportedGraph, options: Options, place: Place) -> Role:
    text = options.get("--kv-transfer-config")
    if text is None:
        return Role.AGGREGATED
    try:
        given = json.loads(text)
        kind = given.get("kv_role") if isinstance(given, dict) else None
    except ValueError:
        kind = None
    found = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE}.get(str(kind), Role.AGGREGATED)
    if found is Role.AGGREGATED:
        graph.changed(place, f"its kv_role is {kind}: say `role: prefill` or `role: decode` if it has one of them")
    return found


def _gpus(graph: ImportedGraph, program: Program, options: Options, server: Server, devices: int | None) -> int:
    if program is LLAMA:
        layers = options.get("-ngl", "--gpu-layers", "--n-gpu-layers")
        needed = 0 if layers == "0" else 1
    else:
        needed = 1
        for names in program.factors:
            value = options.get(*names)
            needed *= int(value) if value is not None and value.isdigit() and 1 <= int(value) <= 64 else 1
    cpu = options.get("--device") == "cpu" or "VLLM_CPU_KVCACHE_SPACE" in server.env
    given = server.gpus if server.gpus is not None else devices
    if cpu or (given == 0 and program is not LLAMA):
        return 0
    if given is not None and given > needed:
        if program is LLAMA:
            return given
        graph.changed(server.place, f"it saw {given} GPUs, and its options use {needed}: {needed} for each worker")
    if program is LLAMA and given is None and needed:
        graph.changed(server.place, "1 GPU for each worker: say more, or 0 (`gpus`, or in ServiceArgs: resources.gpu)")
    return needed if program is not LLAMA or given is None else given
