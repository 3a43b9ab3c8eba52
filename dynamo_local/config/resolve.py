"""Decorators <- YAML <- command line: the graph as it will run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from dynamo_local.config.loading import COMMON, HOST, PLANNER, SERVICE_ARGS, Config
from dynamo_local.config.planner import PlannerConfig
from dynamo_local.config.planner_section import planner_section
from dynamo_local.config.schema import ServiceArgs
from dynamo_local.core.fleet.states import ROLES
from dynamo_local.core.gpu_shares import Sharing
from dynamo_local.core.types import GraphSpec, Role, ServiceSpec, floor_workers
from dynamo_local.errors import ConfigError
from dynamo_local.sdk.checks import check_namespace, listing, nearest, parse_resources, parse_workers
from dynamo_local.sdk.loader import LoadedGraph
from dynamo_local.sdk.service import DynamoService
from dynamo_local.sdk.settings import validate_section

# --- colocation
# Which services run in another's processes: what the graph's links and `ServiceArgs.colocate` say, checked.
#
# A service that does is a *guest*; the one whose worker it runs in is its *host*.

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


DEFAULT_NAMESPACE = "dynamo"
ROUTER = "Router"


def resolve(graph: LoadedGraph, config: Config, *, namespace: str | None) -> GraphSpec:
    """Merge what the decorators say with the configuration, and check all of it.

    The namespace is the command line's, else the graph's, else `dynamo`. Raises `ConfigError`.
    """
    try:
        name = check_namespace(namespace if namespace is not None else graph.namespace or DEFAULT_NAMESPACE)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    _check_sections(graph, config)
    spec = GraphSpec(namespace=name, target=graph.target, services=_services(graph, config))
    _check_router(config.source, spec)
    if PLANNER in config.sections:
        planner = planner_config(graph, config)
        check_planner(planner, spec)
        check_start(planner, spec)
    return spec


def planner_config(graph: LoadedGraph, config: Config) -> PlannerConfig:
    """The `Planner` section, or the defaults. A graph's own Planner service with a model of its own keeps its keys."""
    service = graph.services.get(PLANNER)
    own = service is not None and service.config_model is not None
    section = {} if own else {**config.planner_targets, **config.service(PLANNER)}
    return planner_section(f"{config.source}: {PLANNER}", section)


def planner_starts(graph: LoadedGraph, config: Config, *, flag: bool | None) -> bool:
    """Whether the load planner starts with the graph: as the command line's flag says, else if there is a section
    that does not say `enabled: false`. A section of a graph's own Planner service is that service's."""
    if flag is not None:
        return flag
    return PLANNER in config.sections and PLANNER not in graph.services and planner_config(graph, config).enabled


def planned_components(graph: GraphSpec) -> tuple[str | None, str]:
    """The prefill component (None in an aggregated graph) and the decode one that a load planner moves.

    Raises `ConfigError` where it cannot know which: it moves one component of each role.
    """
    prefill = [spec.name for spec in graph.services if spec.role is Role.PREFILL]
    decode = [spec.name for spec in graph.services if spec.role in (Role.DECODE, Role.AGGREGATED)]
    if shared := [spec.name for spec in graph.services if spec.sharing is not None]:
        raise ConfigError(
            f"Planner: {listing(shared)} share the GPUs by the section Models, which decides by itself: leave one of "
            "the two out (docs/models.md)"
        )
    if len(decode) != 1:
        there = f"it has {listing(decode)}" if decode else "it has none"
        raise ConfigError(f"Planner: it scales a graph with one decode (or aggregated) component; {there}")
    if len(prefill) > 1:
        raise ConfigError(
            f"Planner: a planner scales a graph with one prefill component, but this one has {listing(prefill)}"
        )
    return (prefill[0] if prefill else None), decode[0]


def _check_sections(graph: LoadedGraph, config: Config) -> None:
    known = [*graph.services, COMMON, HOST, PLANNER]
    for name in config.sections:
        if name in known:
            continue
        declared = {dep.on.name for service in graph.services.values() for dep in service.depends.values()}
        why = "does not run in this graph (nothing links it)" if name in declared else "is no service of this graph"
        raise ConfigError(
            f"{config.source}: the section {name!r} {why}; sections: {listing(known)}{nearest(name, known)}",
            at=(name,),
        )

    if SERVICE_ARGS in config.sections.get(PLANNER, {}) and PLANNER not in graph.services:
        raise ConfigError(f"{config.source}: Planner: ServiceArgs has no effect, this graph has no Planner service")


