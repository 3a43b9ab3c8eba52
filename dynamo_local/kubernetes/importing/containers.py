"""docker-compose services, and `docker run` lines, whose server this host's own installation can run."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynamo_local.config.yaml_text import Document
from dynamo_local.core.secrets import is_secret_variable
from dynamo_local.kubernetes.importing.imported_graph import (
    ImportedGraph,
    Place,
    at,
    items,
    mapping,
    place_of,
    variables,
)
from dynamo_local.kubernetes.importing.servers import LLAMA, Server, add_server, program_of
from dynamo_local.kubernetes.importing.shell_commands import single

_IMAGES: Mapping[str, tuple[str, ...]] = {
    r"(.*/)?vllm-openai.*|(.*/)?vllm/vllm.*": ("vllm", "serve"),
    r"(.*/)?llama\.cpp:server.*": ("llama-server",),
}
"""Images whose entry point is a server: its words. SGLang's image has none."""
_CACHES = ("/root/.cache/huggingface", "/root/.cache/huggingface/hub")
_READ = ("image", "command", "entrypoint", "environment", "ports", "deploy", "healthcheck", "gpus", "volumes")
_REASONS = {
    **dict.fromkeys(("ipc", "shm_size"), "processes of one host share its /dev/shm"),
    **dict.fromkeys(("networks", "network_mode", "expose", "extra_hosts", "hostname"), "one host has one network"),
    "volumes": "no volume is mounted: the command sees this host's files",
    "runtime": "the server runs as a process of this host",
    "restart": "dynamo serve restarts a server that died (docs/configuration.md)",
    "depends_on": "dynamo serve starts all at once, and routes to a server once it is healthy",
    "env_file": "export its variables before dynamo serve, and name them in Host.pass-env",
    "container_name": "the section has the service's name",
    "build": "the server that is installed on this host runs",
    "ulimits": "set them for the shell of dynamo serve",
    "logging": "dynamo serve keeps logs of its own",
    "stop_grace_period": "a worker drains first; say drain-deadline-s in its ServiceArgs",
}
_DOCKER_FLAGS = ("--detach", "--rm", "--init", "--interactive", "--tty", "--privileged")
_DOCKER_KEYS = {"mount": "volumes", "network": "networks"}
_REFERENCE = re.compile(r"\$(?:(\$)|([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:(:?[-?+])([^}]*))?\})")


@dataclass(slots=True)
class Container:
    """The part of a container's description that a process of this host can follow."""

    name: str
    image: str
    words: tuple[str, ...]
    place: Place
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: Mapping[str, str] = field(default_factory=dict)
    """Folder of the container -> folder of this host."""
    gpus: int | None = None
    published: int | None = None
    replicas: int = 1


def add_container(graph: ImportedGraph, container: Container, names: tuple[str, ...] = ()) -> None:
    """Add the server of a container, or a note that says why not."""
    words = tuple(_on_host(word, container.mounts) for word in container.words)
    if program_of(words) is None:
        entry = next((entry for image, entry in _IMAGES.items() if re.fullmatch(image, container.image)), None)
        words = (*entry, *words) if entry is not None else words
    found = program_of(words)
    if found is None:
        graph.left_out(container.place, f"{container.image or 'its image'} starts no server that dynamo serve knows")
        return
    what = "llama-server" if found[0] is LLAMA else found[0].name
    graph.changed(container.place, f"no container: the {what} that is installed on this host runs")
    server = Server(container.name or found[0].section, words, container.place, container.env, names=names)
    server.gpus, server.replicas, server.published = container.gpus, container.replicas, container.published
    add_server(graph, server)


def is_docker_run(words: Sequence[str]) -> bool:
    """Whether a command line is `docker run …` or podman's."""
    return len(words) > 2 and words[0].rpartition("/")[2] in ("docker", "podman") and words[1] == "run"


