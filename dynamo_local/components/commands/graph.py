"""Sections of the configuration that are commands, as services of a graph: beside a Python graph, or without one."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_local.components.commands import launch as launching
from dynamo_local.components.commands import launch as placeholders
from dynamo_local.components.commands.config import CommandConfig
from dynamo_local.components.commands.launch import DYNAMO_1X, HTTP, NONE
from dynamo_local.config.loading import COMMON, HOST, PLANNER, Config
from dynamo_local.config.models import COMMAND
from dynamo_local.core.fleet.states import ROLES
from dynamo_local.core.types import Role
from dynamo_local.errors import ConfigError
from dynamo_local.sdk.checks import check_service_name, listing, nearest
from dynamo_local.sdk.loader import LoadedGraph, load_graph
from dynamo_local.sdk.service import DynamoService
from dynamo_local.sdk.settings import validate_section

if TYPE_CHECKING:
    from dynamo_local.components.commands.runner import CommandWorker


# --- The module of each runtime's driver. It is imported only where that runtime is used.

MODULES = {
    DYNAMO_1X: "dynamo_local.components.commands.dynamo_1x",
    HTTP: "dynamo_local.components.commands.http_server",
    NONE: "dynamo_local.components.commands.process",
}


def _module(runtime: str) -> Any:
    return import_module(MODULES[runtime])


def component_of(runtime: str) -> type[CommandWorker]:
    """The component class of a runtime's workers."""
    component: type[CommandWorker] = _module(runtime).COMPONENT
    return component


def config_of(runtime: str) -> type[CommandConfig]:
    """The model of its section."""
    config: type[CommandConfig] = _module(runtime).CONFIG
    return config


NO_PACKAGE = 9
FIND_PACKAGE = f"import importlib.util, sys; sys.exit({NO_PACKAGE} * (importlib.util.find_spec(sys.argv[1]) is None))"
FIND_TIMEOUT_S = 10.0

HTTP_FRONTEND = "dynamo_local.components.commands.http_frontend:ProxyFrontend"
"""Proxies to the workers of runtime `http` where no Python graph brings a Frontend."""


def is_command(section: Mapping[str, Any]) -> bool:
    """The section says that its service is a command."""
    return COMMAND in section


def with_commands(graph: LoadedGraph | None, config: Config, source: Path | None) -> LoadedGraph:
    """The graph with a service more for each section that has a `command`. `source` names a graph without Python.

    Raises `ConfigError` naming section and key.
    """
    names = [name for name in config.sections if is_command(config.service(name))]
    for name in names:
        if name in (COMMON, HOST, PLANNER):
            raise ConfigError(f"{config.source}: {name} is no service: it cannot have a command")
        if graph is not None and name in graph.services:
            raise ConfigError(
                f"{config.source}: {name} is a service of {graph.target} and has a `command`; rename the section"
            )
    if graph is None and not names:
        raise ConfigError(
            "there is no graph to serve: name one (module:Service), or give a file (-f) in which sections have a "
            "`command`"
        )
    if graph is not None and not names:
        return graph
    added = {name: service_of(name, config.service(name), f"{config.source}: {name}") for name in names}
    _check_planned(config, added)
    targets: dict[str, str] = {}
    services = {**(graph.services if graph is not None else {}), **added}
    if _has_servers(added) and "Frontend" not in services:
        frontend = load_graph(HTTP_FRONTEND, base_dir=Path.cwd()).root
        services, targets = {"Frontend": frontend, **services}, {"Frontend": HTTP_FRONTEND}
    _check_case(config, services)
    if graph is not None:
        return replace(graph, services=services, targets=targets)
    target = str(source.resolve()) if source is not None else config.source
    return LoadedGraph(_root(services.values()), services, None, target, targets=targets)


def service_of(name: str, section: Mapping[str, Any], where: str) -> DynamoService[Any]:
    """The service of one section; `where` names it in errors. Raises `ConfigError`."""
    runtime = section.get("runtime", launching.NONE)
    if not isinstance(runtime, str) or runtime not in MODULES:
        raise ConfigError(
            f"{where}: runtime {runtime!r} is unknown; one of {listing(MODULES)}{nearest(str(runtime), MODULES)}"
        )
    config = config_of(runtime)
    settings = validate_section(config, where, section)
    component = component_of(runtime)
    try:
        check_service_name(name)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None
    one = settings.fixed_ports or ROLES[settings.role].one_port  # two could not listen on the same port
    members = {"__doc__": component.__doc__, "max_workers": 1 if one else None}
    return DynamoService(
        type(name, (component,), members), name=name, dynamo={"role": str(settings.role)}, config=config
    )