def _services(graph: LoadedGraph, config: Config) -> tuple[ServiceSpec, ...]:
    """Those that have workers, each with its guests; a guest's variables are its host's."""
    hosts = hosts_of(graph, config)
    specs = [_service_spec(service, graph, config) for service in graph.services.values()]
    return tuple(
        replace(
            spec,
            guests=(guests := tuple(each for each in specs if hosts.get(each.name) == spec.name)),
            envs={name: value for each in (*guests, spec) for name, value in each.envs.items()},
        )
        for spec in specs
        if spec.name not in hosts
    )


def _service_spec(service: DynamoService[Any], graph: LoadedGraph, config: Config) -> ServiceSpec:
    where = f"{config.source}: {service.name}"
    values = config.service(service.name)
    if service.config_model is not None:
        validate_section(service.config_model, where, values)
    args = validate_section(ServiceArgs, f"{where}.{SERVICE_ARGS}", config.service_args(service.name))
    try:
        least = 1 if args.sharing is None else 0
        workers = service.workers if args.workers is None else parse_workers(args.workers, least)
        resources = parse_resources(args.resources, base=service.resources)
    except ValueError as error:  # its text begins with the key
        key = str(error).partition(" ")[0].split(".")
        raise ConfigError(f"{where}.{SERVICE_ARGS}: {error}", at=(service.name, SERVICE_ARGS, *key)) from None
    limit = _max_workers(service)
    if limit is not None and workers > limit:
        why = f" (a {service.role} has one port)" if ROLES[service.role].one_port else ""
        raise ConfigError(f"{where}.{SERVICE_ARGS}: workers is {workers}, but at most {limit} can run{why}")
    return ServiceSpec(
        name=service.name,
        role=service.role,
        workers=workers,
        resources=resources,
        envs={**service.envs, **(args.envs or {})},
        config=values,
        depends=tuple(dict.fromkeys(on.name for on in graph.bindings(service.name).values() if on is not None)),
        endpoints=tuple(service.endpoints),
        start_deadline_s=args.start_deadline_s,
        drain_deadline_s=args.drain_deadline_s,
        max_workers=limit,
        runtime=getattr(service.inner, "runtime", None),
        target=graph.targets.get(service.name),
        flippable=args.flippable,
        standby=args.standby,
        sharing=None if args.sharing is None else Sharing(**args.sharing.model_dump(include=_SHARING)),
    )


_SHARING = {each.name for each in fields(Sharing)}


def _max_workers(service: DynamoService[Any]) -> int | None:
    """The class's `max_workers`, where it has one; a frontend listens on one port."""
    limit = getattr(service.inner, "max_workers", 1 if ROLES[service.role].one_port else None)
    return None if limit is None else int(limit)


def _check_router(source: str, graph: GraphSpec) -> None:
    """`router: kv` has an effect only where something knows what the workers have cached."""
    if any(spec.name.endswith(ROUTER) for spec in graph.components):  # `qwen_Router` of a model
        return
    for spec in graph.components:
        if spec.config.get("router") == "kv":
            raise ConfigError(
                f"{source}: {spec.name}: router is kv, but the graph has no {ROUTER} service: take "
                "graphs.agg_router or graphs.disagg_router, link one, or choose least-loaded, kv-load, round-robin "
                "or random"
            )


def not_in_a_pod() -> ConfigError:
    """The arbiter carries nothing out on Kubernetes."""
    return ConfigError(
        "Planner: environment kubernetes is for a planner in a pod, whose graph Dynamo's operator runs: "
        "`python -m dynamo_local.planner --environment kubernetes --config …` (docs/kubernetes-planner.md)"
    )


