"""llama-swap's models and process-compose's processes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from dynamo_local.components.commands import launch as placeholders
from dynamo_local.config.yaml_text import Document
from dynamo_local.core.types import Role
from dynamo_local.kubernetes.importing.containers import add_docker_run, is_docker_run
from dynamo_local.kubernetes.importing.imported_graph import ImportedGraph, Place, at, mapping, place_of, variables
from dynamo_local.kubernetes.importing.servers import Server, add_server, program_of
from dynamo_local.kubernetes.importing.shell_commands import single

# --- llama-swap

LLAMA_SWAP_PORT = 8080
_MODEL_READ = ("cmd", "proxy", "env", "aliases", "checkEndpoint", "macros", "useModelName", "ttl")
_SHARED = "a GPU goes to the model whose requests need it most (docs/models.md); say floor, cap or weight"
_SWAP_REASONS = {
    **dict.fromkeys(("groups", "matrix"), _SHARED),
    "hooks": "a model that shall run from the start has a floor of 1",
    "startPort": "each worker takes a free port",
    "apiKeys": "put the keys into a file, and say `api-key: file:PATH` in Frontend",
    "peers": "models of other hosts: the Frontend routes to workers of this host",
    "cmdStop": "a worker drains, then gets SIGTERM",
    "concurrencyLimit": "say max-inflight in Frontend",
    "filters": "the Frontend passes bodies unchanged",
    **dict.fromkeys(("name", "description"), "a label: /v1/models has the model's id"),
    "unlisted": "/v1/models lists every model",
    "metadata": "the Frontend passes the server's own answer on",
    **dict.fromkeys(("logLevel", "logTimeFormat", "logToStdout"), "dynamo logs shows all logs"),
}
_MACRO = re.compile(r"\$\{([A-Za-z0-9_.-]+)\}")
_MACRO_DEPTH = 20


def import_llama_swap(graph: ImportedGraph, document: Document, env: Mapping[str, str]) -> None:
    """Add each of llama-swap's models. They share the GPUs; one that needs none is a service of its own."""
    graph.port = LLAMA_SWAP_PORT
    graph.keys_left_out(document, (), ("models", "macros", "globalTTL", "healthCheckTimeout"), _SWAP_REASONS)
    wait_s = at(document.value, ("healthCheckTimeout",))
    waits = {"max-wait-s": wait_s} if _seconds(wait_s) else {}
    shared = mapping(document, "macros")
    for model in mapping(document, "models"):
        path = ("models", model)
        place = place_of(document, *path, "cmd")
        macros = {**shared, **mapping(document, *path, "macros"), "MODEL_ID": model, "PORT": "{port:http}"}
        text, unknown = _expanded(str(mapping(document, *path).get("cmd") or ""), macros, env)
        graph.keys_left_out(document, path, _MODEL_READ, _SWAP_REASONS)
        if unknown is not None:
            graph.left_out(place, f"{unknown} is no macro of this file")
            continue
        before = set(graph.sections)
        _model(graph, document, model, text, place)
        ttl = at(document.value, (*path, "ttl"))
        idle_s = ttl if _seconds(ttl) else at(document.value, ("globalTTL",))
        for section in set(graph.sections) - before:
            graph.shared[section] = (model, {**waits, **({"idle-s": idle_s} if _seconds(idle_s) else {})})


def _seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _model(graph: ImportedGraph, document: Document, model: str, text: str, place: Place) -> None:
    path = ("models", model)
    lines = [line for line in text.splitlines() if not line.strip().startswith("#")]
    try:
        words = tuple(shlex.split(" ".join(line.removesuffix("\\") for line in lines)))
    except ValueError as error:
        graph.left_out(place, f"it cannot be split into words: {error}")
        return
    aliases = at(document.value, (*path, "aliases"))
    names = (model, *map(str, aliases if isinstance(aliases, list) else ()))
    if is_docker_run(words):
        add_docker_run(graph, words, model, place, names, LLAMA_SWAP_PORT)
        return
    if program_of(words) is None:
        graph.left_out(place, f"{words[0] if words else 'an empty command'}: no server of vLLM, SGLang or llama.cpp")
        return
    proxy = str(at(document.value, (*path, "proxy")) or "http://localhost")
    if re.match(r"https?://(localhost|127\.|\[::1\]|0\.0\.0\.0)", proxy) is None:
        graph.left_out(place_of(document, *path, "proxy"), f"{proxy} is another host")
        return
    if (renamed := at(document.value, (*path, "useModelName"))) is not None:
        graph.changed(place_of(document, *path, "useModelName"), f"the server calls its model {model}, not {renamed}")
    health = at(document.value, (*path, "checkEndpoint"))
    if health == "none":
        graph.changed(place_of(document, *path, "checkEndpoint"), "a server is ready once /health answers 200")
        health = None
    env = {name: value or "" for name, value in variables(document, *path, "env").items()}
    server = Server(model, words, place, env, names=names, published=LLAMA_SWAP_PORT)
    server.names_place = place_of(document, *path, "aliases")
    server.health = None if health is None else str(health)
    add_server(graph, server)