def graph_of_worker(sections: Mapping[str, Mapping[str, Any]]) -> LoadedGraph:
    """The worker of a command needs this of its graph: itself, the first of the sections, and the roles that it may
    take."""
    services = {name: service_of(name, section, name) for name, section in sections.items()}
    name = next(iter(services))
    return LoadedGraph(services[name], services, None, name)


def check_commands(
    graph: LoadedGraph, config: Config, environ: Mapping[str, str], *, only_plan: bool
) -> tuple[str, ...]:
    """Whether this host has the programs. Raises `ConfigError`; with `only_plan` (`--dry-run`) notes instead."""
    notes = []
    for name in config.sections:
        section = config.service(name)
        if name not in graph.services or not is_command(section):
            continue
        settings: CommandConfig = validate_section(config_of(section.get("runtime", launching.NONE)), name, section)
        try:
            settings.check_envs(config.service_args(name).get("envs") or {})
        except ValueError as error:
            raise ConfigError(f"{config.source}: {name}.ServiceArgs: {error}") from None
        _check_standby(config, name, settings)
        hooks = [hook for hook in (settings.sleep_hook, settings.wake_hook) if hook is not None]
        words = [settings.words, *map(placeholders.words_of, hooks)]
        for program in dict.fromkeys(program for each in words for program in placeholders.programs(each)):
            if shutil.which(program, path=launching.search_path(environ)) is not None:
                continue
            missing = f"{config.source}: {name}: there is no program {program!r} here"
            if not only_plan:
                raise ConfigError(f"{missing}; install it, or give its whole path in `command`")
            notes.append(missing)
        envs = {**environ, **{key: str(value) for key, value in (config.service_args(name).get("envs") or {}).items()}}
        for python, package in dict.fromkeys(filter(None, map(placeholders.module_of, words))):
            if _has_package(python, package, envs):
                continue
            missing = f"{config.source}: {name}: {python!r} has no module {package!r} here"
            if not only_plan:
                raise ConfigError(f"{missing}; install it there, or name the Python that has it in `command`")
            notes.append(missing)
    return tuple(notes)


def _has_package(python: str, package: str, environ: Mapping[str, str]) -> bool:
    """Whether that Python finds the package, which is not imported. One that does not answer is not judged."""
    program = shutil.which(python, path=launching.search_path(environ))
    if program is None:
        return True  # which is said already
    words = [program, "-c", FIND_PACKAGE, package]
    try:
        done = subprocess.run(
            words, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, timeout=FIND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return True
    return done.returncode != NO_PACKAGE


def _check_standby(config: Config, name: str, settings: CommandConfig) -> None:
    """Raises `ConfigError` for a standby that could never be, and for hooks without one."""
    where = f"{config.source}: {name}"
    wanted = config.service_args(name).get("standby") is not None
    why = settings.why_no_standby()
    if wanted and why is not None:
        raise ConfigError(f"{where}.ServiceArgs.standby: {why}")
    if not wanted and settings.sleep_hook is not None:
        raise ConfigError(f"{where}: sleep-hook and wake-hook have no effect without ServiceArgs.standby (0 will do)")


def _root(services: Iterable[DynamoService[Any]]) -> DynamoService[Any]:
    ordered = sorted(services, key=lambda service: service.role is not Role.FRONTEND)
    return ordered[0]


def _has_servers(services: Mapping[str, DynamoService[Any]]) -> bool:
    """Whether there are servers that need a Frontend in front of them."""
    return any(
        service.inner.runtime == launching.HTTP and ROLES[service.role].computes for service in services.values()
    )


def _check_planned(config: Config, services: Mapping[str, DynamoService[Any]]) -> None:
    """Refuse to plan services whose load cannot be known: the planner would see zeros."""
    if PLANNER not in config.sections:
        return
    for name, service in services.items():
        why = _load_unknown(service.inner.runtime, config.service(name))
        if ROLES[service.role].computes and why is not None:
            raise ConfigError(
                f"{config.source}: {name}: the planner cannot scale a {service.role} {why}, whose load "
                "nobody knows; give it another role or runtime, or remove the section Planner"
            )


def _load_unknown(runtime: str, section: Mapping[str, Any]) -> str | None:
    """Why the section's load cannot be known; None if it can."""
    if runtime == launching.NONE:
        return "of runtime none"
    if runtime == launching.HTTP and section.get("metrics", "") is None:
        return "without metrics"
    return None


def _check_case(config: Config, services: Mapping[str, DynamoService[Any]]) -> None:
    lowered: dict[str, str] = {}
    for name in services:
        twin = lowered.setdefault(name.lower(), name)
        if twin != name:
            raise ConfigError(f"{config.source}: the names {twin!r} and {name!r} differ only in case; rename one")