def check_planner(planner: PlannerConfig, graph: GraphSpec) -> None:
    """Check the options about engines and models against the graph.

    Raises `ConfigError` that names the option.
    """
    if planner.environment == "kubernetes":
        raise not_in_a_pod()
    _check_model_name(planner, graph)
    _check_mode(planner, graph)
    _check_backend(planner, graph)
    if planner.namespace not in (None, graph.namespace):
        raise ConfigError(f"Planner: namespace is {planner.namespace!r}, but the graph's is {graph.namespace!r}")
    smallest, floors, needs = 0, 0, list[str]()
    for spec in _planned(graph):
        option = "prefill_engine_num_gpu" if spec.role is Role.PREFILL else "decode_engine_num_gpu"
        given = getattr(planner, option)
        if given is not None and given != spec.resources.gpu:
            raise ConfigError(
                f"Planner: {option} is {given}, but {spec.name} asks for {spec.resources.gpu} GPUs per worker; "
                f"leave {option} out, or make them agree"
            )
        smallest += spec.resources.gpu
        floor = _floor(planner, spec)
        floors += spec.resources.gpu * floor
        needs.append(f"{floor} × {spec.resources.gpu} of {spec.name}")
    if smallest > planner.max_gpu_budget:
        raise ConfigError(
            f"Planner: max_gpu_budget is {planner.max_gpu_budget}, but one worker of each role needs {smallest} GPUs"
        )
    if floors > planner.max_gpu_budget:
        raise ConfigError(
            f"Planner: max_gpu_budget is {planner.max_gpu_budget}, but the least numbers of workers "
            f"({_floor_text(planner)}) need {floors} GPUs: {', '.join(needs)}; raise the budget, or lower the floor"
        )


def check_start(planner: PlannerConfig, graph: GraphSpec) -> None:
    """Whether the workers that the graph starts with are within the budget. Raises `ConfigError`."""
    held = sum(spec.workers * spec.resources.gpu for spec in _planned(graph))
    if held > planner.max_gpu_budget:
        raise ConfigError(
            f"Planner: max_gpu_budget is {planner.max_gpu_budget}, but the graph starts with {held} GPUs; "
            "raise it, or start fewer workers"
        )


def _check_mode(planner: PlannerConfig, graph: GraphSpec) -> None:
    """Dynamo's `mode` says what the graph is."""
    if planner.policy != "throughput-load" or planner.mode is None:
        return
    disaggregated = any(spec.role is Role.PREFILL for spec in graph.services)
    if disaggregated is (planner.mode == "agg"):
        there = "has a prefill component: disagg, prefill or decode" if disaggregated else "is aggregated: agg"
        raise ConfigError(f"Planner: mode is {planner.mode}, but the graph {there}; leave mode out to have what it is")


OWN_WORKERS = ("VllmWorker", "PrefillWorker")
"""They run vLLM or the sim engine, and nothing else."""


def _check_backend(planner: PlannerConfig, graph: GraphSpec) -> None:
    for spec in _planned(graph):
        if planner.backend == "sglang" and spec.runtime is None and spec.name in OWN_WORKERS:
            raise ConfigError(
                f"Planner: backend is sglang, but {spec.name} runs vLLM or the sim engine; leave backend out, or run "
                "SGLang's server as a command (docs/http-runtime.md)"
            )


def _floor(planner: PlannerConfig, spec: ServiceSpec) -> int:
    """Its fewest workers by the planner's options; 0 where it has none, or leaves that role alone."""
    if planner.policy in ("sla", "slo"):  # each role holds min_gpu_budget, as Dynamo's first planners count it
        return max(planner.min_endpoint, floor_workers(planner.min_gpu_budget, spec.resources.gpu))
    if planner.policy != "throughput-load":
        return 0
    role = "prefill" if spec.role is Role.PREFILL else "decode"
    if planner.mode not in (None, "disagg", "agg", role):
        return 0
    own: int | None = getattr(planner, f"{role}_min_endpoint")
    return planner.min_endpoint if own is None else own


def _floor_text(planner: PlannerConfig) -> str:
    if planner.policy in ("sla", "slo"):
        return f"min_endpoint {planner.min_endpoint}, and min_gpu_budget {planner.min_gpu_budget} for each role"
    return "min_endpoint"


def _planned(graph: GraphSpec) -> list[ServiceSpec]:
    return [spec for spec in graph.services if ROLES[spec.role].computes]


def _check_model_name(planner: PlannerConfig, graph: GraphSpec) -> None:
    for spec in graph.services:
        served = _served_model_name(spec.config)
        if spec.role is Role.FRONTEND and served and planner.served_model_name not in (None, served):
            raise ConfigError(
                f"Planner: served_model_name is {planner.served_model_name!r}, "
                f"but {spec.name} serves {served!r}; make them agree"
            )


def _served_model_name(section: Mapping[str, Any]) -> str | None:
    name = section.get("served_model_name")
    return name if isinstance(name, str) else None