def add_docker_run(
    graph: ImportedGraph,
    words: Sequence[str],
    name: str,
    place: Place,
    names: tuple[str, ...] = (),
    port: int | None = None,
) -> None:
    """The server of a `docker run` line. `port` is what the source says about where clients reach it."""
    rest, env, gpus, published = list(words[2:]), dict[str, str](), None, port
    mounts: dict[str, str] = {}
    entry: tuple[str, ...] = ()
    while rest and rest[0].startswith("-"):
        option, equals, value = rest.pop(0).partition("=")
        if option in _DOCKER_FLAGS or re.fullmatch(r"-[itd]+", option):
            continue
        value = value if equals else (rest.pop(0) if rest else "")
        if option in ("-e", "--env"):
            key, has_value, text = value.partition("=")
            if has_value:
                env[key] = text
            else:
                graph.secret(Place(place.line, f"{place.key}: {option} {key}"), f"export {key} before dynamo serve")
                graph.pass_env.add(key)
        elif option == "--gpus":
            gpus = _device_count(value)
        elif option in ("-p", "--publish"):
            published = port or _host_port(value)
        elif option == "--entrypoint":
            entry = (value,)
        elif option == "--name":
            name = name or value
        elif option in ("-v", "--volume"):
            _mount(graph, mounts, value, Place(place.line, f"{place.key}: {option} {value}"), ".")
        else:
            key = option.lstrip("-").replace("-", "_")
            why = _REASONS.get(_DOCKER_KEYS.get(key, key), "an option of the container")
            graph.left_out(Place(place.line, f"{place.key}: {option} {value}"), why)
    image = rest.pop(0) if rest else ""
    add_container(graph, Container(name, image, (*entry, *rest), place, env, mounts, gpus, published), names)


def import_compose(graph: ImportedGraph, document: Document, env: Mapping[str, str]) -> None:
    """Add the servers of a docker-compose file. `env` fills `${NAME}`."""
    graph.keys_left_out(
        document,
        (),
        ("services", "version"),
        {"name": "say it as the namespace (-n)", **{key: _REASONS[key] for key in ("networks", "volumes")}},
    )
    for name in mapping(document, "services"):
        path = ("services", name)
        service = mapping(document, *path)
        place = place_of(document, *path)
        known, missing = _filled(service, env)
        if missing is not None:
            graph.left_out(place, f"it needs ${{{missing}}}, which has no default: export {missing} and import again")
            continue
        if "profiles" in service:
            graph.left_out(place, "it belongs to a profile, which only `--profile` starts")
            continue
        _service(graph, document, path, known)


def _service(graph: ImportedGraph, document: Document, path: tuple[str, ...], service: Mapping[str, Any]) -> None:
    place = place_of(document, *path)
    words = (*_words(service.get("entrypoint"), place), *_words(service.get("command"), place))
    container = Container(path[-1], str(service.get("image") or ""), words, place)
    resolved = Document({path[0]: {path[1]: service}}, document.lines)
    env: dict[str, str] = {}
    for name, value in variables(resolved, *path, "environment").items():
        if value is None:
            graph.pass_env.add(name)
            graph.secret(place_of(document, *path, "environment"), f"export {name} before dynamo serve")
        else:
            env[name] = value
    container.env = env
    mounts: dict[str, str] = {}
    for index, volume in enumerate(items(service.get("volumes"))):
        where = place_of(document, *path, "volumes", index)
        _mount(graph, mounts, volume, where, os.path.dirname(graph.source))
    container.mounts = mounts
    container.gpus = _gpus(resolved, path)
    replicas = at(service, ("deploy", "replicas"))
    container.replicas = replicas if isinstance(replicas, int) and 1 <= replicas <= 64 else 1
    ports = service.get("ports")
    if isinstance(ports, list) and ports:
        first = ports[0]
        container.published = _host_port(
            str(first.get("published", "")) + ":0" if isinstance(first, dict) else str(first)
        )
    add_container(graph, container)
    _unread(graph, document, path, service)


def _unread(graph: ImportedGraph, document: Document, path: tuple[str, ...], service: Mapping[str, Any]) -> None:
    graph.keys_left_out(document, path, _READ, _REASONS)
    deploy = service.get("deploy")
    for key in deploy if isinstance(deploy, dict) else ():
        if key not in ("replicas", "resources"):
            graph.left_out(place_of(document, *path, "deploy", key), "of a swarm")
    for index, port in enumerate(items(service.get("ports"))):
        if index:
            graph.left_out(place_of(document, *path, "ports", index), f"{port}: a server has one port here")
    for bound in ("limits", "reservations"):
        for key in mapping(document, *path, "deploy", "resources", bound):
            if key != "devices":
                where = place_of(document, *path, "deploy", "resources", bound, key)
                graph.left_out(where, "say cpu and memory in ServiceArgs.resources")
    if "healthcheck" in service:
        graph.changed(place_of(document, *path, "healthcheck"), "dynamo serve asks the server's /health itself")