def _expanded(text: str, macros: Mapping[str, Any], env: Mapping[str, str]) -> tuple[str, str | None]:
    """The text with macros and `${env.NAME}` filled in, and the first that is unknown. Macros may hold macros."""
    for _ in range(_MACRO_DEPTH):
        unknown: str | None = None

        def fill(match: re.Match[str]) -> str:
            nonlocal unknown
            name = match[1]
            if name in macros:
                return str(macros[name])
            if name.startswith("env.") and name[4:] in env:
                return env[name[4:]]
            unknown = unknown or match[0]
            return match[0]

        text = _MACRO.sub(fill, text)
        if unknown is not None or _MACRO.search(text) is None or len(text) > 1 << 16:
            return text, unknown
    return text, "a macro that holds itself"


# --- process-compose

_PROCESS_READ = ("command", "environment", "working_dir", "replicas", "readiness_probe", "disabled")
_PROCESS_REASONS = {
    "depends_on": "dynamo serve starts all at once, and routes to a server once it is healthy",
    "availability": "dynamo serve restarts what died (`restart` in Host)",
    "liveness_probe": "dynamo serve asks servers itself, and watches other processes",
    "shutdown": "a worker drains, then gets SIGTERM; say stop-timeout-s",
    "namespace": "a graph has one namespace",
    **dict.fromkeys(("name", "description"), "a label"),
    "is_daemon": "the command must stay in the foreground",
    "is_tty": "processes have no terminal",
    "log_location": "dynamo logs shows all logs",
    "log_configuration": "dynamo logs shows all logs",
    "ready_log_line": "a process is ready after settle-s, or once its health-url answers",
    "env_cmds": "export these variables before dynamo serve, and name them in Host.pass-env",
    "log_level": "dynamo logs shows all logs",
    "processes": "",
}


def import_process_compose(graph: ImportedGraph, document: Document, env: Mapping[str, str]) -> None:
    """Add a section for each process: a known server, or a plain command."""
    graph.keys_left_out(document, (), ("processes", "environment", "version"), _PROCESS_REASONS)
    shared = {name: value or "" for name, value in variables(document, "environment").items()}
    for name in mapping(document, "processes"):
        path = ("processes", name)
        process = mapping(document, *path)
        place = place_of(document, *path)
        if process.get("disabled") is True:
            graph.left_out(place, "it is disabled")
            continue
        graph.keys_left_out(document, path, _PROCESS_READ, _PROCESS_REASONS)
        own = {key: value or "" for key, value in variables(document, *path, "environment").items()}
        _process(graph, document, name, {**shared, **own}, env)


def _process(
    graph: ImportedGraph, document: Document, name: str, own: Mapping[str, str], env: Mapping[str, str]
) -> None:
    path = ("processes", name)
    process = mapping(document, *path)
    place = place_of(document, *path, "command")
    text = str(process.get("command") or "").strip()
    if not text:
        graph.left_out(place, "it has no command")
        return
    replicas = process.get("replicas")
    workers = replicas if isinstance(replicas, int) and 1 <= replicas <= 64 else 1
    line = single(text, {**env, **own})
    server = line is not None and program_of(line.words) is not None
    if line is not None and is_docker_run(line.words):
        add_docker_run(graph, line.words, name, place)
    elif line is not None and server:
        if line.unknown is not None:
            graph.left_out(place, f"{line.unknown} is not known here: write its value out")
            return
        folder = _folder(graph, document, path)
        words = (*folder, *line.words)
        add_server(graph, Server(name, words, place, {**own, **line.env}, replicas=workers))
        if "readiness_probe" in process:
            graph.changed(place_of(document, *path, "readiness_probe"), "dynamo serve asks the server's /health itself")
    else:
        _plain(graph, document, name, own, workers)


def _folder(graph: ImportedGraph, document: Document, path: tuple[str, ...]) -> tuple[str, ...]:
    folder = at(document.value, (*path, "working_dir"))
    if folder is None:
        return ()
    graph.changed(place_of(document, *path, "working_dir"), f"{folder} is relative to the folder of dynamo serve")
    return ("env", "-C", str(folder))


def _plain(graph: ImportedGraph, document: Document, name: str, own: Mapping[str, str], workers: int) -> None:
    """A command that is no known server: a process of role `other`."""
    path = ("processes", name)
    text = str(mapping(document, *path)["command"]).strip()
    place = place_of(document, *path, "command")
    envs, gpus = graph.environment(own, place)
    words = (*_folder(graph, document, path), "bash", "-c", text)
    if placeholders.named([text]):
        graph.left_out(place, f"{placeholders.named([text])[0]} would be a placeholder of `command:`")
        return
    section: dict[str, Any] = {"command": list(words), "runtime": placeholders.NONE, "role": str(Role.OTHER)}
    probe = at(document.value, (*path, "readiness_probe", "http_get"))
    if isinstance(probe, dict):
        port, route = probe.get("port", 80), str(probe.get("path") or "/")
        section["health-url"] = f"{probe.get('scheme') or 'http'}://{probe.get('host') or '127.0.0.1'}:{port}{route}"
    elif "readiness_probe" in mapping(document, *path):
        graph.left_out(place_of(document, *path, "readiness_probe"), "only http_get can be carried over")
    args: dict[str, Any] = {"workers": workers}
    if gpus:
        args["resources"] = {"gpu": gpus}
    if envs:
        args["envs"] = envs
    graph.changed(place, "a process beside the servers: started, restarted and ended, without requests")
    graph.add(name, section, args, place)
