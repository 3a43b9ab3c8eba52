"""Which services run in another's processes: what the graph's links and `ServiceArgs.colocate` say, checked.

A service that does is a *guest*; the one whose worker it runs in is its *host*.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from dynamo_local.config.loading import Config
from dynamo_local.config.merge import SERVICE_ARGS
from dynamo_local.config.schema import ServiceArgs
from dynamo_local.core.life.roles import ROLES
from dynamo_local.errors import ConfigError
from dynamo_local.sdk.checks import listing, nearest
from dynamo_local.sdk.loader import LoadedGraph
from dynamo_local.sdk.settings import validate_section

WITH_AN_API = ("vllm",)
"""Engines whose own API runs in the Processor: seconds of imports, and most of its work. It has a process of its own
then, unless the configuration says otherwise: another component's loop would stand still meanwhile."""


def hosts_of(graph: LoadedGraph, config: Config) -> dict[str, str]:
    """Guest -> host, which is no guest itself. Raises `ConfigError` that names the section.

    A link's `colocate` is a proposal: `colocate` in the section of its source replaces it, and so do `ServiceArgs` of
    the target, which are about workers of its own. It does not count where workers have an engine of `WITH_AN_API`.
    """
    within: dict[str, str] = {}
    for host, guest, where in _wishes(graph, config):
        _check_pair(graph, config, host, guest, where)
        if guest in within:
            raise ConfigError(f"{where}: {guest} runs in {within[guest]}'s processes already; keep one")
        within[guest] = host
    hosts = {guest: _host(guest, within, config) for guest in within}
    _check_callers(graph, hosts, config)
    return hosts


def _wishes(graph: LoadedGraph, config: Config) -> Iterator[tuple[str, str, str]]:
    """Host, guest, and where that is said."""
    for name in graph.services:
        where = f"{config.source}: {name}.{SERVICE_ARGS}"
        given = validate_section(ServiceArgs, where, config.service_args(name)).colocate
        for guest in given or ():
            yield name, guest, f"{where}: colocate"
        if given is not None or any(config.service(each).get("engine") in WITH_AN_API for each in graph.services):
            continue
        for edge in graph.edges:
            other = edge.target
            linked = edge.source is graph.services[name] and graph.services.get(other.name) is other
            if edge.colocate and linked and other.workers == 1 and not config.service_args(other.name):
                yield name, other.name, f"{edge.place}: colocate"


def _check_pair(graph: LoadedGraph, config: Config, host: str, guest: str, where: str) -> None:
    if guest not in graph.services:
        raise ConfigError(f"{where}: {guest!r} is no service of this graph; {listing(graph.services)}"
                          f"{nearest(guest, graph.services)}")  # fmt: skip
    own, other = graph.services[host], graph.services[guest]
    if other is own or other is graph.root:
        raise ConfigError(f"{where}: {guest} cannot run in {host}'s processes: it is {_what(other is own)}")
    for service in (own, other):
        if ROLES[service.role].computes or service.resources.gpu:
            raise ConfigError(
                f"{where}: {service.name} has an engine, and so workers of its own, which are scaled, flipped and put "
                "to sleep by themselves; only services without one run together"
            )
        if (runtime := getattr(service.inner, "runtime", None)) is not None:
            raise ConfigError(f"{where}: {service.name} is a command (runtime: {runtime}), which no other process runs")
    args = config.service_args(guest)
    if args or other.workers != 1:
        said = f"{SERVICE_ARGS}.{next(iter(args))}" if args else f"workers={other.workers} in its @service"
        raise ConfigError(
            f"{where}: {guest} has {said}, which is about workers of its own, and in {host}'s processes it has none; "
            f"keep one of the two (so many workers: {host}.{SERVICE_ARGS}.workers)"
        )


def _what(itself: bool) -> str:
    return "that service itself" if itself else "the graph's root"


def _host(guest: str, within: Mapping[str, str], config: Config) -> str:
    """Where the process is: a guest's guest runs with its host."""
    seen, host = [guest], within[guest]
    while host in within:
        if host in seen:
            circle = " in ".join((*seen, host))
            raise ConfigError(f"{config.source}: {SERVICE_ARGS}.colocate goes in a circle: {circle}")
        seen.append(host)
        host = within[host]
    return host


def _check_callers(graph: LoadedGraph, hosts: Mapping[str, str], config: Config) -> None:
    """A guest answers its own process only: whoever calls it must be there."""
    for name, service in graph.services.items():
        for dependency in service.depends.values():
            host = hosts.get(dependency.on.name)
            if host is not None and hosts.get(name, name) != host:
                raise ConfigError(
                    f"{config.source}: {name} calls {dependency.on.name}, which runs in {host}'s processes and answers "
                    f"only there; colocate {name} with {host}, too, or take {dependency.on.name} out of "
                    f"{host}.{SERVICE_ARGS}.colocate"
                )