def _mount(graph: ImportedGraph, mounts: dict[str, str], volume: Any, place: Place, folder: str) -> None:
    """Note a folder of this host that the container sees elsewhere (`./models:/data:ro`, or compose's long form)."""
    if isinstance(volume, dict):
        source, target = str(volume.get("source") or ""), str(volume.get("target") or "")
    else:
        source, _, rest = str(volume).partition(":")
        target = rest.partition(":")[0]
    target = target.rstrip("/")
    if target in _CACHES:
        graph.changed(place, "this host's own cache of models is used")
    elif target and source[:1] in ("/", "~", "."):
        mounts[target] = os.path.abspath(os.path.join(folder, os.path.expanduser(source)))
        graph.changed(place, f"the command names {mounts[target]} instead of {target}")
    else:
        graph.left_out(place, _REASONS["volumes"])


def _on_host(word: str, mounts: Mapping[str, str]) -> str:
    """A word of the command, with a path of the container (also behind `--option=`) as this host's path."""
    option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
    for target in sorted(mounts, key=len, reverse=True):
        if value == target or value.startswith(target + "/"):
            return f"{option}{equals}{mounts[target]}{value.removeprefix(target)}"
    return word


def _words(given: Any, place: Place) -> tuple[str, ...]:
    """A list of words, or a text that is split as a shell does."""
    if given is None:
        return ()
    if isinstance(given, list):
        return tuple(map(str, given))
    line = single(" ".join(str(given).split("\n")), {})
    if line is None:
        return ("sh", "-c", str(given))
    return (*(f"{name}={value}" for name, value in line.env.items()), *line.words)


def _filled(value: Any, env: Mapping[str, str]) -> tuple[Any, str | None]:
    """All texts with `${NAME}` filled in, and the first name without value and default."""
    missing: str | None = None

    def fill(match: re.Match[str]) -> str:
        nonlocal missing
        if match[1]:
            return "$"
        name, how, other = match[2] or match[3], match[4], match[5]
        if env.get(name) or (name in env and how in (None, "-", "?")):
            return other if how in ("+", ":+") else env[name]
        if how in ("-", ":-", "+", ":+"):
            return other if how.endswith("-") else ""
        missing = missing or name
        return ""

    def walk(part: Any, key: str = "") -> Any:
        if isinstance(part, dict):
            return {name: walk(item, name) for name, item in part.items()}
        if isinstance(part, list):
            return [walk(item) for item in part]
        if not isinstance(part, str):
            return part
        name, equals, reference = part.partition("=")
        bare = re.fullmatch(r"\$\{?([A-Za-z_]\w*)(:\?[^}]*)?\}?", reference if equals else part)
        if bare is not None and bare[1] not in env:  # `HF_TOKEN=${HF_TOKEN}`: the shell of dynamo serve gives it
            own = name if equals else key
            if own == bare[1] or is_secret_variable(own):
                return own if equals else None
        return _REFERENCE.sub(fill, part)

    return walk(value), missing


def _gpus(document: Document, path: tuple[str, ...]) -> int | None:
    given = at(document.value, (*path, "gpus"))
    if given is not None:
        return _device_count(str(given)) if isinstance(given, str | int) else None
    devices = at(document.value, (*path, "deploy", "resources", "reservations", "devices"))
    for device in devices if isinstance(devices, list) else ():
        if isinstance(device, dict) and "gpu" in (items(device.get("capabilities")) or ["gpu"]):
            ids, count = device.get("device_ids"), device.get("count")
            return len(ids) if isinstance(ids, list) else _device_count(str(count))
    return None


def _device_count(text: str) -> int | None:
    """`2`, `device=0,1`, `"device=0"`; `all` says nothing about how many."""
    plain = text.strip("\"'")
    name, equals, ids = plain.partition("=")
    if equals and name == "device":
        return len(ids.split(","))
    return int(plain) if plain.isdigit() and len(plain) < 4 else None


def _host_port(text: str) -> int | None:
    """The host's side of `8000:8000`, `127.0.0.1:8000:8000`, `8000-8001:8000-8001`."""
    parts = text.split("/")[0].split(":")
    port = parts[-2] if len(parts) > 1 else parts[0]
    first = port.partition("-")[0]
    return int(first) if first.isdigit() and 0 < int(first) < 65536 else None
